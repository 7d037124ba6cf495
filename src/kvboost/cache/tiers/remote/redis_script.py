"""The script that a Redis server runs for us: accounts, evictions and marks, each call atomic.

``redis.py`` says what the keys are.
"""

from __future__ import annotations

# Commands that free memory come first wherever they are: on a full server a script may write
# anything once it has begun to write, and nothing before that.
SCRIPT = """
local accounts, used, chunks, parts, marks = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local call, pcall = redis.call, redis.pcall
local KEY, MARK, SHORT = 32, 16, 64  -- characters
local MOST_MARKS, MOST_HOLDERS, MARK_SECONDS = 512, 4, 30 * 24 * 3600

local function length(key, name)  -- 0 if there is no such field, or no hash
  local found = pcall('HSTRLEN', chunks .. key, name)
  return type(found) == 'number' and found or 0
end

local function field(key, name, most)  -- false if there is none, or a longer one than is ours
  local size = length(key, name)
  return 0 < size and size <= (most or SHORT) and call('HGET', chunks .. key, name)
end

local function size_of(key)  -- false if it is not whole
  local size = field(key, 'whole')
  return size and size:match('^%d+$') and size
end

local function is_foreign(key)  -- something else than a hash has the name of a chunk
  local kind = call('TYPE', chunks .. key).ok
  return kind ~= 'hash' and kind ~= 'none'
end

local function is_lost()
  return call('HEXISTS', accounts, 'ready') == 0
    or call('HLEN', accounts) - 3 ~= call('ZCARD', used)
end

local function split(text, length)
  local pieces = {}
  for i = 1, #text, length do pieces[#pieces + 1] = text:sub(i, i + length - 1) end
  return pieces
end

local function marks_of(key)
  return split(field(key, 'marks', MOST_MARKS * MARK) or '', MARK)
end

local function holders(mark)  -- none if its value is not ours; reads no more of it than could be
  local keys = pcall('GETRANGE', marks .. mark, 0, MOST_HOLDERS * KEY - 1)
  if keys == '' then return {} end
  local is_ours = type(keys) == 'string' and #keys % KEY == 0 and keys:match('^[0-9a-f]+$')
  return is_ours and split(keys, KEY) or {}
end

local function others(mark, key)  -- its holders but for key, and whether key is one
  local kept, is_one = '', false
  for _, holder in ipairs(holders(mark)) do
    if holder == key then is_one = true else kept = kept .. holder end
  end
  return kept, is_one
end

local function publish(mark, key, in_front)
  local kept = others(mark, key)
  local keys = in_front and key .. kept or kept .. key
  call('SET', marks .. mark, keys:sub(1, MOST_HOLDERS * KEY), 'EX', MARK_SECONDS)
end

local function withdraw(mark, key)
  local kept, is_one = others(mark, key)
  if is_one and kept == '' then
    call('UNLINK', marks .. mark)
  elseif is_one then
    call('SET', marks .. mark, kept, 'EX', MARK_SECONDS)
  end
end

local function forget(key)
  local writer, its_marks = field(key, 'writer'), marks_of(key)
  if writer then call('UNLINK', parts .. writer) end
  call('UNLINK', chunks .. key)
  for _, mark in ipairs(its_marks) do withdraw(mark, key) end
  call('ZREM', used, key)
  local size = call('HGET', accounts, key)
  if size then
    call('HDEL', accounts, key)
    call('HINCRBY', accounts, 'total', -size)
  end
end

local function use(key)  -- a full server, or one that is only a replica, refuses; never mind
  local now = pcall('HINCRBY', accounts, 'clock', 1)
  if type(now) == 'number' then pcall('ZADD', used, now, key) end
end

local function enter(key, size)
  call('HSET', accounts, key, size)
  call('HINCRBY', accounts, 'total', size)
  use(key)
end

local function is_gone(key)  -- counted, but the server has evicted it
  return call('HEXISTS', accounts, key) == 1 and call('EXISTS', chunks .. key) == 0
end

local act = {}

function act.contains()
  local found = {}
  for i = 2, #ARGV do
    found[i - 1] = (size_of(ARGV[i]) or is_foreign(ARGV[i])) and 1 or 0
    if is_gone(ARGV[i]) then forget(ARGV[i]) end
  end
  return found
end

local function num_pieces(key, most, piece)  -- false if they are more than most bytes
  local has_marks = call('HEXISTS', chunks .. key, 'marks')
  local count, room = call('HLEN', chunks .. key) - has_marks - 3, most - length(key, 'header')
  if count < 0 or count > most / piece + 1 then return false end
  for i = 0, count - 1 do room = room - length(key, i) end
  return room >= 0 and count
end

function act.read(key, writer, first, last, piece, most_header)  -- the header is piece 0
  if field(key, 'writer') ~= writer then return false end
  local found = {}
  for i = first, last do
    local some = i == 0 and field(key, 'header', tonumber(most_header))
    found[#found + 1] = some or i > 0 and field(key, i - 1, tonumber(piece)) or ''
  end
  return found
end

function act.open(key, most, piece, most_header, at_once)  -- writer, pieces, and the first of them
  if is_foreign(key) then return 'refused' end
  local size = size_of(key)
  if not size then
    if is_gone(key) then forget(key) end
    return false
  end
  if call('HEXISTS', accounts, key) == 1 then
    use(key)
  elseif not is_lost() and type(pcall('HINCRBY', accounts, 'total', 0)) == 'number' then
    enter(key, size)
  end
  for _, mark in ipairs(marks_of(key)) do pcall('EXPIRE', marks .. mark, MARK_SECONDS) end
  local writer, count = field(key, 'writer'), num_pieces(key, tonumber(most), tonumber(piece))
  if not writer or not count then return 'refused' end
  local last = math.min(count, at_once - 1)
  return {writer, count, act.read(key, writer, 0, last, piece, most_header)}
end

function act.reserve(key, size, max_bytes, writer, seconds)
  if size_of(key) then return 'here' end
  if is_lost() then return 'lost' end
  forget(key)
  while call('HGET', accounts, 'total') + size > tonumber(max_bytes) do
    local oldest = call('ZRANGE', used, 0, 0)[1]
    if not oldest then
      call('HSET', accounts, 'total', 0)
      break
    end
    forget(oldest)
  end
  call('HSET', chunks .. key, 'writer', writer)
  call('EXPIRE', chunks .. key, seconds)
  enter(key, size)
  return 'go'
end

local function is_announced(key, writer)
  return field(key, 'writer') == writer and not size_of(key)
end

function act.go_on(key, writer)
  if is_announced(key, writer) then return 1 end
  call('UNLINK', parts .. writer)
  return 0
end

function act.finish(key, writer, size, fields, names, in_front)
  local part = parts .. writer
  if not is_announced(key, writer) or call('HLEN', part) ~= tonumber(fields) then
    call('UNLINK', part)
    return 0
  end
  call('HSET', part, 'writer', writer, 'whole', size)
  if names ~= '' then call('HSET', part, 'marks', names) end
  call('RENAME', part, chunks .. key)
  call('PERSIST', chunks .. key)
  use(key)
  for _, mark in ipairs(marks_of(key)) do publish(mark, key, in_front == '1') end
  return 1
end

function act.abandon(key, writer)
  call('UNLINK', parts .. writer)
  if is_announced(key, writer) then forget(key) end
end

act.forget = forget

function act.recount()  -- begins one, unless another client has
  local ready = call('HEXISTS', accounts, 'ready')
  if call('HLEN', accounts) - 2 - ready ~= call('ZCARD', used) then
    call('DEL', accounts, used)
    call('HSET', accounts, 'total', 0, 'clock', 0)
  end
end

function act.adopt()
  if call('HEXISTS', accounts, 'total') == 0 then return end
  for i = 2, #ARGV do
    local size = size_of(ARGV[i])
    if call('HEXISTS', accounts, ARGV[i]) == 0 then
      if size then enter(ARGV[i], size) else forget(ARGV[i]) end
    end
  end
end

function act.ready()
  call('HSET', accounts, 'ready', 1)
end

function act.total()
  local size = pcall('HSTRLEN', accounts, 'total')
  local total = type(size) == 'number' and size <= SHORT and call('HGET', accounts, 'total')
  return total and total:match('^%d+$') or '0'
end

-- These chunks, then those with these marks.
function act.find(most, most_bytes, most_header, keys, names)
  local found, room, is_there = {}, tonumber(most_bytes), {}

  local function add(key)
    if is_there[key] ~= nil or #found == 2 * most then return end
    is_there[key] = size_of(key) and true or false
    local header = is_there[key] and field(key, 'header', math.min(room, most_header))
    if header then
      room = room - #header
      found[#found + 1] = key
      found[#found + 1] = header
    end
  end

  for _, key in ipairs(split(keys, KEY)) do add(key) end
  local asked, held = split(names, MARK), {}
  for i, mark in ipairs(asked) do held[i] = holders(mark) end
  for rank = 1, MOST_HOLDERS do  -- the newest chunk of every mark first
    for i = 1, #held do
      if held[i][rank] then add(held[i][rank]) end
    end
  end
  for i, mark in ipairs(asked) do
    local is_dead = #held[i] > 0
    for _, key in ipairs(held[i]) do is_dead = is_dead and is_there[key] == false end
    if is_dead then pcall('UNLINK', marks .. mark) end
  end
  return found
end

return act[ARGV[1]](unpack(ARGV, 2, 7))
"""
