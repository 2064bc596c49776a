-- What can be done with the slots of a pool. Follows prelude.lua and slots.lua.
--
-- More slots than the cap can be in use, when a replica that was cut off is back, or the server had lost its keys. What comes
-- back is then freed and not passed on, whoever waits, until the cap holds again.
--
-- KEYS      the five of slots.lua
-- ARGV[1]   the operation; then the four of slots.lua, then what it needs, as said below
--
-- `tally` stands for two numbers and more: the epoch, then pairs of a rank and how many wait in it.

local operations = {}

local function with_tally(code)
  local reply = { code, tonumber(call('HGET', totals, 'epoch') or 0) }
  local all = call('HGETALL', totals)
  for i = 1, #all, 2 do
    if tonumber(all[i]) then
      reply[#reply + 1], reply[#reply + 2] = tonumber(all[i]), tonumber(all[i + 1])
    end
  end
  return reply
end

-- serial, rank, length → { 1 granted | 2 waiting | 3 full | 4 stranger, leases found ended }
function operations.acquire()
  return { acquire(ARGV[rest], ARGV[rest + 1], tonumber(ARGV[rest + 2])) }
end

-- serial, heir, own, otherwise → { 1 freed } | { 2 passed } | { 3 announced } | { 4 kept, tally } | { 5 gone }
--
-- Gives a slot back. Where others wait, the heir gets it: the serial of this replica's oldest waiter of its highest tier
-- ('' for none), provided that no higher tier waits anywhere. `own` is how many of that tier wait here: of the slots that
-- come back, the replica passes on only its share, and leaves the rest to the replicas where the others wait. Without an
-- heir the slot is freed and announced (`otherwise` is 'announce'), or stays with its holder, who hands it over ('keep').
function operations.release()
  local id, heir, own = mine(ARGV[rest]), ARGV[rest + 1], tonumber(ARGV[rest + 2])
  if call('HDEL', slots, id) == 0 then
    return { GONE }
  end
  if waiting() == 0 or occupied() >= cap then
    return { FREED }
  end
  if heir ~= '' then
    local rank, count = top()
    local waits = call('HGET', waiters, mine(heir))
    if waits and tonumber(waits) == rank and now % count < own then
      remove_waiter(mine(heir))
      add_slot(mine(heir))
      return { PASSED }
    end
  end
  if ARGV[rest + 3] == 'keep' then
    add_slot(id)
    return with_tally(KEPT)
  end
  announce(me)
  return { ANNOUNCED }
end

-- serial → 1 it has a slot now | 2 none is free | 3 a higher tier waits elsewhere | 4 it does not wait
--
-- A waiter takes a free slot though others wait.
function operations.promote()
  local id = mine(ARGV[rest])
  local rank = tonumber(call('HGET', waiters, id) or '')
  if not rank then
    return call('HEXISTS', slots, id) == 1 and 1 or 4
  end
  if occupied() >= cap then
    return 2
  end
  local highest = top()
  if highest and highest < rank then
    announce(me)
    return 3
  end
  remove_waiter(id)
  add_slot(id)
  return 1
end

-- serial, … → how many wait now. Slots and places of requests that have gone.
function operations.forget()
  for i = rest, #ARGV do
    local id = mine(ARGV[i])
    call('HDEL', slots, id)
    remove_waiter(id)
  end
  announce('*')
  return waiting()
end

-- A key that is none of ours would fail every call from now on.
local function heal()
  for key, kind in pairs({ [slots] = 'hash', [waiters] = 'hash', [totals] = 'hash', [replicas] = 'zset', [grants] = 'zset' }) do
    local found = call('TYPE', key).ok
    if found ~= kind and found ~= 'none' then
      call('DEL', key)
    end
  end
end

-- Keys can be lost one by one. Waiters are the truth, totals their sum.
local function recount()
  local sum, all = 0, call('HGETALL', totals)
  for i = 1, #all, 2 do
    if tonumber(all[i]) then
      sum = sum + tonumber(all[i + 1])
    end
  end
  if sum == waiting() then
    return
  end
  for i = 1, #all, 2 do
    if tonumber(all[i]) then
      call('HDEL', totals, all[i])
    end
  end
  for _, rank in ipairs(call('HVALS', waiters)) do
    call('HINCRBY', totals, rank, 1)
  end
  touch(totals)
end

-- Serials of mine among ids.
local function serials(ids)
  local found, prefix = {}, mine('')
  for _, id in ipairs(ids) do
    if string.sub(id, 1, #prefix) == prefix then
      found[#found + 1] = tonumber(string.sub(id, #prefix + 1))
    end
  end
  return found
end

-- lease, serial, attempt, … → { { known, slots in use, replicas, leases found ended }, { 0, tally }, my slots, my waiters,
--                              my grants }
--
-- Renews the lease, which lasts so many milliseconds from now. `known` is 0 where it had ended, or was never there. Slots and
-- waiters are serials; grants that have expired are pairs of serial and attempt, and told until a heartbeat lists them as
-- heard of: an answer can be lost.
function operations.heartbeat()
  heal()
  local pruned = prune()
  local known = call('ZSCORE', replicas, me) and 1 or 0
  call('ZADD', replicas, string.format('%d', ms + tonumber(ARGV[rest])), me)
  recount()
  for _, key in ipairs(KEYS) do
    touch(key)
  end
  for i = rest + 1, #ARGV, 2 do
    call('ZREM', grants, mine(ARGV[i]) .. '.' .. ARGV[i + 1])
  end
  local expired = {}
  for _, grant in ipairs(call('ZRANGEBYSCORE', grants, '-inf', string.format('%d', ms))) do
    local serial, attempt = string.match(grant, '%.(%d+)%.(%d+)$')
    if owner(grant) == me and serial then
      expired[#expired + 1], expired[#expired + 2] = tonumber(serial), tonumber(attempt)
    end
  end
  if pruned > 0 then
    announce('*')
  end
  return {
    { known, occupied(), call('ZCARD', replicas), pruned },
    with_tally(0),
    serials(call('HKEYS', slots)),
    serials(call('HKEYS', waiters)),
    expired,
  }
end

-- count, serial, …, count, serial, …, serial, rank, … → 1, or 0 where this replica has no lease
--
-- Makes mine what I say: the first serials are dropped, the second have slots, whatever the cap, the last ones wait.
function operations.settle()
  if not call('ZSCORE', replicas, me) then
    return 0
  end
  local drop = rest
  local hold = drop + 1 + tonumber(ARGV[drop])
  local wait = hold + 1 + tonumber(ARGV[hold])
  for i = drop + 1, hold - 1 do
    call('HDEL', slots, mine(ARGV[i]))
    remove_waiter(mine(ARGV[i]))
  end
  for i = hold + 1, wait - 1 do
    remove_waiter(mine(ARGV[i]))
    add_slot(mine(ARGV[i]))
  end
  for i = wait, #ARGV, 2 do
    if call('HEXISTS', slots, mine(ARGV[i])) == 0 then
      add_waiter(mine(ARGV[i]), ARGV[i + 1])
    end
  end
  announce('*')
  return 1
end

-- → 1. The replica goes away: nothing of it stays.
function operations.bye()
  call('ZADD', replicas, 0, me)
  prune()
  announce('*')
  return 1
end

-- serial, raise → { 1 taken, tally } | { 0 none, tally } | { 2 this replica has no lease }
--
-- A slot to hand over, though others wait; none where nobody does. A try in vain raises the epoch where `raise` is 1: a
-- hand-over that is looking for a waiter then looks again before it frees its slot.
function operations.retry()
  local id = mine(ARGV[rest])
  -- What it took would be nobody's, and never come back if it died.
  if not call('ZSCORE', replicas, me) then
    return { 2 }
  end
  if call('HEXISTS', slots, id) == 1 then
    return with_tally(1)
  end
  if waiting() > 0 and occupied() < cap then
    add_slot(id)
    return with_tally(1)
  end
  if ARGV[rest + 1] == '1' and waiting() > 0 then
    call('HINCRBY', totals, 'epoch', 1)
    touch(totals)
  end
  return with_tally(0)
end

-- from, to → { 1 freed: more than the cap are in use } | { 2 passed } | { 4 kept, tally: `to` does not wait }
--            | { 5 gone: `from` is not held }
function operations.pass()
  local from, to = mine(ARGV[rest]), mine(ARGV[rest + 1])
  local held = call('HEXISTS', slots, from) == 1
  if not held then
    return { call('HEXISTS', slots, to) == 1 and PASSED or GONE }
  end
  if occupied() > cap then
    call('HDEL', slots, from)
    return { FREED }
  end
  if not remove_waiter(to) then
    return with_tally(KEPT)
  end
  call('HDEL', slots, from)
  add_slot(to)
  return { PASSED }
end

-- from, replica, serial, attempt → { 1 freed: more than the cap are in use } | { 2 passed }
--                                  | { 4 kept, tally: that waiter has gone, or has this grant } | { 5 gone: `from` is not held }
--
-- A slot becomes a grant on its way to a waiter of whatever replica. A ticket can come twice, and a second grant for it would
-- take the place of the first and swallow a slot.
function operations.transfer()
  local from, to = mine(ARGV[rest]), ARGV[rest + 1] .. '.' .. ARGV[rest + 2]
  local grant = to .. '.' .. ARGV[rest + 3]
  if call('HEXISTS', slots, from) == 0 then
    return { call('ZSCORE', grants, grant) and PASSED or GONE }
  end
  if occupied() > cap then
    call('HDEL', slots, from)
    return { FREED }
  end
  local lease = tonumber(call('ZSCORE', replicas, ARGV[rest + 1]) or 0)
  if lease <= ms or call('HEXISTS', waiters, to) == 0 or call('ZSCORE', grants, grant) then
    return with_tally(KEPT)
  end
  call('HDEL', slots, from)
  call('ZADD', grants, string.format('%d', ms + ON_ITS_WAY), grant)
  touch(grants)
  return { PASSED }
end

-- from, replica, serial, attempt → { 4 kept, tally } | { 5 gone: claimed or expired by now }
--
-- Takes back a grant that was sent nowhere.
function operations.recall()
  local from = mine(ARGV[rest])
  local grant = ARGV[rest + 1] .. '.' .. ARGV[rest + 2] .. '.' .. ARGV[rest + 3]
  if tonumber(call('ZSCORE', grants, grant) or 0) > ms then
    call('ZREM', grants, grant)
    add_slot(from)
  end
  if call('HEXISTS', slots, from) == 0 then
    return { GONE }
  end
  return with_tally(KEPT)
end

-- serial, attempt, waits, spare → { 2 passed: it is mine }
--                   | { 4 kept, tally: as the slot of `spare`, to hand over, as its waiter has gone }
--                   | { 1 freed: its waiter has gone and nobody else waits, or more than the cap are in use }
--                   | { 5 gone: unknown or too late }
--
-- `waits` is 1 where the replica has that waiter. A waiter that has gone may be in flight under its serial by now, or about
-- to be forgotten: a slot by that name would be mixed up with another.
function operations.claim()
  local id, waits, spare = mine(ARGV[rest]), ARGV[rest + 2] == '1', mine(ARGV[rest + 3])
  local grant = id .. '.' .. ARGV[rest + 1]
  local expiry = tonumber(call('ZSCORE', grants, grant) or 0)
  if expiry <= ms then
    if waits and call('HEXISTS', slots, id) == 1 then
      return { PASSED }
    end
    if call('HEXISTS', slots, spare) == 1 then
      return with_tally(KEPT)
    end
    return { GONE }
  end
  local excess = occupied() > cap
  call('ZREM', grants, grant)
  if excess then
    return { FREED }
  end
  if waits and remove_waiter(id) then
    add_slot(id)
    return { PASSED }
  end
  if waiting() == 0 then
    return { FREED }
  end
  add_slot(spare)
  return with_tally(KEPT)
end

-- serial, epoch, otherwise → { 1 freed } | { 3 announced } | { 4 kept, tally } | { 5 gone }
--
-- The end of a hand-over that found no waiter: frees the slot, unless someone has looked for one in vain meanwhile.
function operations.free()
  local id = mine(ARGV[rest])
  if call('HEXISTS', slots, id) == 0 then
    return { GONE }
  end
  if waiting() > 0 and tonumber(call('HGET', totals, 'epoch') or 0) ~= tonumber(ARGV[rest + 1]) then
    return with_tally(KEPT)
  end
  call('HDEL', slots, id)
  if ARGV[rest + 2] == 'announce' and announce(me) then
    return { ANNOUNCED }
  end
  return { FREED }
end

return operations[ARGV[1]]()
