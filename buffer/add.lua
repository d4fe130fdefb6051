#!lua
-- Append finished groups, each once: only while a lease on it is out. Runs in one transaction with, and after, the SETs
-- that brought the payloads, each only where no other was there; one that no buffered group owns is removed again.
-- KEYS: state, leases, attempts, stream, buffered, answered, then the payload of each group
-- ARGV: answers to remember; then for each group: call, n, tokens, oldest and newest version (-1 without tokens)
-- Returns for each group 1 when it was kept, 0 when another of that number was there before (counted as a duplicate).
-- `answered` remembers the latest calls: one repeated after its reply was lost changes nothing.
local state, leases, attempts, stream, buffered, answered = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local now = redis.call('TIME')[1]

local function count(field, by) redis.call('HINCRBY', state, field, by) end

local function add(payload, call, n, tokens, oldest, newest)
  for said = 0, 1 do
    if redis.call('ZSCORE', answered, call .. ':' .. said) then return said end
  end
  local version = redis.call('HGET', state, 'version') or '0'
  local kept = redis.call('ZREM', leases, n)
  count('tokens_generated', tokens)
  if kept == 1 then
    local id, bytes = redis.call('XADD', stream, '*', 'n', n, 'tokens', tokens), redis.call('STRLEN', payload)
    redis.call('HDEL', attempts, n)
    redis.call('HSET', buffered, n, table.concat({id, tokens, bytes, oldest, newest, version}, ' '))
    count('added', 1)
    count('bytes_added', bytes)
    count('bytes_buffered', bytes)
    count('tokens_buffered', tokens)
  else
    count('generated', 1)
    count('dropped:duplicate', 1)
    count('tokens_dropped:duplicate', tokens)
  end
  redis.call('ZADD', answered, now, call .. ':' .. kept)
  return kept
end

local sound, answers = pcall(function()
  local answers = {}
  for i = 2, #ARGV, 5 do
    table.insert(answers, add(KEYS[7 + #answers], unpack(ARGV, i, i + 4)))
  end
  redis.call('ZREMRANGEBYRANK', answered, 0, -1 - ARGV[1])
  return answers
end)
for i = 7, #KEYS do
  if redis.pcall('HEXISTS', buffered, ARGV[5 * (i - 7) + 3]) ~= 1 then redis.call('DEL', KEYS[i]) end
end
if not sound then error(answers, 0) end
return answers
