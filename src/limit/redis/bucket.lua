-- Token buckets: a library for scripts that take from them or give back to them, all of them or none.
--
-- take(count, at), give_back(count, at)
-- KEYS      the first `count` keys: one bucket each, none named twice. On a cluster they need one hash tag; on a single
--           server they may have any.
-- ARGV      from `at` on, for each of these keys, in the order of KEYS, four whole numbers below 2^53:
--           count   tokens gained in a period
--           per     the period, in microseconds
--           burst   the size of the bucket
--           cost    tokens to take or give back
--
-- Returns   take: whole numbers; 1 if all were taken, else 0; then for each key
--             remaining  whole tokens left
--             reset      microseconds until the bucket is full
--             retry      0 if this key did not refuse, -1 if it always will (the cost exceeds the burst),
--                        else the microseconds until the same take succeeds
--           give_back: 1
--
-- A bucket is one string, '<tokens> <last>': tokens at the instant `last`, which is in microseconds of this server's
-- clock. Any other value, of whatever type, is replaced. Every key that is written gets a TTL.
--
-- Atomic: Redis runs nothing in between, and everything is read before anything is written.
--
-- The arithmetic is that of bucket.rs, the same operations in the same order on the same doubles. Numbers become text
-- by string.format alone, for tostring keeps 14 digits.

-- Microseconds; see bucket.rs.
local FOREVER = 4503599627370496
local LONGEST_LAG = 86400000000
-- Milliseconds that a key outlives its bucket's refill. A key that goes too early is a refill too early; a replica that
-- takes over judges the expiry by its own clock, which may be ahead by this much.
local MARGIN = 1000

local function tokens_at(tokens, last, count, per, burst)
  return min(burst, tokens + max(now - last, 0) * count / per)
end

local function elapsed_until(tokens, target, count, per)
  local low = 0
  local high = min(ceil((target - tokens) * per / count), FOREVER)
  local step = 1
  while high < FOREVER and tokens + high * count / per < target do
    low = high
    high = min(high + step, FOREVER)
    step = step * 2
  end
  if high >= FOREVER then
    return FOREVER
  end
  local below = high - 1
  step = 1
  while below > low and tokens + below * count / per >= target do
    high = below
    below = below - step
    step = step * 2
  end
  low = max(low, below)
  while high - low > 1 do
    local middle = floor((low + high) / 2)
    if tokens + middle * count / per >= target then
      high = middle
    else
      low = middle
    end
  end
  return high
end

-- Microseconds until a bucket that holds `available` by now holds `target`.
local function wait(available, target, tokens, last, count, per)
  if available >= target then
    return 0
  end
  local elapsed = elapsed_until(tokens, target, count, per)
  if elapsed >= FOREVER then
    return FOREVER
  end
  return last + elapsed - now
end

-- Tokens and last, made sensible; then what is stored: 'nothing', 'damage', or 'bucket'.
local function read(key, count, per, burst)
  local value = pcall('GET', key)
  if not value then
    return burst, now, 'nothing'
  end
  if type(value) == 'table' then
    if not string.find(value.err, 'WRONGTYPE', 1, true) then
      check('GET', value)
    end
    return burst, now, 'damage'
  end
  local tokens, last = string.match(value, '^([%d%.e-]+) (%d+)$')
  tokens, last = tonumber(tokens or ''), tonumber(last or '')
  if not tokens or not last then
    return burst, now, 'damage'
  end
  tokens = min(max(tokens, 0), burst)
  if last - now > min(burst * per / count, LONGEST_LAG) then
    return tokens, now, 'damage'
  end
  return tokens, last, 'bucket'
end

local function write(key, tokens, last, reset)
  local value = string.format('%.17g %d', tokens, last)
  check('SET', pcall('SET', key, value, 'PX', string.format('%d', ceil(reset / 1000) + MARGIN)))
end

-- The buckets as they are now, and whether all of them hold what is to be taken.
local function look(count, at)
  local buckets, granted = {}, true
  for i = 1, count do
    local at = at + 4 * (i - 1)
    local key, count, per = KEYS[i], tonumber(ARGV[at]), tonumber(ARGV[at + 1])
    local burst, cost = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
    local tokens, last, stored = read(key, count, per, burst)
    local available = tokens_at(tokens, last, count, per, burst)
    granted = granted and available >= cost
    buckets[i] = {
      key = key, count = count, per = per, burst = burst, cost = cost,
      tokens = tokens, last = last, stored = stored, available = available,
    }
  end
  return buckets, granted
end

local function give_back(count, at)
  for _, b in ipairs((look(count, at))) do
    if b.stored ~= 'nothing' then -- a missing bucket is full
      local tokens, last = min(b.available + b.cost, b.burst), max(b.last, now)
      write(b.key, tokens, last, wait(tokens, b.burst, tokens, last, b.count, b.per))
    end
  end
  return 1
end

local function take(count, at)
  local buckets, granted = look(count, at)
  local reply = { granted and 1 or 0 }
  for _, b in ipairs(buckets) do
    local tokens, last, available = b.tokens, b.last, b.available
    local retry = 0
    if granted then
      available = available - b.cost
      tokens, last = available, max(last, now)
    elseif b.cost > b.burst then
      retry = -1
    else
      retry = wait(available, b.cost, tokens, last, b.count, b.per)
    end
    local reset = wait(available, b.burst, tokens, last, b.count, b.per)
    -- A refusal leaves the bucket alone, unless it would never refill or never go away as it is.
    if granted or b.stored == 'damage' or check('PTTL', pcall('PTTL', b.key)) == -1 then
      write(b.key, tokens, last, reset)
    end
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3] = floor(available), reset, retry
  end
  return reply
end

