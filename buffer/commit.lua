-- Commit one optimizer step: the groups it trained leave the stream and the version moves, together or not at all.
-- KEYS: state, stream, added   ARGV: consumer group, new version, cursor, then entry id, n and tokens of each group
-- Returns how many groups left: 0 when this commit was made before and only its reply was lost.
local version, cursor = unpack(redis.call('HMGET', KEYS[1], 'version', 'cursor'))
if version == ARGV[2] and cursor == ARGV[3] then return 0 end
version = tonumber(version or '0')
if version + 1 ~= tonumber(ARGV[2]) then
  return redis.error_reply('COMMIT version ' .. ARGV[2] .. ' does not follow ' .. version)
end
for i = 4, #ARGV, 3 do
  if #redis.call('XPENDING', KEYS[2], ARGV[1], ARGV[i], ARGV[i], 1) == 0 then
    return redis.error_reply('COMMIT entry ' .. ARGV[i] .. ' is not pending: it was trained or dropped before')
  end
end
local groups, tokens = 0, 0
for i = 4, #ARGV, 3 do
  redis.call('XACK', KEYS[2], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[3], ARGV[i + 1])
  groups, tokens = groups + 1, tokens + ARGV[i + 2]
end
redis.call('HINCRBY', KEYS[1], 'trained', groups)
redis.call('HINCRBY', KEYS[1], 'tokens_trained', tokens)
redis.call('HINCRBY', KEYS[1], 'tokens_buffered', -tokens)
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'cursor', ARGV[3])
return groups
