"""Lua scripts of the streams: each has its effect once, and only for the consumer that holds the entry.

Scripts of fenced processes begin with `FENCE`; their own ARGV begin at 3.
"""

from __future__ import annotations

from services.common.redis.fencing import FENCE

ADD = f"""{FENCE}
-- KEYS: stream, seen   ARGV: …, member, payload, bound
if redis.call('SISMEMBER', KEYS[2], ARGV[3]) == 1 then return 0 end
if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[5]) then return -1 end
redis.call('XADD', KEYS[1], '*', 'member', ARGV[3], 'd', ARGV[4])
redis.call('SADD', KEYS[2], ARGV[3])
return 1
"""

_OWNED = f"""{FENCE}
-- Whether an entry is still pending under the consumer's own name: it may have been claimed by another, and moved on.
local function owned(stream, group, consumer, id)
  local found = redis.pcall('XPENDING', stream, group, id, id, 1, consumer)
  if found.err and not string.find(found.err, 'NOGROUP', 1, true) then error(found.err) end
  return #found > 0
end
"""

HOP = f"""{_OWNED}
-- KEYS: source, destination, seen   ARGV: …, group, consumer, entry id, member, payload, bound
if not owned(KEYS[1], ARGV[3], ARGV[4], ARGV[5]) then return 0 end
local new = redis.call('SISMEMBER', KEYS[3], ARGV[6]) == 0
if new and redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[8]) then return -1 end
if new then
  redis.call('XADD', KEYS[2], '*', 'member', ARGV[6], 'd', ARGV[7])
  redis.call('SADD', KEYS[3], ARGV[6])
end
redis.call('XACK', KEYS[1], ARGV[3], ARGV[5])
redis.call('XDEL', KEYS[1], ARGV[5])
return new and 1 or 0
"""

ACK = f"""{_OWNED}
-- KEYS: stream   ARGV: …, group, consumer, entry id, entry id, …
local done = 0
for i = 5, #ARGV do
  if owned(KEYS[1], ARGV[3], ARGV[4], ARGV[i]) then
    redis.call('XACK', KEYS[1], ARGV[3], ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
    done = done + 1
  end
end
return done
"""

RENEW = f"""{_OWNED}
-- KEYS: stream   ARGV: …, group, consumer, entry id, entry id, …   answers the entries that are not the consumer's any more
local lost = {{}}
for i = 5, #ARGV do
  if owned(KEYS[1], ARGV[3], ARGV[4], ARGV[i]) then
    redis.call('XCLAIM', KEYS[1], ARGV[3], ARGV[4], 0, ARGV[i], 'IDLE', 0, 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
"""

DEAD_LETTER = f"""{_OWNED}
-- KEYS: source, dead, dead bytes
-- ARGV: …, group, consumer, entry id, member, payload, size, reason, deliveries, stage, budget, bytes of a cut one, most letters
if not owned(KEYS[1], ARGV[3], ARGV[4], ARGV[5]) then return 0 end
local payload, kept = ARGV[7], tonumber(redis.call('HGET', KEYS[3], ARGV[11]) or 0)
if #payload < tonumber(ARGV[8]) or kept + #payload > tonumber(ARGV[12]) then payload = string.sub(payload, 1, tonumber(ARGV[13])) end
local first, now = string.match(ARGV[5], '^%d+'), redis.call('TIME')
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[14], '*', 'member', ARGV[6], 'd', payload, 'size', ARGV[8], 'reason', ARGV[9],
  'deliveries', ARGV[10], 'consumer', ARGV[4], 'first_seen', first / 1000, 'last_seen', now[1] + now[2] / 1000000)
redis.call('HINCRBY', KEYS[3], ARGV[11], #payload)
redis.call('XACK', KEYS[1], ARGV[3], ARGV[5])
redis.call('XDEL', KEYS[1], ARGV[5])
return 1
"""

FORGET = """#!lua
-- KEYS: the job's work   ARGV: the hash of active jobs, the job   (the hash is no key of this script: its caller may only read it)
if redis.call('HEXISTS', ARGV[1], ARGV[2]) == 1 then return 0 end
return redis.call('DEL', unpack(KEYS))
"""
