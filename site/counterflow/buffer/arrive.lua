#!lua flags=allow-oom
-- A learner takes over, or comes back: from now on only its calls are heard.
-- KEYS: state   ARGV: its term, the server's name, then the terms that it may follow; none: it may follow any
-- Returns term and server's name of the arrival before, or an error where the term is another learner's.
local before, server = unpack(redis.call('HMGET', KEYS[1], 'term', 'server'))
before = before or ''
local allowed = #ARGV == 2 or before == ARGV[1] or before == ''
for i = 3, #ARGV do allowed = allowed or before == ARGV[i] end
if not allowed then return redis.error_reply('SUPERSEDED another learner has taken over') end
redis.call('HSET', KEYS[1], 'term', ARGV[1], 'server', ARGV[2])
return {before, server or ''}
