-- Charges a request and, where it is not refused, takes a slot or a place: one round trip for both. Follows prelude.lua,
-- bucket.lua and slots.lua.
--
-- KEYS      buckets, then the five of slots.lua
-- ARGV      'take', four numbers for each bucket, the four of slots.lua, then
--           serial   of the request
--           rank     of its tier
--           length   how many of this tier may wait
--
-- Returns   what bucket.lua's `take` returns; where it took, then
--           1 granted, 2 waiting, 3 queue full, 4 this replica has no lease: nothing was acquired
--           how many leases were found ended

local reply = take(first - 1, 2)
if reply[1] == 1 then
  reply[#reply + 1], reply[#reply + 2] = acquire(ARGV[rest], ARGV[rest + 1], tonumber(ARGV[rest + 2]))
end
return reply
