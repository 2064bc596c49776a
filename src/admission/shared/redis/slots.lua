-- The slots of one pool and who waits for them: a library for the scripts that take and give. Follows prelude.lua.
--
-- KEYS      the last five, all of one hash tag:
--   slots     hash  '<replica>.<serial>' → 1             who is in flight, or holds a slot that is being handed over
--   waiters   hash  '<replica>.<serial>' → tier's rank   who waits
--   totals    hash  rank → how many wait; 'epoch' → how often a hand-over was looked for in vain
--   replicas  zset  replica → end of its lease           who takes part
--   grants    zset  '<replica>.<serial>.<attempt>' → expiry   slots on their way to a waiter: used until claimed or expired
-- ARGV      ARGV[1] and four numbers for each key before these five, then
--   replica   who asks
--   cap       slots in all
--   keep      how long a key outlives its last write, in milliseconds; more than a lease
--   channel   where a slot is announced that is free while others wait: 'rank replica', the rank being the highest that
--             waits, and the replica one that should let others try first ('*' for none)
--   and from `rest` on what the operation needs
--
-- Times are milliseconds of this server's clock. Every key that is written gets a TTL. Whoever asks makes the ids, so each
-- operation can be repeated: what was done already is answered as it was the first time.
--
-- Atomic: Redis runs nothing in between.

local GRANTED, WAITING, FULL, STRANGER = 1, 2, 3, 4
local FREED, PASSED, ANNOUNCED, KEPT, GONE = 1, 2, 3, 4, 5
-- Milliseconds a grant may take to reach its waiter.
local ON_ITS_WAY = 1000

local call = redis.call
local first = #KEYS - 4
local slots, waiters, totals, replicas, grants = unpack(KEYS, first)
local at = 2 + 4 * (first - 1)
local me, cap, keep, channel = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
local rest = at + 4
local ms = floor(now / 1000)

local function mine(serial)
  return me .. '.' .. serial
end

local function owner(id)
  return string.match(id, '^[^.]*')
end

local function touch(key)
  call('PEXPIRE', key, keep)
end

local function waiting()
  return call('HLEN', waiters)
end

local function occupied()
  return call('HLEN', slots) + call('ZCOUNT', grants, '(' .. string.format('%d', ms), '+inf')
end

local function add_slot(id)
  call('HSET', slots, id, 1)
  touch(slots)
end

local function add_waiter(id, rank)
  if call('HSETNX', waiters, id, rank) == 1 then
    call('HINCRBY', totals, rank, 1)
    touch(waiters)
    touch(totals)
  end
end

-- Its rank; nothing where it does not wait.
local function remove_waiter(id)
  local rank = call('HGET', waiters, id)
  if not rank then
    return nil
  end
  call('HDEL', waiters, id)
  if call('HINCRBY', totals, rank, -1) <= 0 then
    call('HDEL', totals, rank)
  end
  return tonumber(rank)
end

-- The highest tier that waits, and how many wait in it.
local function top()
  local rank, count
  local all = call('HGETALL', totals)
  for i = 1, #all, 2 do
    local this = tonumber(all[i])
    if this and (not rank or this < rank) then
      rank, count = this, tonumber(all[i + 1])
    end
  end
  return rank, count
end

-- Says that a slot is free while others wait. True where that is so.
local function announce(patient)
  if waiting() == 0 or occupied() >= cap then
    return false
  end
  local rank = top()
  if not rank then
    return false
  end
  call('PUBLISH', channel, string.format('%d', rank) .. ' ' .. patient)
  return true
end

-- Forgets the replicas whose lease has ended, and says how many.
local function prune()
  local ended = call('ZRANGEBYSCORE', replicas, '-inf', string.format('%d', ms))
  if #ended == 0 then
    return 0
  end
  local gone = {}
  for _, replica in ipairs(ended) do
    gone[replica] = true
    call('ZREM', replicas, replica)
  end
  for _, id in ipairs(call('HKEYS', slots)) do
    if gone[owner(id)] then
      call('HDEL', slots, id)
    end
  end
  for _, id in ipairs(call('HKEYS', waiters)) do
    if gone[owner(id)] then
      remove_waiter(id)
    end
  end
  for _, grant in ipairs(call('ZRANGE', grants, 0, -1)) do
    if gone[owner(grant)] then
      call('ZREM', grants, grant)
    end
  end
  return #ended
end

-- A slot where one is free and nobody waits; else a place, where the tier has fewer than `length` waiters.
local function acquire(serial, rank, length)
  local id = mine(serial)
  local pruned = prune()
  if pruned > 0 then
    announce('*')
  end
  if not call('ZSCORE', replicas, me) then
    return STRANGER, pruned
  end
  if call('HEXISTS', slots, id) == 1 then
    return GRANTED, pruned
  end
  if waiting() == 0 and occupied() < cap then
    add_slot(id)
    return GRANTED, pruned
  end
  if call('HEXISTS', waiters, id) == 1 then
    return WAITING, pruned
  end
  if tonumber(call('HGET', totals, rank) or 0) >= length then
    return FULL, pruned
  end
  add_waiter(id, rank)
  return WAITING, pruned
end

