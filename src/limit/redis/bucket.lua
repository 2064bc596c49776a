-- Takes from token buckets, or gives back to them: all of them or none.
--
-- KEYS      one bucket each, none named twice. All are declared here, and no other key is touched. On a cluster they
--           need one hash tag; on a single server they may have any.
-- ARGV[1]   'take' or 'give_back'
-- then for each key, in the order of KEYS, four whole numbers below 2^53:
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

-- An error of Redis does not always say which command it refused.
local function must(command, ...)
  local reply = redis.pcall(command, ...)
  if type(reply) == 'table' and reply.err then
    error(command .. ': ' .. reply.err, 0)
  end
  return reply
end

local time = must('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function tokens_at(bucket)
  local elapsed = math.max(now - bucket.last, 0)
  return math.min(bucket.burst, bucket.tokens + elapsed * bucket.count / bucket.per)
end

local function elapsed_until(bucket, target)
  local tokens, count, per = bucket.tokens, bucket.count, bucket.per
  local low = 0
  local high = math.min(math.ceil((target - tokens) * per / count), FOREVER)
  local step = 1
  while high < FOREVER and tokens + high * count / per < target do
    low = high
    high = math.min(high + step, FOREVER)
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
  low = math.max(low, below)
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if tokens + middle * count / per >= target then
      high = middle
    else
      low = middle
    end
  end
  return high
end

local function wait(bucket, target)
  if tokens_at(bucket) >= target then
    return 0
  end
  local elapsed = elapsed_until(bucket, target)
  if elapsed >= FOREVER then
    return FOREVER
  end
  return bucket.last + elapsed - now
end

-- Fills in tokens and last, made sensible; `damaged` says that they are not what is stored.
local function read(bucket)
  local value = redis.pcall('GET', bucket.key)
  if type(value) == 'table' and value.err and not string.find(value.err, 'WRONGTYPE', 1, true) then
    error('GET: ' .. value.err, 0)
  end
  bucket.missing = value == false
  bucket.tokens, bucket.last = bucket.burst, now
  if bucket.missing then
    return
  end
  local tokens, last
  if type(value) == 'string' then
    tokens, last = string.match(value, '^([%d%.e-]+) (%d+)$')
    tokens, last = tonumber(tokens or ''), tonumber(last or '')
  end
  if not tokens or not last then
    bucket.damaged = true
    return
  end
  bucket.tokens = math.min(math.max(tokens, 0), bucket.burst)
  if last - now > math.min(bucket.burst * bucket.per / bucket.count, LONGEST_LAG) then
    bucket.damaged = true
  else
    bucket.last = last
  end
end

local function write(bucket, reset)
  local ttl = math.ceil(reset / 1000) + MARGIN
  local value = string.format('%.17g %.0f', bucket.tokens, bucket.last)
  must('SET', bucket.key, value, 'PX', string.format('%.0f', ttl))
end

local buckets = {}
for i, key in ipairs(KEYS) do
  local at = 4 * i - 2
  local bucket = {
    key = key,
    count = tonumber(ARGV[at]),
    per = tonumber(ARGV[at + 1]),
    burst = tonumber(ARGV[at + 2]),
    cost = tonumber(ARGV[at + 3]),
  }
  read(bucket)
  buckets[i] = bucket
end

if ARGV[1] == 'give_back' then
  for _, bucket in ipairs(buckets) do
    if not bucket.missing then -- a missing bucket is full
      bucket.tokens = math.min(tokens_at(bucket) + bucket.cost, bucket.burst)
      bucket.last = math.max(bucket.last, now)
      write(bucket, wait(bucket, bucket.burst))
    end
  end
  return 1
end

local granted = true
for _, bucket in ipairs(buckets) do
  bucket.available = tokens_at(bucket)
  granted = granted and bucket.available >= bucket.cost
end

local reply = { granted and 1 or 0 }
for _, bucket in ipairs(buckets) do
  local retry = 0
  if granted then
    bucket.tokens = bucket.available - bucket.cost
    bucket.last = math.max(bucket.last, now)
  elseif bucket.cost > bucket.burst then
    retry = -1
  elseif bucket.available < bucket.cost then
    retry = wait(bucket, bucket.cost)
  end
  local reset = wait(bucket, bucket.burst)
  -- A refusal leaves the bucket alone, unless it would never refill or never go away as it is.
  if granted or bucket.damaged or must('PTTL', bucket.key) == -1 then
    write(bucket, reset)
  end
  reply[#reply + 1] = math.floor(tokens_at(bucket))
  reply[#reply + 1] = reset
  reply[#reply + 1] = retry
end
return reply
