#!lua flags=allow-oom
-- Take an entry out of the stream untrained, with the reason; what cannot be read goes to the quarantine stream.
-- KEYS: state, stream, buffered, uses, quarantine, payload of the group
-- ARGV: term, entry id, n (empty: no group of the run's), reason, detail, entries that the quarantine keeps (0: not there)
local state, stream, buffered, uses, quarantine, payload = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local term, id, n, reason, detail, kept = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if redis.call('HGET', state, 'term') ~= term then
  return redis.error_reply('SUPERSEDED another learner has taken over')
end
local entry = redis.call('XRANGE', stream, id, id)[1]
local known, tokens, bytes = string.match(redis.call('HGET', buffered, n) or '', '(%S+) (%d+) (%d+)')
if kept ~= '0' and (entry or known == id) then
  local fields = entry and entry[2] or {}
  if known == id then
    table.insert(fields, 'payload')
    table.insert(fields, redis.call('GET', payload) or '')
  end
  redis.call('XADD', quarantine, 'MAXLEN', kept, '*', 'reason', detail, 'entry', id, unpack(fields))
end
redis.call('XDEL', stream, id)
if known == id then
  redis.call('DEL', payload)
  redis.call('HDEL', buffered, n)
  redis.call('HDEL', uses, n)
  redis.call('HINCRBY', state, 'replaced', 1)
  redis.call('HINCRBY', state, 'dropped:' .. reason, 1)
  redis.call('HINCRBY', state, 'tokens_dropped:' .. reason, tokens)
  redis.call('HINCRBY', state, 'tokens_buffered', -tokens)
  redis.call('HINCRBY', state, 'bytes_buffered', -bytes)
elseif entry then
  redis.call('HINCRBY', state, 'strangers', 1)
end
