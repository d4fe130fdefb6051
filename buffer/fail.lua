-- Give a lease back unfinished: the group is tried again at once, or dropped when its attempts are used up.
-- KEYS: state, leases, attempts, dropped   ARGV: n, tokens, max_attempts
-- Returns 1 when it will be tried again, 0 when it was dropped or the lease is no longer there.
redis.call('HINCRBY', KEYS[1], 'tokens_generated', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'tokens_dropped:failed', ARGV[2])
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 0 end
if tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '1') < tonumber(ARGV[3]) then
  redis.call('ZADD', KEYS[2], 0, ARGV[1])
  return 1
end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('SADD', KEYS[4], ARGV[1])
redis.call('HINCRBY', KEYS[1], 'dropped:poison', 1)
return 0
