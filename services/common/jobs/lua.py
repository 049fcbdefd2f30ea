"""Lua scripts of `JobStore`: each has its effect once, however often it is sent.

A script that a job's head may send begins with `FENCE`, and its own ARGV begin at 3. Where a repeat looks like a new request,
the sender adds a token, which the script keeps in the record or in a key of its own.
"""

from __future__ import annotations

import secrets

from services.common.redis.fencing import FENCE

MAX_EVENTS = 10_000
ONCE_KEPT_S = 600
"""Time for which a token is kept, seconds: longer than any client repeats a command."""


def new_token() -> str:
    """A random name for one command, by which a repeat of it is recognized."""
    return secrets.token_hex(8)


IS_IN = """
local function is_in(state, states) return string.find(',' .. states .. ',', ',' .. state .. ',', 1, true) end
"""

TRANSITION = f"""{FENCE}{IS_IN}
-- KEYS: record, events   ARGV: …, new state, unix time, event, allowed states (comma-separated), token, field, value, field, value, …
local state, moved = unpack(redis.call('HMGET', KEYS[1], 'state', 'moved'))
if not state then return 'missing' end
if moved == ARGV[7] then return 'ok' end
if not is_in(state, ARGV[6]) then return state end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'moved', ARGV[7])
for i = 8, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '{MAX_EVENTS}', '*', 'kind', 'state', 'at', ARGV[4], 'd', ARGV[5])
return 'ok'
"""

ROWS = """#!lua flags=no-writes
-- KEYS: records   ARGV: fields
local rows = {}
for i, key in ipairs(KEYS) do rows[i] = redis.call('HMGET', key, unpack(ARGV)) end
return rows
"""

CREATE = """#!lua
-- KEYS: record, jobs, queue, order, events, idempotency key (optional)
-- ARGV: job id, spec digest, seconds to remember the key, unix time, event, field, value, field, value, …
if KEYS[6] then
  local known = redis.call('HMGET', KEYS[6], 'spec', 'job_id')
  if known[1] and known[1] ~= ARGV[2] then return '' end
  if known[1] and known[2] ~= ARGV[1] then return known[2] end
  redis.call('HSET', KEYS[6], 'spec', ARGV[2], 'job_id', ARGV[1])
  redis.call('EXPIRE', KEYS[6], ARGV[3])
end
if redis.call('EXISTS', KEYS[1]) == 1 then return ARGV[1] end  -- the first reply was lost, and the command repeated
local order = redis.call('INCR', KEYS[4])
redis.call('HSET', KEYS[1], 'order', order)
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', KEYS[2], order, ARGV[1])
redis.call('ZADD', KEYS[3], order, ARGV[1])
redis.call('XADD', KEYS[5], '*', 'kind', 'state', 'at', ARGV[4], 'd', ARGV[5])
return ARGV[1]
"""

REQUEST = f"""#!lua{IS_IN}
-- KEYS: record, events
-- ARGV: field, value, request, unix time, states of a job that waits, its new state, cause, its event, states of a job that a learner owns,
--       token
local state, learner, asked = unpack(redis.call('HMGET', KEYS[1], 'state', 'learner', 'asked'))
if not state then return 'missing' end
if asked == ARGV[10] then return 'ok' end
local kind, event = ARGV[3], '{{"message": "' .. ARGV[3] .. ' requested"}}'
if not learner then
  if not is_in(state, ARGV[5]) then return state end
  redis.call('HSET', KEYS[1], 'state', ARGV[6], 'cause', ARGV[7])
  if ARGV[6] == 'cancelled' then redis.call('HSET', KEYS[1], 'finished_at', ARGV[4]) end
  kind, event = 'state', ARGV[8]
elseif not is_in(state, ARGV[9]) then
  return state
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], 'asked', ARGV[10])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '{MAX_EVENTS}', '*', 'kind', kind, 'at', ARGV[4], 'd', event)
return 'ok'
"""

UPDATE = f"""{FENCE}
-- KEYS: record   ARGV: …, field, value, field, value, …
if redis.call('EXISTS', KEYS[1]) == 0 then return 'missing' end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 'ok'
"""

