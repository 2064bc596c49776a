-- Charges a request, or gives back what it was charged. Follows prelude.lua and bucket.lua.
--
-- KEYS      one bucket each
-- ARGV[1]   'take' or 'give_back'; then four numbers for each key, as bucket.lua says, which also says what is returned

if ARGV[1] == 'give_back' then
  return give_back(#KEYS, 2)
end
return take(#KEYS, 2)
