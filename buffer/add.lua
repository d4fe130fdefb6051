#!lua
-- Append a finished group, once: only while a lease on it is out.
-- KEYS: state, leases, attempts, stream, buffered, answered   ARGV: n, attempt, tokens, payload, remembered answers
-- Returns 1 when this attempt's group is the one kept, 0 when another's was there before (counted as a duplicate).
-- `answered` remembers the latest answers, so that a call repeated after its reply was lost changes nothing.
local state, leases, attempts, stream, buffered, answered = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local n, attempt, tokens, payload = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local call = 'add:' .. n .. ':' .. attempt .. ':'
if redis.call('ZSCORE', answered, call .. '1') then return 1 end
if redis.call('ZSCORE', answered, call .. '0') then return 0 end

local kept = redis.call('ZREM', leases, n)
redis.call('HINCRBY', state, 'tokens_generated', tokens)
if kept == 1 then
  local id = redis.call('XADD', stream, '*', 'n', n, 'tokens', tokens, 'payload', payload)
  redis.call('HDEL', attempts, n)
  redis.call('HSET', buffered, n, id .. ' ' .. tokens .. ' ' .. #payload)
  redis.call('HINCRBY', state, 'added', 1)
  redis.call('HINCRBY', state, 'bytes_added', #payload)
  redis.call('HINCRBY', state, 'bytes_buffered', #payload)
  redis.call('HINCRBY', state, 'tokens_buffered', tokens)
else
  redis.call('HINCRBY', state, 'generated', 1)
  redis.call('HINCRBY', state, 'dropped:duplicate', 1)
  redis.call('HINCRBY', state, 'tokens_dropped:duplicate', tokens)
end
redis.call('ZADD', answered, n, call .. kept)
redis.call('ZREMRANGEBYRANK', answered, 0, -1 - ARGV[5])
return kept