ADD_EVENT = f"""{FENCE}
-- KEYS: events, token   ARGV: …, kind, unix time, event
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', {ONCE_KEPT_S}) then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', '{MAX_EVENTS}', '*', 'kind', ARGV[3], 'at', ARGV[4], 'd', ARGV[5])
return 1
"""

APPEND_STEP = f"""{FENCE}
-- KEYS: steps, events   ARGV: …, step, record, unix time, whether every step before must be there
local have, step = redis.call('LLEN', KEYS[1]), tonumber(ARGV[3])
if have >= step then return 0 end
if ARGV[6] == '1' and have < step - 1 then return -1 end
redis.call('RPUSH', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '{MAX_EVENTS}', '*', 'kind', 'step', 'at', ARGV[5], 'd', ARGV[4])
return 1
"""

APPEND_EVAL = f"""{FENCE}
-- KEYS: evals, events, token   ARGV: …, record, unix time
if not redis.call('SET', KEYS[3], '1', 'NX', 'EX', {ONCE_KEPT_S}) then return 0 end
redis.call('RPUSH', KEYS[1], ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '{MAX_EVENTS}', '*', 'kind', 'eval', 'at', ARGV[4], 'd', ARGV[3])
return 1
"""

REFILL = f"""{FENCE}
-- KEYS: a history   ARGV: …, how many records come before these, record, record, …   answers how many there are now
if redis.call('LLEN', KEYS[1]) == tonumber(ARGV[3]) then
  for i = 4, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
end
return redis.call('LLEN', KEYS[1])
"""

CLEAR = f"""{FENCE}
-- KEYS: histories, which are filled again
for _, name in ipairs(KEYS) do redis.call('LTRIM', name, 1, 0) end
return 1
"""

ACTIVATE = f"""{FENCE}
-- KEYS: active   ARGV: …, job id, the job as JSON (empty: it is retired)
if ARGV[4] == '' then return redis.call('HDEL', KEYS[1], ARGV[3]) end
return redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
"""

BEGIN = """#!lua
-- KEYS: record   ARGV: the highest incarnation known from elsewhere.   A repeat takes another number, which does no harm: they only rise.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local now = math.max(tonumber(redis.call('HGET', KEYS[1], 'incarnation') or 0), tonumber(ARGV[1])) + 1
redis.call('HSET', KEYS[1], 'incarnation', now)
return now
"""

RESTORE = """#!lua
-- KEYS: record, jobs, queue, order, events, idempotency key (optional)
-- ARGV: job id, incarnation of the head that restores (empty: another process), order, whether the job waits in the queue ('1'),
--       unix time, event, seconds to remember the key, spec digest, field, value, field, value, …
local there, now = redis.call('EXISTS', KEYS[1]) == 1, tonumber(redis.call('HGET', KEYS[1], 'incarnation') or 0)
local mine = tonumber(ARGV[2])
if not mine and there then return 0 end
if mine and now > mine then return redis.error_reply('FENCED by incarnation ' .. now) end
if mine and now == mine then return 0 end
for i = 9, #ARGV, 2 do
  local request = ARGV[i] == 'cancel_requested' or ARGV[i] == 'pause_requested'
  if not (there and request) then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end  -- what was asked since then stays asked
end
if mine then redis.call('HSET', KEYS[1], 'incarnation', mine) end
if tonumber(redis.call('GET', KEYS[4]) or 0) < tonumber(ARGV[3]) then redis.call('SET', KEYS[4], ARGV[3]) end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
if ARGV[4] == '1' then redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1]) else redis.call('ZREM', KEYS[3], ARGV[1]) end
redis.call('XADD', KEYS[5], '*', 'kind', 'restored', 'at', ARGV[5], 'd', ARGV[6])
if KEYS[6] and tonumber(ARGV[7]) > 0 and redis.call('EXISTS', KEYS[6]) == 0 then
  redis.call('HSET', KEYS[6], 'spec', ARGV[8], 'job_id', ARGV[1])
  redis.call('EXPIRE', KEYS[6], ARGV[7])
end
return 1
"""
