"""Slow, plain Python reference of proto/spec-codec.md: tables, roots, changes, patch and anchor blobs.

It imports nothing from pulsenet and shares no code with it. Read it beside the specification; it favours the order
of the text over speed. Tensors are ``bytes`` (dense, little-endian, row-major); elements are unsigned integers.
"""

import struct
from itertools import pairwise

import msgpack
import xxhash
import zstandard
from blake3 import blake3

BLOCK_ELEMENTS = 1 << 20
ELEMENT_SIZES = {"BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
ELEMENT_SIZES |= {"F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8}
FLOAT_FIELDS = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}
"""Bits of exponent and mantissa."""
END, ABSOLUTE, PLAIN, DENSE, TIGHT = 0, 1, 2, 3, 4
CLASSES = 20
ONES, SPARSE, RICE = 0, 1, 2
NARROW, WIDE = 0xFF, 0xFFFF
ENTRIES_MAX, NAME_SIZE_MAX, DIMENSIONS_MAX, ELEMENTS_MAX, TABLE_SIZE_MAX = 65_536, 512, 8, 1 << 48, 16 << 20


class Refused(Exception):
    """The input breaks the specification; ``code`` says how."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code


def refuse_unless(condition, code):
    if not condition:
        raise Refused(code)


# Parameter table: tensors are (name, dtype, shape), aliases (alias, canonical), excluded names.


def element_count(tensor):
    count = 1
    for size in tensor[2]:
        count *= size
    return count


def encode_table(tensors, aliases=(), excluded=()):
    value = {
        "aliases": [list(pair) for pair in aliases],
        "excluded": list(excluded),
        "tensors": [[name, dtype, list(shape)] for name, dtype, shape in tensors],
    }
    return msgpack.packb(value, use_bin_type=True)


def decode_table(data):
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise Refused("table-decode") from error
    refuse_unless(_has_table_shape(value), "table-decode")
    tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in value["tensors"]]
    aliases = [tuple(pair) for pair in value["aliases"]]
    excluded = value["excluded"]
    check_table(tensors, aliases, excluded)
    refuse_unless(encode_table(tensors, aliases, excluded) == data, "table-not-canonical")
    return tensors, aliases, excluded


def _has_table_shape(value):
    def is_list(item, size=None):
        return isinstance(item, list) and len(item) <= ENTRIES_MAX and (size is None or len(item) == size)

    def is_text(item):
        return isinstance(item, str) and len(item.encode()) <= NAME_SIZE_MAX

    if not isinstance(value, dict) or list(value) != ["aliases", "excluded", "tensors"]:
        return False
    if not all(is_list(part) for part in value.values()) or not all(is_text(name) for name in value["excluded"]):
        return False
    if not all(is_list(pair, 2) and all(is_text(name) for name in pair) for pair in value["aliases"]):
        return False
    return all(
        is_list(tensor, 3)
        and is_text(tensor[0])
        and is_text(tensor[1])
        and is_list(tensor[2])
        and len(tensor[2]) <= DIMENSIONS_MAX
        and all(type(size) is int and size >= 0 for size in tensor[2])
        for tensor in value["tensors"]
    )


def check_table(tensors, aliases, excluded):
    names = [name for name, _, _ in tensors]
    alias_names = [alias for alias, _ in aliases]
    for listed in (names, alias_names, excluded):
        keys = [name.encode() for name in listed]
        refuse_unless(all(a < b for a, b in pairwise(keys)), "table-invalid")
        refuse_unless(all(0 < len(key) <= NAME_SIZE_MAX for key in keys), "table-invalid")
    for alias, canonical in aliases:
        refuse_unless(canonical in names and alias not in names, "table-invalid")
    refuse_unless(not set(excluded) & (set(names) | set(alias_names)), "table-invalid")
    for _, dtype, shape in tensors:
        refuse_unless(dtype in ELEMENT_SIZES, "table-invalid")
        bound = 1
        for size in shape:
            bound *= max(size, 1)
        refuse_unless(bound <= ELEMENTS_MAX, "table-invalid")


def layout(tensors):
    """Return (offsets, total size) of the dense layout."""
    offsets, end = [], 0
    for tensor in tensors:
        start = (end + 63) // 64 * 64
        offsets.append(start)
        end = start + element_count(tensor) * ELEMENT_SIZES[tensor[1]]
    return offsets, end


# Root.


def hash_tensor(data):
    return xxhash.xxh3_128(data).digest()


def compute_root(tensors, contents):
    preimage = b"pulsenet-root-v1\0" + struct.pack("<I", len(tensors))
    for (name, dtype, shape), data in zip(tensors, contents, strict=True):
        name, dtype = name.encode(), dtype.encode()
        preimage += struct.pack("<H", len(name)) + name + struct.pack("<B", len(dtype)) + dtype
        preimage += struct.pack("<B", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
        preimage += hash_tensor(data)
    return blake3(preimage).digest()


# Anchor blob.


def encode_anchor(tensors, contents, aliases=(), excluded=()):
    table = encode_table(tensors, aliases, excluded)
    return struct.pack("<4sB3sI", b"PLSA", 1, bytes(3), len(table)) + table + b"".join(contents)


def decode_anchor(blob):
    """Return (tensors, aliases, excluded, contents)."""
    refuse_unless(len(blob) >= 12, "anchor-truncated")
    magic, version, zeros, table_size = struct.unpack("<4sB3sI", blob[:12])
    refuse_unless((magic, version, zeros) == (b"PLSA", 1, bytes(3)), "anchor-header")
    refuse_unless(table_size <= TABLE_SIZE_MAX, "anchor-header")
    refuse_unless(len(blob) >= 12 + table_size, "anchor-truncated")
    tensors, aliases, excluded = decode_table(blob[12 : 12 + table_size])
    contents, offset = [], 12 + table_size
    for tensor in tensors:
        size = element_count(tensor) * ELEMENT_SIZES[tensor[1]]
        contents.append(blob[offset : offset + size])
        offset += size
    refuse_unless(len(blob) >= offset, "anchor-truncated")
    refuse_unless(len(blob) == offset, "anchor-trailing")
    return tensors, aliases, excluded, contents


# BF16, floats and the ordered integer.


def cast_to_bf16(bits):
    """FP32 bits -> BF16 bits."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x0040
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def to_ordered(bits, width=16):
    half = 1 << width - 1
    return 2 * half - 1 - bits if bits >= half else bits + half


def from_ordered(ordered, width=16):
    half = 1 << width - 1
    return ordered - half if ordered >= half else 2 * half - 1 - ordered


def float_width(dtype):
    return 1 + sum(FLOAT_FIELDS[dtype])


# Numbers.


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value % 0x80 + 0x80)
        value //= 0x80
    return bytes([*out, value])


