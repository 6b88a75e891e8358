"""Slow, plain Python for spec-outer.md. Floats are exact fractions rounded once per operation; no numpy, no pulsenet.

A value is the integer of its FP32 bits, everywhere.
"""

import math
import struct
from fractions import Fraction

import xxhash
from blake3 import blake3

NAN = 0x7FC00000
INFINITY = 0x7F800000
SIGN = 0x80000000
BLOCK_ELEMENTS = 1 << 20
MIXING_KINDS = {
    "diloco": ("none", "global"),
    "global_m1": ("global", "none"),
    "global_m1_local_m2": ("global", "pair"),
    "local_m1_m2": ("pair", "pair"),
}


def is_nan(bits):
    return (bits & 0x7FFFFFFF) > INFINITY


def is_infinite(bits):
    return (bits & 0x7FFFFFFF) == INFINITY


def to_fraction(bits):
    """The exact value of finite bits."""
    sign = -1 if bits & SIGN else 1
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 0:
        return sign * Fraction(mantissa, 1 << 149)
    return sign * Fraction((1 << 23) | mantissa) * Fraction(2) ** (exponent - 150)


def from_fraction(value, zero_sign=0):
    """Round to nearest, ties to even; subnormals kept; overflow to infinity."""
    if value == 0:
        return zero_sign
    sign = SIGN if value < 0 else 0
    value = abs(value)
    exponent = -149
    while value >= Fraction(2) ** (exponent + 24):
        exponent += 1
    scaled = value / Fraction(2) ** exponent
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
        whole += 1
    if whole == 1 << 24:
        whole, exponent = 1 << 23, exponent + 1
    if whole < 1 << 23:
        return sign | whole
    if exponent > 104:
        return sign | INFINITY
    return sign | (exponent + 150) << 23 | (whole & 0x7FFFFF)


def add(a, b):
    if is_nan(a) or is_nan(b):
        return NAN
    if is_infinite(a) or is_infinite(b):
        if is_infinite(a) and is_infinite(b) and a != b:
            return NAN
        return a if is_infinite(a) else b
    # Two negative zeros give a negative zero; an exact cancellation gives +0.
    return from_fraction(to_fraction(a) + to_fraction(b), zero_sign=a & b & SIGN)


def subtract(a, b):
    return NAN if is_nan(b) else add(a, b ^ SIGN)


def multiply(a, b):
    sign = (a ^ b) & SIGN
    if is_nan(a) or is_nan(b):
        return NAN
    if is_infinite(a) or is_infinite(b):
        return NAN if (a & ~SIGN) == 0 or (b & ~SIGN) == 0 else sign | INFINITY
    return from_fraction(to_fraction(a) * to_fraction(b), zero_sign=sign)


def divide(a, count):
    """a / count for a positive whole number."""
    if is_nan(a):
        return NAN
    if is_infinite(a):
        return a
    return from_fraction(to_fraction(a) / count, zero_sign=a & SIGN)


def bf16(bits):
    if is_nan(bits):
        return (bits >> 16) | 0x0040
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def correct(theta, local, residual):
    return [add(r, subtract(t, n)) for t, n, r in zip(theta, local, residual, strict=True)]


def flushed_parts(element_counts, round_index, interval):
    """What passes the gate whole in a round: [tensor, first element, end], by tensors' element counts."""
    found, block = [], 0
    for tensor, count in enumerate(element_counts):
        for start in range(0, count, BLOCK_ELEMENTS):
            if interval and block % interval == round_index % interval:
                found.append([tensor, start, min(start + BLOCK_ELEMENTS, count)])
            block += 1
    return found


def cut(value, mantissa_bits):
    """The value with its lowest mantissa bits cleared."""
    unit = 1 << 23 - mantissa_bits
    return value // unit * unit


def gate(theta, local, residual, parts=(), mantissa_bits=23):
    """Sent positions and values; ``parts`` are [first element, end] that pass whole."""
    sent = []
    for index, (t, s) in enumerate(zip(theta, correct(theta, local, residual), strict=True)):
        if any(start <= index < end for start, end in parts):
            sent.append((index, cut(s, mantissa_bits)))
        elif bf16(t) != bf16(subtract(t, s)):
            sent.append((index, s))
    return [index for index, _ in sent], [value for _, value in sent]


def split(value, scale):
    """What is counted and what is held of one sent value."""
    if scale == 0x3F800000:
        return value, 0
    held = subtract(value, multiply(scale, value))
    return subtract(value, held), held


def settle(theta, local, residual, indices, values, scale, outcome, keeps_rest=False):
    """The residual after the round; ``keeps_rest`` where values may be cut."""
    if outcome == "rejected":
        return list(residual)
    settled = correct(theta, local, residual)
    if outcome == "counted":
        for index, value in zip(indices, values, strict=True):
            held = split(value, scale)[1]
            settled[index] = add(subtract(settled[index], value), held) if keeps_rest else held
    return settled


