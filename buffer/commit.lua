-- Commit one optimizer step: the groups it trained leave the stream and the version moves, together or not at all.
-- KEYS: state, stream   ARGV: consumer group, new version, cursor, then entry id and tokens of each trained group
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if version + 1 ~= tonumber(ARGV[2]) then
  return redis.error_reply('COMMIT version ' .. ARGV[2] .. ' does not follow ' .. version)
end
for i = 4, #ARGV, 2 do
  if #redis.call('XPENDING', KEYS[2], ARGV[1], ARGV[i], ARGV[i], 1) == 0 then
    return redis.error_reply('COMMIT entry ' .. ARGV[i] .. ' is not pending: it was trained or dropped before')
  end
end
local groups, tokens = 0, 0
for i = 4, #ARGV, 2 do
  redis.call('XACK', KEYS[2], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[2], ARGV[i])
  groups, tokens = groups + 1, tokens + ARGV[i + 1]
end
redis.call('HINCRBY', KEYS[1], 'trained', groups)
redis.call('HINCRBY', KEYS[1], 'tokens_trained', tokens)
redis.call('HINCRBY', KEYS[1], 'tokens_buffered', -tokens)
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'cursor', ARGV[3])
return groups
