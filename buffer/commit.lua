#!lua flags=allow-oom
-- Commit one optimizer step: the groups it trained leave the stream and the version moves, together or not at all.
-- KEYS: state, leases, attempts, stream, buffered, uses
-- ARGV: consumer group, term, new version, uses of a group, recovering (0 or 1), then n and tokens of each group
-- Returns how many groups the server had lost: 0 unless recovering.
-- Recovering: the step is known to have been trained, while the server, its log cut short, may have forgotten its groups.
local state, leases, attempts, stream, buffered, uses = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local consumers, term, new_version, reuse, recovering =
  ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local FIRST = 6

local function number(field) return tonumber(redis.call('HGET', state, field) or '0') end

if redis.call('HGET', state, 'term') ~= term then
  return redis.error_reply('SUPERSEDED another learner has taken over')
end
-- Made before: only its reply was lost.
if number('version') == new_version then return 0 end
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

local function train(tokens)
  redis.call('HINCRBY', state, 'trained', 1)
  redis.call('HINCRBY', state, 'tokens_trained', tokens)
end

local lost = 0
for i = FIRST, #ARGV, 2 do
  local n = ARGV[i]
  local entry = redis.call('HGET', buffered, n)
  if entry then
    local id, tokens, bytes = string.match(entry, '(%S+) (%d+) (%d+)')
    if redis.call('HINCRBY', uses, n, 1) >= reuse then
      redis.call('XACK', stream, consumers, id)
      redis.call('XDEL', stream, id)
      redis.call('HDEL', buffered, n)
      redis.call('HDEL', uses, n)
      redis.call('HINCRBY', state, 'tokens_buffered', -tokens)
      redis.call('HINCRBY', state, 'bytes_buffered', -bytes)
      train(tokens)
    end
  else
    for forgotten = number('admitted'), tonumber(n) do
      redis.call('ZADD', leases, 0, forgotten)
      redis.call('HINCRBY', state, 'admitted', 1)
      redis.call('HINCRBY', state, 'generated', 1)
    end
    -- No lease: an earlier use of the group was recovered already.
    if redis.call('ZREM', leases, n) == 1 then
      redis.call('HDEL', attempts, n)
      redis.call('HINCRBY', state, 'tokens_generated', ARGV[i + 1])
      train(ARGV[i + 1])
      lost = lost + 1
    end
  end
end
redis.call('HSET', state, 'version', new_version)
return lost
