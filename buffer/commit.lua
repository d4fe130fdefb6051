#!lua flags=allow-oom
-- Commit one optimizer step: the groups it trained leave the stream and the version moves, together or not at all.
-- KEYS: state, leases, attempts, stream, buffered, uses, then the payload of each group
-- ARGV: term, new version, uses of a group, recovering (0 or 1), then n and tokens of each group
-- Recovering: the step is known to have been trained, while the server, its log cut short, may have forgotten its groups.
local state, leases, attempts, stream, buffered, uses = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local term, new_version, reuse, recovering = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local FIRST = 5

local function number(field) return tonumber(redis.call('HGET', state, field) or '0') end
local function count(field, by) redis.call('HINCRBY', state, field, by) end

if redis.call('HGET', state, 'term') ~= term then
  return redis.error_reply('SUPERSEDED another learner has taken over')
end
-- Made before: only its reply was lost.
if number('version') == new_version then return end
if number('version') + 1 ~= new_version then
  return redis.error_reply('COMMIT version ' .. new_version .. ' does not follow ' .. number('version'))
end
if not recovering then
  for i = FIRST, #ARGV, 2 do
    if redis.call('HEXISTS', buffered, ARGV[i]) == 0 then
      return redis.error_reply('COMMIT group ' .. ARGV[i] .. ' is not in the buffer: it was trained or dropped before')
    end
  end
end

for i = FIRST, #ARGV, 2 do
  local n, tokens = ARGV[i], ARGV[i + 1]
  for forgotten = number('admitted'), tonumber(n) do
    redis.call('ZADD', leases, 0, forgotten)
    count('admitted', 1)
    count('generated', 1)
  end
  local entry = redis.call('HGET', buffered, n)
  local leased = not entry and redis.call('ZSCORE', leases, n)
  -- Neither: its last use was recovered already.
  if (entry or leased) and redis.call('HINCRBY', uses, n, 1) >= reuse then
    redis.call('HDEL', uses, n)
    count('trained', 1)
    count('tokens_trained', tokens)
    if entry then
      local id, there, bytes = string.match(entry, '(%S+) (%d+) (%d+)')
      redis.call('XDEL', stream, id)
      redis.call('DEL', KEYS[7 + (i - FIRST) / 2])
      redis.call('HDEL', buffered, n)
      count('tokens_buffered', -there)
      count('bytes_buffered', -bytes)
      if there ~= tokens then
        -- The server had lost the group that was trained, and has got another of its number since.
        count('generated', 1)
        count('dropped:duplicate', 1)
        count('tokens_dropped:duplicate', there)
        count('tokens_generated', tokens)
      end
    else
      redis.call('ZREM', leases, n)
      redis.call('HDEL', attempts, n)
      count('tokens_generated', tokens)
    end
  elseif leased then
    redis.call('ZADD', leases, 0, n)
  end
end
redis.call('HSET', state, 'version', new_version)
