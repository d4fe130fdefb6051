-- Append a finished group, once: only the holder of a lease finds one to give up.
-- KEYS: state, leases, attempts, stream   ARGV: n, tokens, payload
-- Returns 1 when appended, 0 when the group is already there (counted as a duplicate).
redis.call('HINCRBY', KEYS[1], 'tokens_generated', ARGV[2])
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then
  redis.call('HINCRBY', KEYS[1], 'generated', 1)
  redis.call('HINCRBY', KEYS[1], 'dropped:duplicate', 1)
  redis.call('HINCRBY', KEYS[1], 'tokens_dropped:duplicate', ARGV[2])
  return 0
end
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HINCRBY', KEYS[1], 'tokens_buffered', ARGV[2])
redis.call('XADD', KEYS[4], '*', 'n', ARGV[1], 'tokens', ARGV[2], 'payload', ARGV[3])
return 1