def mean(contributions, count):
    """contributions: key -> (indices or None, values, scale). Returns positions (None: all) and means."""
    sums, touched = [0] * count, set()
    is_dense = False
    for key in sorted(contributions):
        indices, values, scale = contributions[key]
        is_dense |= indices is None
        for index, value in zip(range(count) if indices is None else indices, values, strict=True):
            sums[index] = add(sums[index], split(value, scale)[0])
            touched.add(index)
    positions = list(range(count)) if is_dense else sorted(touched)
    return (None if is_dense else positions), [divide(sums[index], len(contributions)) for index in positions]


def trimmed(contributions, count, trim_count):
    """Dense contributions only: key -> values."""
    means = []
    for index in range(count):
        column = [add(values[index], 0) for values in contributions.values()]
        column.sort(key=lambda bits: to_fraction(bits))
        kept = column[trim_count : len(column) - trim_count]
        total = 0
        for value in kept:
            total = add(total, value)
        means.append(divide(total, len(kept)))
    return means


def step(theta, momentum, gradient, learning_rate, momentum_factor):
    new_theta, new_momentum = [], []
    for t, v, g in zip(theta, momentum, gradient, strict=True):
        v = add(multiply(momentum_factor, v), g)
        new_momentum.append(v)
        new_theta.append(subtract(t, multiply(learning_rate, add(g, multiply(momentum_factor, v)))))
    return new_theta, new_momentum


def norm(values):
    """FP64, one square and one addition at a time."""
    total = 0.0
    for bits in values:
        value = struct.unpack("<f", struct.pack("<I", bits))[0]
        total += value * value
    return math.sqrt(total)


def scales(norms, clip_norm_ratio):
    """FP32 bits of each contribution's scale."""
    if clip_norm_ratio == 0:
        return [0x3F800000] * len(norms)
    norms = [struct.unpack("<f", struct.pack("<f", one))[0] for one in norms]
    ranked = sorted(norms)
    middle = len(ranked) // 2
    median = ranked[middle] if len(ranked) % 2 else (ranked[middle - 1] + ranked[middle]) / 2
    limit = clip_norm_ratio * median
    return [
        max(struct.unpack("<I", struct.pack("<f", limit / one))[0], 1) if limit and one > limit else 0x3F800000
        for one in norms
    ]


def history(tensor, rounds, interval=0, mantissa_bits=23):
    """Rounds of several trainers on one tensor: [name, shape]; a round lists [key, delta, scale, outcome] each.

    Returns for each round the state root after it and every trainer's residual by key, ascending.
    """
    count = math.prod(tensor[1])
    theta, momentum, residuals, found = [0x3F800000] * count, [0] * count, {}, []
    for round_index, trainers in enumerate(rounds):
        contributions = {}
        for key, delta, scale, outcome in trainers:
            residual = residuals.get(key, [0] * count)
            local = [subtract(t, d) for t, d in zip(theta, delta, strict=True)]
            parts = [[start, end] for _, start, end in flushed_parts([count], round_index, interval)]
            indices, values = gate(theta, local, residual, parts, mantissa_bits)
            keeps_rest = mantissa_bits < 23
            residuals[key] = settle(theta, local, residual, indices, values, scale, outcome, keeps_rest)
            if outcome == "counted":
                contributions[bytes.fromhex(key)] = (indices, values, scale)
        if contributions:
            gradient = [0] * count
            for index, value in zip(*mean(contributions, count), strict=True):
                gradient[index] = value
            theta, momentum = step(theta, momentum, gradient, LEARNING_RATE, MOMENTUM_FACTOR)
        root = state_root([tensor], round_index + 1, [theta], [momentum]).hex()
        found.append([root, [residuals[key] for key in sorted(residuals)]])
    return found


def pack(values):
    return struct.pack(f"<{len(values)}I", *values)


def state_root(tensors, round_index, theta, momentum):
    """tensors: [name, shape] ascending by name; theta and momentum: a list of bits each."""
    return root_of(tensors, round_index, [pack(t) for t in theta], [pack(v) for v in momentum])


def root_of(tensors, round_index, firsts, seconds):
    """The same over bytes: under ddp the second ones of each tensor are its inner optimizer's state."""
    hasher = blake3(b"pulsenet-state-v1\0" + struct.pack("<QI", round_index, len(tensors)))
    for (name, shape), first, second in zip(tensors, firsts, seconds, strict=True):
        raw = name.encode()
        hasher.update(struct.pack("<H", len(raw)) + raw + struct.pack(f"<B{len(shape)}Q", len(shape), *shape))
        hasher.update(xxhash.xxh3_128_digest(first) + xxhash.xxh3_128_digest(second))
    return hasher.digest()


