#!lua flags=allow-oom
-- The run is over: what was not trained is abandoned, and counted so.
-- KEYS: state, leases, attempts, stream, buffered, uses, then the payload of each buffered group   ARGV: their numbers
-- Returns 1, or 0, nothing done, where the buffered groups are others by now.
local state, leases, attempts, stream, buffered, uses = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local found = redis.call('HLEN', buffered)
if found ~= #ARGV then return 0 end
for _, n in ipairs(ARGV) do
  if redis.call('HEXISTS', buffered, n) == 0 then return 0 end
end
local abandoned = found + redis.call('ZCARD', leases)
local tokens = redis.call('HGET', state, 'tokens_buffered') or '0'
if abandoned > 0 then
  redis.call('HINCRBY', state, 'dropped:abandoned', abandoned)
  redis.call('HINCRBY', state, 'tokens_dropped:abandoned', tokens)
end
redis.call('HSET', state, 'tokens_buffered', 0, 'bytes_buffered', 0)
redis.call('XTRIM', stream, 'MAXLEN', 0)
for i = 2, #KEYS do
  if KEYS[i] ~= stream then redis.call('DEL', KEYS[i]) end
end
return 1
