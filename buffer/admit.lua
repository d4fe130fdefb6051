-- Give out the next group to generate, or say why not.
-- KEYS: state, leases, attempts, stream, dropped   ARGV: open_groups, capacity, lease_ms, max_attempts
-- Returns {n, attempt}, or {-1, 0} when the lag budget is used up, or {-2, 0} when the buffer is full.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)
while #expired > 0 do
  local n = expired[1]
  local attempt = redis.call('HINCRBY', KEYS[3], n, 1)
  if attempt <= tonumber(ARGV[4]) then
    redis.call('ZADD', KEYS[2], now + ARGV[3], n)
    return {tonumber(n), attempt}
  end
  redis.call('ZREM', KEYS[2], n)
  redis.call('HDEL', KEYS[3], n)
  redis.call('SADD', KEYS[5], n)
  redis.call('HINCRBY', KEYS[1], 'dropped:poison', 1)
  expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1)
end
local n = tonumber(redis.call('HGET', KEYS[1], 'admitted') or '0')
if n - redis.call('SCARD', KEYS[5]) >= tonumber(ARGV[1]) then return {-1, 0} end
if redis.call('XLEN', KEYS[4]) + redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[2]) then return {-2, 0} end
redis.call('HINCRBY', KEYS[1], 'admitted', 1)
redis.call('HINCRBY', KEYS[1], 'generated', 1)
redis.call('HSET', KEYS[3], n, 1)
redis.call('ZADD', KEYS[2], now + ARGV[3], n)
return {n, 1}
