#!lua flags=allow-oom
-- A holder of leases died: they run out now. Safe to repeat.
-- KEYS: leases, owners   ARGV: how the names of its producers begin
-- Returns how many.
local leases, owners, prefix = KEYS[1], KEYS[2], ARGV[1]
local found = 0
for _, n in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
  local owner = redis.call('HGET', owners, n)
  if owner and string.sub(owner, 1, #prefix) == prefix then
    redis.call('ZADD', leases, 0, n)
    found = found + 1
  end
end
return found
