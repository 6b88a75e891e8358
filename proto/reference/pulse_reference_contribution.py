"""Slow, plain Python reference of proto/spec-codec.md, sections 13 to 15: contribution and slice blobs, *gated*.

It imports nothing from pulsenet and shares no code with it. Weights and values are FP32 bits as integers.
"""

import struct
from functools import cache

from pulse_reference_codec import (
    ABSOLUTE,
    BLOCK_ELEMENTS,
    CLASSES,
    BitReader,
    Reader,
    absolute_body,
    best_parameter,
    blake3,
    blocks,
    class_of,
    element_count,
    encode_table,
    end,
    gaps,
    integer_planes,
    pack_bits,
    plane,
    read_integers,
    read_plane,
    read_positions,
    read_ranks,
    record,
    refuse_unless,
    rice,
    varint,
)

LISTED, GATED, FULL = ABSOLUTE, 2, 3
CHUNK = 1 << 20
HALF_CELL = 1 << 15
REACH_MAX = 542


def exponent_of(bits):
    return max(bits >> 23 & 0xFF, 1)


def edge_distance(theta):
    return abs(theta % 0x10000 - HALF_CELL)


@cache
def reach(theta):
    distance = edge_distance(theta)
    length = distance.bit_length()
    half = distance >> length - 2 & 1 if length > 1 else 0
    return 2 * length + half + 2 * exponent_of(theta)


@cache
def reach_class(theta, top):
    return min(max(top - reach(theta), 0), CLASSES - 1)


def places_of(theta, value):
    """Return the magnitude of ``value`` in last places of ``theta``, or None if it is no whole number of them."""
    exponent, mantissa = value >> 23 & 0xFF, value & 0x7FFFFF
    if exponent == 0xFF:
        return None
    if exponent > 0:
        mantissa += 0x800000
    shift = exponent_of(value) - exponent_of(theta)
    if shift >= 0 or mantissa == 0:
        return mantissa << max(shift, 0)
    return mantissa >> -shift if mantissa % (1 << -shift) == 0 else None


def is_away(theta, value):
    has_other_sign = theta >> 31 != value >> 31
    return has_other_sign != (theta % 0x10000 < HALF_CELL)


def number_of(theta, value):
    """Return the number that stands for ``value``, or None if it escapes."""
    places = places_of(theta, value)
    if places is None or places >= 1 << 32:
        return None
    edge = 2 * HALF_CELL - edge_distance(theta) if is_away(theta, value) else edge_distance(theta)
    return places - edge if places >= edge else None


def value_from(theta, number, away):
    """Undo number_of."""
    low = theta % 0x10000
    places = number + (2 * HALF_CELL - edge_distance(theta) if away else edge_distance(theta))
    exponent = exponent_of(theta)
    while places >= 1 << 24:
        refuse_unless(places % 2 == 0, "patch-values")
        places, exponent = places // 2, exponent + 1
    while 0 < places < 1 << 23 and exponent > 1:
        places, exponent = places * 2, exponent - 1
    exponent = exponent if places >= 1 << 23 else 0
    refuse_unless(exponent < 0xFF, "patch-values")
    has_other_sign = bool(away) != (low < HALF_CELL)
    return ((theta >> 31) ^ has_other_sign) << 31 | exponent << 23 | places & 0x7FFFFF


def class_mask(by_class):
    return varint(sum(1 << index for index in by_class))


def codes(by_class):
    """Return ({class: parameter}, stream) of lists of numbers by class."""
    parameters = {index: best_parameter(by_class[index]) for index in sorted(by_class)}
    bits = [bit for index in sorted(by_class) for number in by_class[index] for bit in rice(number, parameters[index])]
    return parameters, pack_bits(bits)


