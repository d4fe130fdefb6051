#!lua
-- Give out the next groups to generate, or say why there are fewer than wanted.
-- KEYS: state, leases, attempts, stream, producers, buffered, owners
-- ARGV: producer, its call, wanted, open_groups, capacity_groups, capacity_bytes, groups_per_step, lease_ms, max_attempts
-- Returns {why, n, attempt, n, attempt, ...}; why is 0, or 1 when the lag budget is used up, or 2 when the buffer is full.
-- `producers` remembers each producer's latest answer, for a call repeated after its reply was lost, at least until the
-- leases in it have run out: a producer that comes new takes away those of before.
local state, leases, attempts, stream, producers, owners = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[7]
local producer, call = ARGV[1], ARGV[2]
local numbers = {}
for i = 3, #ARGV do numbers[i - 2] = tonumber(ARGV[i]) end
local wanted, open_groups, capacity_groups, capacity_bytes, groups_per_step, lease_ms, max_attempts = unpack(numbers)

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local latest = redis.call('HGET', producers, producer)
if latest then
  local made, answer = unpack(cjson.decode(latest))
  if made == call then return answer end
else
  local all = redis.call('HGETALL', producers)
  for i = 1, #all, 2 do
    if (cjson.decode(all[i + 1])[3] or 0) <= now then redis.call('HDEL', producers, all[i]) end
  end
end

local answer = {0}

local function number(field) return tonumber(redis.call('HGET', state, field) or '0') end

local function lease(n)
  redis.call('ZADD', leases, now + lease_ms, n)
  redis.call('HSET', owners, n, producer)
  local attempt = redis.call('HINCRBY', attempts, n, 1)
  table.insert(answer, n)
  table.insert(answer, attempt)
end

-- A lease that ran out is given out again where its group may still start: to an actor of another version than the first
-- one's it may be too early. The group's place is what is trained and, of lower number, in flight or buffered.
local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now)
local open = {}
if #expired > 0 then
  local outstanding = redis.call('HKEYS', KEYS[6])
  for _, n in ipairs(redis.call('ZRANGE', leases, 0, -1)) do table.insert(outstanding, n) end
  for i, n in ipairs(outstanding) do outstanding[i] = tonumber(n) end
  table.sort(outstanding)
  for i, n in ipairs(outstanding) do open[n] = number('trained') + i - 1 < open_groups end
end
for _, expired in ipairs(expired) do
  if #answer >= 2 * wanted then break end
  if tonumber(redis.call('HGET', attempts, expired) or '0') < max_attempts then
    if open[tonumber(expired)] then
      redis.call('HINCRBY', state, 'reissued', 1)
      lease(tonumber(expired))
    end
  else
    redis.call('ZREM', leases, expired)
    redis.call('HDEL', attempts, expired)
    redis.call('HINCRBY', state, 'replaced', 1)
    redis.call('HINCRBY', state, 'dropped:poison', 1)
  end
end

while #answer < 2 * wanted do
  local n = number('admitted')
  if n - number('replaced') >= open_groups then answer[1] = 1 break end
  local buffered, in_flight = redis.call('XLEN', stream), redis.call('ZCARD', leases)
  -- What is in flight will weigh about what groups have weighed so far.
  local mean_bytes = number('bytes_added') / math.max(number('added'), 1)
  local full = buffered + in_flight >= capacity_groups
    or number('bytes_buffered') + (in_flight + 1) * mean_bytes > capacity_bytes
  -- A buffer too small for one step must not wedge it.
  if full and buffered + in_flight >= groups_per_step then answer[1] = 2 break end
  redis.call('HINCRBY', state, 'admitted', 1)
  redis.call('HINCRBY', state, 'generated', 1)
  lease(n)
end
-- Owners of leases that are over go here, so that no other script need know them.
if redis.call('HLEN', owners) > 2 * redis.call('ZCARD', leases) + 64 then
  for _, n in ipairs(redis.call('HKEYS', owners)) do
    if not redis.call('ZSCORE', leases, n) then redis.call('HDEL', owners, n) end
  end
end
if #answer > 1 then redis.call('HSET', producers, producer, cjson.encode({call, answer, now + lease_ms})) end
return answer
