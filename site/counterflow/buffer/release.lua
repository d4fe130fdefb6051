#!lua flags=allow-oom
-- The server came back, perhaps without the end of its log: what is leased may have been added and lost. It is given out
-- again at once, and its loss is no attempt of it; where its holder still lives, one of the two will be a duplicate.
-- KEYS: state, leases, attempts   ARGV: groups known to be lost
for _, n in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  redis.call('ZADD', KEYS[2], 0, n)
end
redis.call('DEL', KEYS[3])
redis.call('HINCRBY', KEYS[1], 'regenerated', ARGV[1])