def gated_body(theta, entries, compresses=True):
    """``theta`` are the block's weights, ``entries`` [(position, value)]."""
    reaches = sorted((reach(theta[position]) for position, _ in entries), reverse=True)
    top = reaches[len(reaches) // 4096]
    listed, passed, gaps_by_class = dict(entries), [0] * CLASSES, {}
    for position, weight in enumerate(theta):
        index = reach_class(weight, top)
        if position in listed:
            gaps_by_class.setdefault(index, []).append(passed[index])
            passed[index] = 0
        else:
            passed[index] += 1
    numbers_by_class, aways_by_class, escapes = {}, {}, []
    for rank, (position, value) in enumerate(entries):
        number = number_of(theta[position], value)
        if number is None:
            escapes.append(rank)
        else:
            index = class_of("F32", theta[position])
            numbers_by_class.setdefault(index, []).append(number)
            aways_by_class.setdefault(index, []).append(int(is_away(theta[position], value)))
    parameters, stream = codes(gaps_by_class)
    body = varint(len(entries)) + varint(top) + class_mask(gaps_by_class)
    for index in sorted(gaps_by_class):
        body += varint(len(gaps_by_class[index])) + bytes([parameters[index]])
    body += varint(len(stream)) + stream + varint(len(escapes))
    if escapes:
        body += plane(b"".join(varint(gap) for gap in gaps(escapes)), compresses)
        body += integer_planes([entries[rank][1] for rank in escapes], 4, compresses)
    body += plane(pack_bits([bit for index in sorted(aways_by_class) for bit in aways_by_class[index]]), compresses)
    parameters, stream = codes(numbers_by_class)
    return body + class_mask(numbers_by_class) + bytes(parameters.values()) + stream


def read_mask(reader):
    mask = reader.varint()
    refuse_unless(mask < 1 << CLASSES, "patch-values")
    return [index for index in range(CLASSES) if mask >> index & 1]


def read_parameter(reader):
    parameter = reader.take(1)[0]
    refuse_unless(parameter < 32, "patch-values")
    return parameter


def read_codes(stream, counts, parameters, largest, code):
    bits = BitReader(stream)
    numbers = {
        index: [bits.rice(parameters[index], largest, code) for _ in range(counts[index])] for index in sorted(counts)
    }
    refuse_unless(len(bits.bits) - bits.offset < 8 and not any(bits.bits[bits.offset :]), "patch-trailing")
    return numbers


def read_gated(reader, theta):
    """Return [(position, value)]."""
    count = reader.varint()
    refuse_unless(0 < count <= len(theta), "patch-count")
    top = reader.varint()
    refuse_unless(top <= REACH_MAX, "patch-values")
    counts, parameters = {}, {}
    for index in read_mask(reader):
        counts[index], parameters[index] = reader.varint(), read_parameter(reader)
        refuse_unless(0 < counts[index] <= count, "patch-count")
    refuse_unless(sum(counts.values()) == count, "patch-count")
    gap_lists = read_codes(reader.take(reader.varint()), counts, parameters, BLOCK_ELEMENTS - 1, "patch-gaps")
    refuse_unless(count + sum(map(sum, gap_lists.values())) <= len(theta), "patch-gaps")
    positions = []
    for position, weight in enumerate(theta):
        queue = gap_lists.get(reach_class(weight, top))
        if queue and queue[0] == 0:
            positions.append(position)
            queue.pop(0)
        elif queue:
            queue[0] -= 1
    refuse_unless(len(positions) == count, "patch-gaps")
    return list(zip(positions, read_gated_values(reader, [theta[position] for position in positions]), strict=True))


def read_gated_values(reader, theta):
    escape_count = reader.varint()
    refuse_unless(escape_count <= len(theta), "patch-count")
    values = [None] * len(theta)
    if escape_count:
        ranks = read_ranks(read_plane(reader, escape_count, 3 * escape_count), len(theta), escape_count)
        for rank, value in zip(ranks, read_integers(reader, 4, escape_count), strict=True):
            values[rank] = value
    regular = sorted((class_of("F32", theta[rank]), rank) for rank, value in enumerate(values) if value is None)
    size = (len(regular) + 7) // 8
    away = BitReader(read_plane(reader, size, size))
    aways = [away.bit() for _ in regular]
    refuse_unless(not any(away.bits[away.offset :]), "patch-values")
    counts = {}
    for index, _ in regular:
        counts[index] = counts.get(index, 0) + 1
    refuse_unless(read_mask(reader) == sorted(counts), "patch-values")
    parameters = {index: read_parameter(reader) for index in sorted(counts)}
    stream = reader.take(len(reader.data) - reader.offset)
    numbers = read_codes(stream, counts, parameters, (1 << 32) - 1, "patch-values")
    in_order = [number for index in sorted(numbers) for number in numbers[index]]
    for (_, rank), number, away_bit in zip(regular, in_order, aways, strict=True):
        values[rank] = value_from(theta[rank], number, away_bit)
    return values


# Contribution blob. Tables are [(name, shape)]: all masters are F32.


def table_of(masters):
    return [(name, "F32", shape) for name, shape in masters]


def header(masters, state_root, round_index, inner_step_count):
    digest = blake3(encode_table(table_of(masters))).digest()
    return struct.pack("<4sB3s32s32sQI", b"PLSC", 1, bytes(3), digest, state_root, round_index, inner_step_count)


def sections_of(masters):
    """Return for each section the numbers of its blocks, and the blocks."""
    listed = blocks(table_of(masters))
    before, total = [], 0
    for master in table_of(masters):
        before.append(total)
        total += element_count(master)
    found = []
    for number, (tensor, start, _) in enumerate(listed):
        section = (before[tensor] + start) // BLOCK_ELEMENTS
        while len(found) <= section:
            found.append([])
        found[section].append(number)
    return found, listed


def best_body(theta, entries, compresses):
    values = [value for _, value in entries]
    bodies = [
        (LISTED, absolute_body([position for position, _ in entries], values, 4, compresses)),
        (GATED, gated_body(theta, entries, compresses)),
    ]
    if len(entries) == len(theta):
        bodies.append((FULL, integer_planes(values, 4, compresses)))
    return min(bodies, key=lambda body: (len(body[1]), body[0]))


def encode_sections(masters, theta, entries, chosen, compresses):
    """Return the bytes of each section; ``chosen`` are their numbers."""
    found, listed = sections_of(masters)
    encoded = []
    for section in chosen:
        data, record_count, total, next_block = b"", 0, 0, found[section][0]
        for number in found[section]:
            tensor, start, count = listed[number]
            here = [
                (index - start, value) for own, index, value in entries if own == tensor and 0 <= index - start < count
            ]
            if here:
                codec, body = best_body(theta[tensor][start : start + count], here, compresses)
                data += record(codec, number - next_block, body)
                next_block, record_count, total = number + 1, record_count + 1, total + len(here)
        data += end(record_count, total)
        encoded.append(data + bytes(len(data) % CHUNK == 0))
    return encoded


def decode_sections(reader, masters, theta, chosen):
    found, listed = sections_of(masters)
    entries = []
    for section in chosen:
        start_offset, record_count, before, number = reader.offset, 0, len(entries), found[section][0]
        while (codec := reader.take(1)[0]) != 0:
            number += reader.varint()
            refuse_unless(number <= found[section][-1], "patch-block")
            refuse_unless(codec in (LISTED, GATED, FULL), "codec-unknown")
            tensor, start, count = listed[number]
            size = reader.varint()
            refuse_unless(size <= 4 * count + count // 4 + 64, "patch-size")
            body = Reader(reader.take(size))
            if codec == GATED:
                here = read_gated(body, theta[tensor][start : start + count])
            else:
                positions = range(count) if codec == FULL else read_positions(body, count)
                here = list(zip(positions, read_integers(body, 4, len(positions)), strict=True))
                refuse_unless(body.at_end(), "patch-trailing")
            entries += [(tensor, start + position, value) for position, value in here]
            record_count, number = record_count + 1, number + 1
        refuse_unless((reader.varint(), reader.varint()) == (record_count, len(entries) - before), "patch-count")
        if (reader.offset - start_offset) % CHUNK == 0:
            refuse_unless(reader.take(1) == b"\0", "patch-trailing")
    refuse_unless(reader.at_end(), "patch-trailing")
    return entries


def encode_contribution(masters, theta, entries, state_root, round_index, inner_step_count):
    """``theta`` is a list of weights for each tensor, ``entries`` [(tensor index, index, value)], ascending."""
    return b"".join(contribution_parts(masters, theta, entries, state_root, round_index, inner_step_count))


def contribution_parts(masters, theta, entries, state_root, round_index, inner_step_count):
    chosen = range(len(sections_of(masters)[0]))
    own_header = header(masters, state_root, round_index, inner_step_count)
    return [own_header, *encode_sections(masters, theta, entries, chosen, compresses=True)]


def chunk_sizes(parts):
    """Return the sizes of the chunks of a contribution made of these parts."""
    sizes = []
    for part in parts:
        sizes += [min(CHUNK, len(part) - start) for start in range(0, len(part), CHUNK)]
    return sizes


def decode_contribution(masters, theta, blob, state_root):
    """Return [(tensor index, index, value)]."""
    reader = Reader(blob)
    magic, version, zeros = struct.unpack("<4sB3s", reader.take(84)[:8])
    refuse_unless((magic, version, zeros) == (b"PLSC", 1, bytes(3)), "contribution-header")
    refuse_unless(blob[8:40] == header(masters, state_root, 0, 0)[8:40], "contribution-table")
    refuse_unless(blob[40:72] == state_root, "contribution-base")
    return decode_sections(reader, masters, theta, range(len(sections_of(masters)[0])))


# Slice blob: sums of contributions over the sections of one slice.


def slice_header(masters, state_root, round_index, slice_index, slice_count):
    digest = blake3(encode_table(table_of(masters))).digest()
    return struct.pack(
        "<4sB3s32s32sQII", b"PLSS", 1, bytes(3), digest, state_root, round_index, slice_index, slice_count
    )


def slice_sections(masters, slice_index, slice_count):
    count = len(sections_of(masters)[0])
    return [section for section in range(count) if section * slice_count // count == slice_index]


def encode_slice(masters, theta, sums, state_root, round_index, slice_index, slice_count):
    """``sums`` are [(tensor index, index, sum)] of all slices."""
    chosen = slice_sections(masters, slice_index, slice_count)
    parts = encode_sections(masters, theta, sums, chosen, compresses=False)
    return slice_header(masters, state_root, round_index, slice_index, slice_count) + b"".join(parts)


def decode_slice(masters, theta, blob, state_root, round_index, slice_index, slice_count):
    """Return [(tensor index, index, sum)]."""
    reader = Reader(blob)
    expected = slice_header(masters, state_root, round_index, slice_index, slice_count)
    refuse_unless(reader.take(len(expected)) == expected, "slice-header")
    return decode_sections(reader, masters, theta, slice_sections(masters, slice_index, slice_count))
