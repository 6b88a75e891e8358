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
TWO_BYTE_FLOATS = ("BF16", "F16")
END, ABSOLUTE, PLAIN, DENSE = 0, 1, 2, 3
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


# BF16 and the ordered integer.


def cast_to_bf16(bits):
    """FP32 bits -> BF16 bits."""
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x0040
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def to_ordered(bits):
    return 0xFFFF - bits if bits >= 0x8000 else bits + 0x8000


def from_ordered(ordered):
    return ordered - 0x8000 if ordered >= 0x8000 else 0xFFFF - ordered


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


def plane(raw):
    raw = bytes(raw)
    if len(raw) >= 32:
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


def integer_planes(values, size):
    return b"".join(plane(value >> 8 * position & 0xFF for value in values) for position in range(size))


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


def positions_body(positions):
    narrow = gap_codes(positions, NARROW)
    if len(narrow) <= 2 * len(positions):
        return varint(len(positions) * 2) + plane(narrow)
    return varint(len(positions) * 2 + 1) + integer_planes(gap_codes(positions, WIDE), 2)


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


def absolute_body(positions, values, size):
    return positions_body(positions) + integer_planes(values, size)


def plain_body(positions, old_values, new_values):
    steps = [(to_ordered(new) - to_ordered(old)) % 0x10000 for old, new in zip(old_values, new_values, strict=True)]
    ups = bytearray((len(steps) + 7) // 8)
    for i, step in enumerate(steps):
        ups[i // 8] |= (step == 1) << i % 8
    exceptions = [i for i, step in enumerate(steps) if step not in (1, 0xFFFF)]
    body = positions_body(positions) + plane(ups) + varint(len(exceptions))
    if exceptions:
        body += plane(b"".join(varint(gap) for gap in gaps(exceptions)))
        body += integer_planes([new_values[i] for i in exceptions], 2)
    return body


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
    if PLAIN in allowed and dtype in TWO_BYTE_FLOATS:
        bodies[PLAIN] = plain_body(positions, old_values, new_values)
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
    else:
        positions = read_positions(reader, len(old))
        count = len(positions)
        if codec == ABSOLUTE:
            values = read_integers(reader, size, count)
        else:
            values = _read_plain_values(reader, [old[i] for i in positions])
    refuse_unless(reader.at_end(), "patch-trailing")
    refuse_unless(len(positions) == count, "patch-mismatch")
    refuse_unless(all(old[i] != value for i, value in zip(positions, values, strict=True)), "patch-mismatch")
    return [(i, old[i], value) for i, value in zip(positions, values, strict=True)]


def _read_plain_values(reader, old_values):
    count = len(old_values)
    ups = read_plane(reader, (count + 7) // 8, (count + 7) // 8)
    up = [ups[i // 8] >> i % 8 & 1 for i in range(len(ups) * 8)]
    refuse_unless(not any(up[count:]), "patch-values")
    exception_count = reader.varint()
    refuse_unless(exception_count <= count, "patch-count")
    values = [from_ordered((to_ordered(old) + (1 if up[i] else -1)) % 0x10000) for i, old in enumerate(old_values)]
    if exception_count:
        ranks = read_ranks(read_plane(reader, exception_count, 3 * exception_count), count, exception_count)
        refuse_unless(not any(up[rank] for rank in ranks), "patch-values")
        for rank, value in zip(ranks, read_integers(reader, 2, exception_count), strict=True):
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
    return write_patch(tensors, 0 if PLAIN in allowed else 1, encoded)


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
        refuse_unless(codec in (ABSOLUTE, PLAIN, DENSE), "codec-unknown")
        refuse_unless(codec != PLAIN or (dtype in TWO_BYTE_FLOATS and form == 0), "codec-unsuitable")
        size = reader.varint()
        refuse_unless(size <= count * ELEMENT_SIZES[dtype] + count // 4 + 64, "patch-size")
        body = reader.take(size)
        changed_count = Reader(body).varint() >> (codec != DENSE)
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