class Reader:
    def __init__(self, data):
        self.data, self.offset = data, 0

    def take(self, size):
        refuse_unless(self.offset + size <= len(self.data), "patch-truncated")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def varint(self):
        value = 0
        for position in range(9):
            byte = self.take(1)[0]
            value += byte % 0x80 << 7 * position
            if byte < 0x80:
                refuse_unless(byte > 0 or position == 0, "patch-varint")
                return value
        raise Refused("patch-varint")

    def at_end(self):
        return self.offset == len(self.data)


# Planes.


def plane(raw, compresses=True):
    raw = bytes(raw)
    if compresses and len(raw) >= 32:
        frame = zstandard.ZstdCompressor(level=1, write_checksum=False, write_dict_id=False).compress(raw)
        if len(frame) < len(raw):
            return varint(len(frame) * 2 + 1) + frame
    return varint(len(raw) * 2) + raw


def read_plane(reader, size_min, size_max):
    head = reader.varint()
    stored = reader.take(head // 2)
    if head % 2 == 0:
        refuse_unless(size_min <= len(stored) <= size_max, "patch-plane")
        return stored
    try:
        header = zstandard.get_frame_parameters(stored)
        refuse_unless(header.dict_id == 0 and header.window_size <= 8 << 20, "patch-plane")
        refuse_unless(max(size_min, 1) <= header.content_size <= size_max, "patch-plane")
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        raw = decompressor.decompress(stored)
    except zstandard.ZstdError as error:
        raise Refused("patch-plane") from error
    refuse_unless(decompressor.eof and not decompressor.unused_data, "patch-plane")
    refuse_unless(len(raw) == header.content_size, "patch-plane")
    return raw


def integer_planes(values, size, compresses=True):
    planes = ([value >> 8 * position & 0xFF for value in values] for position in range(size))
    return b"".join(plane(values, compresses) for values in planes)


def read_integers(reader, size, count):
    planes = [read_plane(reader, count, count) for _ in range(size)]
    return [sum(planes[position][i] << 8 * position for position in range(size)) for i in range(count)]


# Gaps and ranks.


def gaps(positions):
    return [position - before - 1 for before, position in zip([-1, *positions], positions, strict=False)]


def gap_codes(positions, escape):
    codes = []
    for gap in gaps(positions):
        codes += [escape] * (gap // escape) + [gap % escape]
    return codes


def positions_body(positions, compresses=True):
    narrow = gap_codes(positions, NARROW)
    if len(narrow) <= 2 * len(positions):
        return varint(len(positions) * 2) + plane(narrow, compresses)
    return varint(len(positions) * 2 + 1) + integer_planes(gap_codes(positions, WIDE), 2, compresses)


def read_positions(reader, block_elements):
    head = reader.varint()
    count, escape = head // 2, WIDE if head % 2 else NARROW
    refuse_unless(0 < count <= block_elements, "patch-count")
    codes = read_plane(reader, count, count + block_elements // escape)
    if escape == WIDE:
        high = read_plane(reader, len(codes), len(codes))
        codes = [low + high_byte * 256 for low, high_byte in zip(codes, high, strict=True)]
    positions, position = [], 0
    for code in codes:
        position += code
        if code != escape:
            positions.append(position)
            position += 1
    refuse_unless(codes[-1] != escape and len(positions) == count, "patch-gaps")
    refuse_unless(positions[-1] < block_elements, "patch-gaps")
    return positions


def read_ranks(data, rank_end, count):
    reader, ranks, rank = Reader(data), [], 0
    try:
        while not reader.at_end():
            start = reader.offset
            rank += reader.varint()
            refuse_unless(reader.offset - start <= 3 and rank < rank_end, "patch-values")
            ranks.append(rank)
            rank += 1
    except Refused as error:
        raise Refused("patch-values") from error
    refuse_unless(len(ranks) == count, "patch-values")
    return ranks


# Codecs of one block. ``old`` and ``new`` are lists of the block's elements.


def absolute_body(positions, values, size, compresses=True):
    return positions_body(positions, compresses) + integer_planes(values, size, compresses)


def steps_between(old_values, new_values, width):
    """Return the steps, each above -2^(width - 1) and at most that high."""
    steps = []
    for old, new in zip(old_values, new_values, strict=True):
        step = (to_ordered(new, width) - to_ordered(old, width)) % (1 << width)
        steps.append(step if step <= 1 << width - 1 else step - (1 << width))
    return steps


def step_from(old, step, width):
    return from_ordered((to_ordered(old, width) + step) % (1 << width), width)


def plain_body(dtype, positions, old_values, new_values):
    steps = steps_between(old_values, new_values, float_width(dtype))
    ups = bytearray((len(steps) + 7) // 8)
    for i, step in enumerate(steps):
        ups[i // 8] |= (step == 1) << i % 8
    exceptions = [i for i, step in enumerate(steps) if step not in (1, -1)]
    body = positions_body(positions) + plane(ups) + varint(len(exceptions))
    if exceptions:
        body += plane(b"".join(varint(gap) for gap in gaps(exceptions)))
        body += integer_planes([new_values[i] for i in exceptions], ELEMENT_SIZES[dtype])
    return body


# Tight.


def rice(value, parameter):
    return [0] * (value >> parameter) + [1] + [value >> bit & 1 for bit in range(parameter)]


def best_parameter(values):
    return min(range(32), key=lambda parameter: (rice_size(values, parameter), parameter))


def rice_size(values, parameter):
    return sum((value >> parameter) + 1 + parameter for value in values)


def class_of(dtype, bits):
    exponent_bits, mantissa_bits = FLOAT_FIELDS[dtype]
    exponent = bits >> mantissa_bits & (1 << exponent_bits) - 1
    is_narrow = exponent_bits + mantissa_bits < 8
    top = (1 << exponent_bits) - 1 if is_narrow else (1 << exponent_bits - 1) - 1
    return min(max(top - exponent, 0), CLASSES - 1)


def tight_body(dtype, old, new):
    gaps_by_class, steps_by_class, unchanged = {}, {}, [0] * CLASSES
    for before, after in zip(old, new, strict=True):
        index = class_of(dtype, before)
        if before == after:
            unchanged[index] += 1
        else:
            gaps_by_class.setdefault(index, []).append(unchanged[index])
            steps_by_class.setdefault(index, []).extend(steps_between([before], [after], float_width(dtype)))
            unchanged[index] = 0
    head = varint(sum(len(listed) for listed in gaps_by_class.values()))
    head += varint(sum(1 << index for index in gaps_by_class))
    stream = []
    for index in sorted(gaps_by_class):
        gap_list, steps = gaps_by_class[index], steps_by_class[index]
        parameter = best_parameter(gap_list)
        mode, mode_head, mode_bits = tight_sizes([abs(step) - 1 for step in steps])
        head += varint(len(gap_list)) + bytes([mode * 32 + parameter]) + mode_head
        for gap in gap_list:
            stream += rice(gap, parameter)
        stream += [int(step > 0) for step in steps] + mode_bits
    return head + pack_bits(stream)


def tight_sizes(extras):
    """Return (mode, its part of the head, its bits) for step sizes less 1."""
    exceptions = [i for i, extra in enumerate(extras) if extra > 0]
    if not exceptions:
        return ONES, b"", []
    rank_gaps, rests = gaps(exceptions), [extras[i] - 1 for i in exceptions]
    ranks_with, rests_with, all_with = best_parameter(rank_gaps), best_parameter(rests), best_parameter(extras)
    sparse_head = varint(len(exceptions)) + bytes([ranks_with, rests_with])
    sparse_size = len(sparse_head) * 8 + rice_size(rank_gaps, ranks_with) + rice_size(rests, rests_with)
    if sparse_size <= 8 + rice_size(extras, all_with):
        bits = [bit for gap in rank_gaps for bit in rice(gap, ranks_with)]
        return SPARSE, sparse_head, bits + [bit for rest in rests for bit in rice(rest, rests_with)]
    return RICE, bytes([all_with]), [bit for extra in extras for bit in rice(extra, all_with)]


def pack_bits(bits):
    packed = bytearray((len(bits) + 7) // 8)
    for i, bit in enumerate(bits):
        packed[i // 8] |= bit << i % 8
    return bytes(packed)


class BitReader:
    def __init__(self, data):
        self.bits = [byte >> bit & 1 for byte in data for bit in range(8)]
        self.offset = 0

    def bit(self):
        refuse_unless(self.offset < len(self.bits), "patch-truncated")
        self.offset += 1
        return self.bits[self.offset - 1]

    def rice(self, parameter, largest, code):
        zeros = 0
        while not self.bit():
            zeros += 1
        value = zeros << parameter
        for low in range(parameter):
            value += self.bit() << low
        refuse_unless(value <= largest, code)
        return value


def read_tight(dtype, reader, old):
    """Return (positions, new values, count)."""
    plans, count = read_tight_head(reader, len(old))
    bits, width = BitReader(reader.take(len(reader.data) - reader.offset)), float_width(dtype)
    queues, passed = {}, 0
    for index, changed, parameter, mode, exception_count, ranks_with, sizes_with in plans:
        gap_list = [bits.rice(parameter, BLOCK_ELEMENTS - 1, "patch-gaps") for _ in range(changed)]
        passed += sum(gap_list) + changed
        ups = [bits.bit() for _ in range(changed)]
        extras = [0] * changed
        if mode == RICE:
            extras = [bits.rice(sizes_with, (1 << width - 1) - 1, "patch-values") for _ in range(changed)]
        if mode == SPARSE:
            rank_gaps = [bits.rice(ranks_with, changed - 1, "patch-values") for _ in range(exception_count)]
            rests = [bits.rice(sizes_with, (1 << width - 1) - 2, "patch-values") for _ in range(exception_count)]
            rank = 0
            for gap, rest in zip(rank_gaps, rests, strict=True):
                refuse_unless(rank + gap < changed, "patch-values")
                extras[rank + gap] = rest + 1
                rank += gap + 1
        steps = [extra + 1 if up else -extra - 1 for up, extra in zip(ups, extras, strict=True)]
        queues[index] = list(zip(gap_list, steps, strict=True))
    refuse_unless(passed <= len(old), "patch-gaps")
    refuse_unless(len(bits.bits) - bits.offset < 8 and not any(bits.bits[bits.offset :]), "patch-trailing")
    positions, values = [], []
    for position, before in enumerate(old):
        queue = queues.get(class_of(dtype, before))
        if queue and queue[0][0] == 0:
            positions.append(position)
            values.append(step_from(before, queue.pop(0)[1], width))
        elif queue:
            queue[0] = (queue[0][0] - 1, queue[0][1])
    return positions, values, count


def read_tight_head(reader, block_elements):
    count = reader.varint()
    refuse_unless(0 < count <= block_elements, "patch-count")
    present, plans = reader.varint(), []
    refuse_unless(present < 1 << CLASSES, "patch-values")
    for index in range(CLASSES):
        if present >> index & 1:
            changed = reader.varint()
            refuse_unless(0 < changed <= count, "patch-count")
            packed = reader.take(1)[0]
            mode, exception_count, ranks_with, sizes_with = packed >> 5, 0, 0, 0
            refuse_unless(mode in (ONES, SPARSE, RICE), "patch-values")
            if mode == SPARSE:
                exception_count, ranks_with = reader.varint(), reader.take(1)[0]
                sizes_with = reader.take(1)[0]
                refuse_unless(0 < exception_count <= changed, "patch-count")
            if mode == RICE:
                sizes_with = reader.take(1)[0]
            refuse_unless(ranks_with < 32 and sizes_with < 32, "patch-values")
            plans.append((index, changed, packed & 31, mode, exception_count, ranks_with, sizes_with))
    refuse_unless(sum(plan[1] for plan in plans) == count, "patch-count")
    return plans, count


# Dense, and the choice.


def dense_body(changed_count, new, size):
    return varint(changed_count) + integer_planes(new, size)


def encode_block(dtype, old, new, allowed):
    """Return (codec id, changed count, body), or None where nothing changed."""
    size = ELEMENT_SIZES[dtype]
    positions = [i for i in range(len(old)) if old[i] != new[i]]
    if not positions:
        return None
    old_values, new_values = [old[i] for i in positions], [new[i] for i in positions]
    bodies = {}
    if ABSOLUTE in allowed:
        bodies[ABSOLUTE] = absolute_body(positions, new_values, size)
    if PLAIN in allowed and dtype in FLOAT_FIELDS:
        bodies[PLAIN] = plain_body(dtype, positions, old_values, new_values)
    if TIGHT in allowed and dtype in FLOAT_FIELDS:
        bodies[TIGHT] = tight_body(dtype, old, new)
    shortest = min((len(body) for body in bodies.values()), default=len(old) * size)
    if DENSE in allowed and shortest * 8 > len(old) * size:
        bodies[DENSE] = dense_body(len(positions), new, size)
    codec = min(bodies, key=lambda codec: (len(bodies[codec]), codec))
    return codec, len(positions), bodies[codec]


def decode_block(dtype, codec, body, old):
    """Return [(position, old value, new value)]."""
    size, reader = ELEMENT_SIZES[dtype], Reader(body)
    if codec == DENSE:
        count = reader.varint()
        new = read_integers(reader, size, len(old))
        positions = [i for i in range(len(old)) if old[i] != new[i]]
        values = [new[i] for i in positions]
    elif codec == TIGHT:
        positions, values, count = read_tight(dtype, reader, old)
    else:
        positions = read_positions(reader, len(old))
        count = len(positions)
        if codec == ABSOLUTE:
            values = read_integers(reader, size, count)
        else:
            values = _read_plain_values(dtype, reader, [old[i] for i in positions])
    refuse_unless(reader.at_end(), "patch-trailing")
    refuse_unless(len(positions) == count, "patch-mismatch")
    refuse_unless(all(old[i] != value for i, value in zip(positions, values, strict=True)), "patch-mismatch")
    return [(i, old[i], value) for i, value in zip(positions, values, strict=True)]


def _read_plain_values(dtype, reader, old_values):
    count, width = len(old_values), float_width(dtype)
    ups = read_plane(reader, (count + 7) // 8, (count + 7) // 8)
    up = [ups[i // 8] >> i % 8 & 1 for i in range(len(ups) * 8)]
    refuse_unless(not any(up[count:]), "patch-values")
    exception_count = reader.varint()
    refuse_unless(exception_count <= count, "patch-count")
    values = [step_from(old, 1 if up[i] else -1, width) for i, old in enumerate(old_values)]
    if exception_count:
        ranks = read_ranks(read_plane(reader, exception_count, 3 * exception_count), count, exception_count)
        refuse_unless(not any(up[rank] for rank in ranks), "patch-values")
        for rank, value in zip(ranks, read_integers(reader, width // 8, exception_count), strict=True):
            values[rank] = value
    return values


# Patch blob.


def blocks(tensors):
    """Return [(tensor index, first element, element count)] in the order blocks are numbered."""
    listed = []
    for index, tensor in enumerate(tensors):
        total = element_count(tensor)
        listed += [(index, start, min(BLOCK_ELEMENTS, total - start)) for start in range(0, total, BLOCK_ELEMENTS)]
    return listed


def elements(data, dtype, start, count):
    size = ELEMENT_SIZES[dtype]
    part = data[start * size : (start + count) * size]
    return [int.from_bytes(part[i : i + size], "little") for i in range(0, len(part), size)]


def header(tensors, form, aliases=(), excluded=()):
    return struct.pack("<4sBBH", b"PLSB", 1, form, 0) + blake3(encode_table(tensors, aliases, excluded)).digest()


def record(codec, block_gap, body):
    return bytes([codec]) + varint(block_gap) + varint(len(body)) + body


def end(record_count, changed_count):
    return bytes([END]) + varint(record_count) + varint(changed_count)


def write_patch(tensors, form, encoded):
    """``encoded`` is [(block number, (codec id, changed count, body))]."""
    blob, next_block = header(tensors, form), 0
    for number, (codec, _, body) in encoded:
        blob += record(codec, number - next_block, body)
        next_block = number + 1
    return blob + end(len(encoded), sum(count for _, (_, count, _) in encoded))


def encode_patch(tensors, old, new, allowed):
    encoded = []
    for number, (index, start, count) in enumerate(blocks(tensors)):
        dtype = tensors[index][1]
        before, after = elements(old[index], dtype, start, count), elements(new[index], dtype, start, count)
        block = encode_block(dtype, before, after, allowed)
        if block is not None:
            encoded.append((number, block))
    return write_patch(tensors, 0 if allowed & {PLAIN, TIGHT} else 1, encoded)


def encode_absolute(tensors, changes):
    """``changes`` is [(tensor index, index, old value, new value)], ascending."""
    encoded = []
    for number, (index, start, count) in enumerate(blocks(tensors)):
        here = [change for change in changes if change[0] == index and start <= change[1] < start + count]
        if here:
            size = ELEMENT_SIZES[tensors[index][1]]
            body = absolute_body([change[1] - start for change in here], [change[3] for change in here], size)
            encoded.append((number, (ABSOLUTE, len(here), body)))
    return write_patch(tensors, 1, encoded)


def decode_patch(blob, tensors, old):
    """Return [(tensor index, index, old value, new value)]."""
    reader = Reader(blob)
    magic, version, form, reserved = struct.unpack("<4sBBH", reader.take(40)[:8])
    refuse_unless(magic == b"PLSB", "patch-magic")
    refuse_unless(version == 1, "patch-version")
    refuse_unless(form in (0, 1) and reserved == 0, "patch-form")
    refuse_unless(blob[8:40] == header(tensors, 0)[8:40], "patch-table")
    numbered = blocks(tensors)
    changes, record_count, number = [], 0, 0
    while (codec := reader.take(1)[0]) != END:
        number += reader.varint()
        refuse_unless(number < len(numbered), "patch-block")
        index, start, count = numbered[number]
        dtype = tensors[index][1]
        refuse_unless(codec in (ABSOLUTE, PLAIN, DENSE, TIGHT), "codec-unknown")
        refuse_unless(codec in (ABSOLUTE, DENSE) or (dtype in FLOAT_FIELDS and form == 0), "codec-unsuitable")
        size = reader.varint()
        refuse_unless(size <= count * ELEMENT_SIZES[dtype] + count // 4 + 64, "patch-size")
        body = reader.take(size)
        changed_count = Reader(body).varint() >> (codec in (ABSOLUTE, PLAIN))
        refuse_unless(0 < changed_count <= count, "patch-count")
        old_values = elements(old[index], dtype, start, count)
        changes += [
            (index, start + position, before, after)
            for position, before, after in decode_block(dtype, codec, body, old_values)
        ]
        record_count += 1
        number += 1
    refuse_unless((reader.varint(), reader.varint()) == (record_count, len(changes)), "patch-count")
    refuse_unless(reader.at_end(), "patch-trailing")
    return changes


# Changes in spool form.


def encode_changes(tensors, tensor_index, changes):
    """``changes`` is [(index, old value, new value)] of one tensor."""
    tensor = tensors[tensor_index]
    sizes = (4 if element_count(tensor) < 1 << 32 else 8, ELEMENT_SIZES[tensor[1]], ELEMENT_SIZES[tensor[1]])
    out = struct.pack("<4sIBB6sQ", b"PCHG", tensor_index, sizes[0], sizes[1], bytes(6), len(changes))
    for column, size in enumerate(sizes):
        array = b"".join(change[column].to_bytes(size, "little") for change in changes)
        out += array + bytes(-len(array) % 8)
    return out


def decode_changes(tensors, data):
    """Return [(tensor index, [(index, old value, new value)])]."""
    spools, offset = [], 0

    def take(size):
        nonlocal offset
        refuse_unless(offset + size <= len(data), "changes-truncated")
        offset += size
        return data[offset - size : offset]

    while offset < len(data):
        magic, tensor_index, index_size, size, reserved, count = struct.unpack("<4sIBB6sQ", take(24))
        refuse_unless(magic == b"PCHG" and reserved == bytes(6), "changes-header")
        refuse_unless(tensor_index < len(tensors), "changes-header")
        total = element_count(tensors[tensor_index])
        refuse_unless(index_size == (4 if total < 1 << 32 else 8), "changes-header")
        refuse_unless(size == ELEMENT_SIZES[tensors[tensor_index][1]] and count <= total, "changes-header")
        columns = []
        for width in (index_size, size, size):
            array = take(count * width + -count * width % 8)
            refuse_unless(not any(array[count * width :]), "changes-header")
            columns.append([int.from_bytes(array[i * width : (i + 1) * width], "little") for i in range(count)])
        indices = columns[0]
        refuse_unless(all(a < b for a, b in pairwise(indices)), "changes-index")
        refuse_unless(not indices or indices[-1] < total, "changes-index")
        spools.append((tensor_index, list(zip(*columns, strict=True))))
    return spools
