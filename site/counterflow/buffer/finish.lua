#!lua flags=allow-oom
-- The run is over: what was not trained is abandoned, and counted so.
-- KEYS: state, leases, attempts, stream, buffered, uses
local state, leases, attempts, stream, buffered, uses = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local abandoned = redis.call('HLEN', buffered) + redis.call('ZCARD', leases)
local tokens = redis.call('HGET', state, 'tokens_buffered') or '0'
if abandoned > 0 then
  redis.call('HINCRBY', state, 'dropped:abandoned', abandoned)
  redis.call('HINCRBY', state, 'tokens_dropped:abandoned', tokens)
end
redis.call('HSET', state, 'tokens_buffered', 0, 'bytes_buffered', 0)
redis.call('XTRIM', stream, 'MAXLEN', 0)
redis.call('DEL', leases, attempts, buffered, uses)
return abandoned
