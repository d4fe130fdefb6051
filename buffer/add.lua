#!lua
-- Append a finished group, once: only while a lease on it is out.
-- KEYS: state, leases, attempts, stream, buffered, answered
-- ARGV: call, n, tokens, oldest and newest version (-1 without tokens), payload, answers to remember
-- Returns 1 when the group was kept, 0 when another of that number was there before (counted as a duplicate).
-- `answered` remembers the latest calls: one repeated after its reply was lost changes nothing.
local state, leases, attempts, stream, buffered, answered = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local call, n, tokens, oldest, newest, payload = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
for said = 0, 1 do
  if redis.call('ZSCORE', answered, call .. ':' .. said) then return said end
end

local kept = redis.call('ZREM', leases, n)
redis.call('HINCRBY', state, 'tokens_generated', tokens)
if kept == 1 then
  local id = redis.call('XADD', stream, '*', 'n', n, 'tokens', tokens, 'payload', payload)
  redis.call('HDEL', attempts, n)
  local version = redis.call('HGET', state, 'version') or '0'
  redis.call('HSET', buffered, n, table.concat({id, tokens, #payload, oldest, newest, version}, ' '))
  redis.call('HINCRBY', state, 'added', 1)
  redis.call('HINCRBY', state, 'bytes_added', #payload)
  redis.call('HINCRBY', state, 'bytes_buffered', #payload)
  redis.call('HINCRBY', state, 'tokens_buffered', tokens)
else
  redis.call('HINCRBY', state, 'generated', 1)
  redis.call('HINCRBY', state, 'dropped:duplicate', 1)
  redis.call('HINCRBY', state, 'tokens_dropped:duplicate', tokens)
end
redis.call('ZADD', answered, redis.call('TIME')[1], call .. ':' .. kept)
redis.call('ZREMRANGEBYRANK', answered, 0, -1 - ARGV[7])
return kept
