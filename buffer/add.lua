#!lua
-- Append finished groups, each once: only while a lease on it is out.
-- KEYS: state, leases, attempts, stream, buffered, answered
-- ARGV: answers to remember; then for each group: call, n, tokens, oldest and newest version (-1 without tokens), payload
-- Returns for each group 1 when it was kept, 0 when another of that number was there before (counted as a duplicate).
-- `answered` remembers the latest calls: one repeated after its reply was lost changes nothing.
local state, leases, attempts, stream, buffered, answered = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local version = redis.call('HGET', state, 'version') or '0'
local now = redis.call('TIME')[1]

local function count(field, by) redis.call('HINCRBY', state, field, by) end

local function add(call, n, tokens, oldest, newest, payload)
  for said = 0, 1 do
    if redis.call('ZSCORE', answered, call .. ':' .. said) then return said end
  end
  local kept = redis.call('ZREM', leases, n)
  count('tokens_generated', tokens)
  if kept == 1 then
    local id = redis.call('XADD', stream, '*', 'n', n, 'tokens', tokens, 'payload', payload)
    redis.call('HDEL', attempts, n)
    redis.call('HSET', buffered, n, table.concat({id, tokens, #payload, oldest, newest, version}, ' '))
    count('added', 1)
    count('bytes_added', #payload)
    count('bytes_buffered', #payload)
    count('tokens_buffered', tokens)
  else
    count('generated', 1)
    count('dropped:duplicate', 1)
    count('tokens_dropped:duplicate', tokens)
  end
  redis.call('ZADD', answered, now, call .. ':' .. kept)
  return kept
end

local answers = {}
for i = 2, #ARGV, 6 do
  table.insert(answers, add(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]))
end
redis.call('ZREMRANGEBYRANK', answered, 0, -1 - ARGV[1])
return answers
