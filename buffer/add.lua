-- Append a finished group, once: only the holder of a lease finds one to give up.
-- KEYS: state, leases, attempts, stream, added   ARGV: n, tokens, payload, attempt
-- Returns 1 when this attempt's group is the one appended, 0 when another's is there already (counted as a duplicate).
-- `added` holds, for each group on the stream, the attempts that came with it, the appended one first: a call repeated
-- after its reply was lost counts nothing again.
local came = redis.call('HGET', KEYS[5], ARGV[1]) or ''
if string.find(came, ' ' .. ARGV[4] .. ' ', 1, true) then
  return string.match(came, '%d+') == ARGV[4] and 1 or 0
end
redis.call('HINCRBY', KEYS[1], 'tokens_generated', ARGV[2])
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then
  if came ~= '' then redis.call('HSET', KEYS[5], ARGV[1], came .. ARGV[4] .. ' ') end
  redis.call('HINCRBY', KEYS[1], 'generated', 1)
  redis.call('HINCRBY', KEYS[1], 'dropped:duplicate', 1)
  redis.call('HINCRBY', KEYS[1], 'tokens_dropped:duplicate', ARGV[2])
  return 0
end
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[5], ARGV[1], ' ' .. ARGV[4] .. ' ')
redis.call('HINCRBY', KEYS[1], 'tokens_buffered', ARGV[2])
redis.call('XADD', KEYS[4], '*', 'n', ARGV[1], 'tokens', ARGV[2], 'payload', ARGV[3])
return 1