def state_anchor(tensors, round_index, theta, momentum):
    blob = b"PLSO" + bytes([1, 0, 0, 0]) + state_root(tensors, round_index, theta, momentum)
    blob += struct.pack("<Q", round_index)
    for t, v in zip(theta, momentum, strict=True):
        blob += pack(t) + pack(v)
    return blob


def inner_state(slots):
    """slots: [name, shape, bits] in any order."""
    data = struct.pack("<H", len(slots))
    for name, shape, values in sorted(slots, key=lambda slot: slot[0].encode()):
        raw = name.encode()
        data += struct.pack("<H", len(raw)) + raw + struct.pack(f"<B{len(shape)}Q", len(shape), *shape) + pack(values)
    return data


def ddp_state_root(tensors, round_index, theta, slots):
    """slots: of each tensor, as above."""
    return root_of(tensors, round_index, [pack(t) for t in theta], [inner_state(each) for each in slots])


def ddp_state_anchor(tensors, round_index, theta, slots):
    blob = b"PLSO" + bytes([2, 0, 0, 0]) + ddp_state_root(tensors, round_index, theta, slots)
    blob += struct.pack("<Q", round_index)
    for t, each in zip(theta, slots, strict=True):
        data = inner_state(each)
        blob += pack(t) + struct.pack("<Q", len(data)) + data
    return blob


SPECIALS = [0x00000001, 0x807FFFFF, 0x00800000, 0x80000000, 0x00000000, 0x3F808000, 0x3F818000, 0xBF7F8000]
LASTS = [0x00018000, 0x00000007, 0x00000005, 0x00000009]
SCALES = [0x3F800000, 0x3E99999A, 0x3F400000]
LEARNING_RATE, MOMENTUM_FACTOR = 0x3F333333, 0x3F666666


def pairs(seed, round_index, job, members):
    """Members in the order of a digest; neighbours are partners, lower key first."""
    head = b"pulsenet mixing pairs 1" + struct.pack("<I", len(seed)) + seed + struct.pack("<QB", round_index, job)
    order = sorted(members, key=lambda member: blake3(head + member).digest())
    return [sorted(order[start : start + 2]) for start in range(0, len(order), 2)]


def mixing_history(mix1, mix2, seed, members, rounds):
    """Rounds of gossip on one tensor that starts at 1: ``none``, ``global`` or ``pair`` for each job.

    A round lists by how much each member's inner steps move its master down. Returns z and v of each after each round.
    """
    count = len(rounds[0][0])
    iterates = {member: [0x3F800000] * count for member in members}
    momenta = {member: [0] * count for member in members}

    def mix(kind, job, round_index, vectors):
        if kind == "none":
            return vectors
        groups = [members] if kind == "global" else pairs(seed, round_index, job, members)
        mixed = {}
        for group in groups:
            found = mean({member: (None, vectors[member], 0x3F800000) for member in group}, count)[1]
            mixed.update(dict.fromkeys(group, found))
        return mixed

    found = []
    for round_index, deltas in enumerate(rounds):
        mixed = mix(mix1, 1, round_index, iterates)
        gradients = {}
        for member, delta in zip(members, deltas, strict=True):
            local = [subtract(z, d) for z, d in zip(iterates[member], delta, strict=True)]
            gradients[member] = [subtract(z, t) for z, t in zip(iterates[member], local, strict=True)]
        gradients = mix(mix2, 2, round_index, gradients)
        for member in members:
            iterates[member], momenta[member] = step(
                mixed[member], momenta[member], gradients[member], LEARNING_RATE, MOMENTUM_FACTOR
            )
        found.append([[iterates[member], momenta[member]] for member in members])
    return found


def mixing_blob(table_digest, job, base_root, round_index, contributors, values, slice_index=0, slice_count=1):
    """Whole vectors of less than 32 elements a tensor: no plane is long enough to be compressed.

    values: of each tensor of the joint table. Numbers stay below 64.
    """
    blob = b"PLSM" + bytes([1, job, 0, 0]) + table_digest + base_root
    blob += struct.pack("<QIII", round_index, slice_index, slice_count, contributors)
    total, first, own = sum(map(len, values)), 0, []
    for tensor in values:
        if tensor and first * slice_count // total == slice_index:
            own.append(tensor)
        first += len(tensor)
    for tensor in own:
        planes = [bytes(value >> shift & 0xFF for value in tensor) for shift in (0, 8, 16, 24)]
        body = b"".join(bytes([len(plane) << 1]) + plane for plane in planes)
        blob += bytes([3, 0, len(body)]) + body
    return blob + bytes([0, len(own), sum(map(len, own))])


