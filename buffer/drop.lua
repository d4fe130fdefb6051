-- Take an entry out of the stream untrained, with the reason; what cannot be read goes to the quarantine stream.
-- KEYS: state, stream, dropped, quarantine, added
-- ARGV: consumer group, entry id, n, tokens, reason, detail, quarantine (0 or 1)
local entry = redis.call('XRANGE', KEYS[2], ARGV[2], ARGV[2])
if #entry == 0 then return 0 end
if ARGV[7] == '1' then
  redis.call('XADD', KEYS[4], '*', 'reason', ARGV[6], 'entry', cjson.encode(ARGV[2]), unpack(entry[1][2]))
end
redis.call('XACK', KEYS[2], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[2], ARGV[2])
if ARGV[3] == '' then return 1 end
redis.call('SADD', KEYS[3], ARGV[3])
redis.call('HDEL', KEYS[5], ARGV[3])
redis.call('HINCRBY', KEYS[1], 'dropped:' .. ARGV[5], 1)
redis.call('HINCRBY', KEYS[1], 'tokens_dropped:' .. ARGV[5], ARGV[4])
redis.call('HINCRBY', KEYS[1], 'tokens_buffered', -ARGV[4])
return 1
