#!lua flags=allow-oom
-- Give a lease back unfinished: the group is tried again at once, or dropped when its attempts are used up.
-- KEYS: state, leases, attempts, answered   ARGV: call, n, attempt, tokens, max_attempts, answers to remember
-- Returns 1 when the group will be tried again, 0 when it was dropped, or is no longer this attempt's.
local state, leases, attempts, answered = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call, n, attempt, tokens, max_attempts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
for said = 0, 1 do
  if redis.call('ZSCORE', answered, call .. ':' .. said) then return said end
end

redis.call('HINCRBY', state, 'tokens_generated', tokens)
redis.call('HINCRBY', state, 'tokens_dropped:failed', tokens)
local retried = 0
if redis.call('ZSCORE', leases, n) and redis.call('HGET', attempts, n) == attempt then
  if tonumber(attempt) < max_attempts then
    redis.call('ZADD', leases, 0, n)
    retried = 1
  else
    redis.call('ZREM', leases, n)
    redis.call('HDEL', attempts, n)
    redis.call('HINCRBY', state, 'replaced', 1)
    redis.call('HINCRBY', state, 'dropped:poison', 1)
  end
end
redis.call('ZADD', answered, redis.call('TIME')[1], call .. ':' .. retried)
redis.call('ZREMRANGEBYRANK', answered, 0, -1 - ARGV[6])
return retried