def self_test_input():
    state, arrays = 0x9E3779B97F4A7C15, []
    for low, span in ((116, 12), (96, 24), (104, 16), (106, 16)):
        bits = list(SPECIALS)
        while len(bits) < 64:
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
            z ^= z >> 31
            bits.append((z >> 63) << 31 | (low + ((z >> 32) & 0xFFFF) % span) << 23 | (z & 0x7FFFFF))
        bits = roll(bits, 11 * len(arrays))
        bits[-1] = LASTS[len(arrays)]
        arrays.append(bits)
    return arrays


def roll(values, count):
    """Move every value ``count`` places up, the last ones to the front."""
    return [values[(index - count) % len(values)] for index in range(len(values))]


def self_test():
    theta, momentum, residual, delta = self_test_input()
    residuals = [roll(residual, 21 * trainer) for trainer in range(3)]
    hasher = blake3(b"pulsenet-outer-self-test-v1\0")
    for round_index in range(2):
        contributions = {}
        for trainer, scale in enumerate(SCALES):
            local = [subtract(t, d) for t, d in zip(theta, roll(delta, 21 * trainer + round_index), strict=True)]
            indices, values = gate(theta, local, residuals[trainer])
            residuals[trainer] = settle(theta, local, residuals[trainer], indices, values, scale, "counted")
            contributions[bytes([trainer])] = (indices, values, scale)
            hasher.update(struct.pack("<I", len(indices)) + pack(indices) + pack(values) + pack(residuals[trainer]))
        gradient = [0] * 64
        for index, value in zip(*mean(contributions, 64), strict=True):
            gradient[index] = value
        theta, momentum = step(theta, momentum, gradient, LEARNING_RATE, MOMENTUM_FACTOR)
        hasher.update(pack(gradient) + pack(theta) + pack(momentum))
    return hasher.digest()


# Section 11: probes, and the subset that follows them. Probabilities and scores are exact here.


def unpack(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def probe_bins(common, token_count):
    """The most likely tokens of each row, of equals the lowest, ascending."""
    chosen = []
    for row in common:
        order = sorted(range(len(row)), key=lambda token: (-unpack(row[token]), token))
        chosen.append(sorted(order[:token_count]))
    return chosen


def probe_answer(common, own, token_count, round_index):
    """Name of the bins and the bytes of an answer."""
    bins = probe_bins(common, token_count)
    named = b"pulsenet probe bins 1" + struct.pack("<II", len(bins), len(bins[0]))
    named += b"".join(struct.pack("<I", token) for row in bins for token in row)
    answer = b"PLSP" + struct.pack("<B3xQII", 1, round_index, len(bins), len(bins[0]) + 1)
    for row, tokens in zip(own, bins, strict=True):
        values = [Fraction(unpack(value)) for value in row]
        taken = [values[token] for token in tokens]
        answer += b"".join(struct.pack("<e", float(value)) for value in [*taken, sum(values) - sum(taken)])
    return blake3(named).digest(), answer


def by_name(tensors):
    """Places of tensors, [name, elements] each, in the order of a first choice."""

    def rank(place):
        name = tensors[place][0]
        if any(part in name for part in ("embed", "wte", "wpe", "lm_head", "output_projection")):
            return 0, 0, place
        numbers = [part for part in name.split(".") if part and all(digit in "0123456789" for digit in part)]
        return (1, int(numbers[0]), place) if numbers else (2, 0, place)

    return sorted(range(len(tensors)), key=rank)


def next_subset(tensors, subset, scores, distance, distance_max, ratio):
    """What the next roster mixes; reals are fractions, scores pairs of a place and one."""
    known = dict(scores)
    ranked = sorted(known, key=lambda place: (-known[place], place))
    ranked += [place for place in by_name(tensors) if place not in known]
    total = sum(count for _, count in tensors)

    def share(places):
        return Fraction(sum(tensors[place][1] for place in places), total)

    def take(order, held, target):
        held = list(held)
        for place in order:
            if held and abs(share([*held, place]) - target) > abs(share(held) - target):
                break
            held.append(place)
        return sorted(held)

    if not subset:
        return take(by_name(tensors), [], ratio)
    if distance_max > 0 and distance > distance_max:
        others = [place for place in ranked if place not in subset]
        wider = take(others, subset, min(Fraction(1), share(subset) * 3 / 2))
        return wider if len(wider) > len(subset) or not others else sorted([*subset, others[0]])
    if distance_max > 0 and distance < distance_max / 2 and share(subset) > ratio:
        narrower = take(ranked, [], max(ratio, share(subset) * 2 / 3))
        return narrower if share(narrower) < share(subset) else subset
    return subset
