-- What every script begins with: this server's clock, and errors that say which command was refused.

local pcall = redis.pcall
local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min

-- An error of Redis does not always say which command it refused.
local function check(command, reply)
  if type(reply) == 'table' and reply.err then
    error(command .. ': ' .. reply.err, 0)
  end
  return reply
end

local time = check('TIME', pcall('TIME'))
-- Microseconds.
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

