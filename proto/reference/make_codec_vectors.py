"""Write proto/vectors/codec/*.json from the reference: ``python proto/reference/make_codec_vectors.py [FOLDER]``.

One vector a file, one fault a vector. ``input.operation`` says what is done; see proto/vectors/codec/README.md.
"""

import json
import struct
import sys
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parent))
import pulse_reference_codec as reference
import pulse_reference_contribution as contribution

PLAIN = {reference.ABSOLUTE, reference.PLAIN, reference.DENSE}
TIGHT = PLAIN | {reference.TIGHT}
ALLOWED = {"auto": TIGHT, "tight": TIGHT, "plain": PLAIN, "absolute": {reference.ABSOLUTE, reference.DENSE}}
ALLOWED["dense"] = {reference.DENSE}


def expand(segments):
    """[[hex, repeat], ...] -> bytes."""
    return b"".join(bytes.fromhex(digits) * repeat for digits, repeat in segments)


def u16(*values):
    return [[struct.pack(f"<{len(values)}H", *values).hex(), 1]]


def scattered(old, edits):
    """Return segments like ``old`` (u16 values, repeated pattern) with {index: value} put in."""
    values = list(old)
    for index, value in edits.items():
        values[index] = value
    return u16(*values)


def vector(name, operation, fields, comment, expect="ok"):
    content = {"operation": operation, **fields}
    output = None
    try:
        output = OPERATIONS[operation](fields)
        found = "ok"
    except reference.Refused as error:
        found = error.code
    assert found == expect, f"{name}: expected {expect}, the reference says {found}"
    return {"name": name, "expect": expect, "input": content, "output": output, "comment": comment}


def run_patch(fields):
    tensors = fields["tensors"]
    old, new = [expand(part) for part in fields["old"]], [expand(part) for part in fields["new"]]
    blob = reference.encode_patch(tensors, old, new, ALLOWED[fields["codec"]])
    return {"blob": blob.hex(), "changes": reference.decode_patch(blob, tensors, old)}


def run_decode(fields):
    old = [expand(part) for part in fields["old"]]
    return {"changes": reference.decode_patch(bytes.fromhex(fields["blob"]), fields["tensors"], old)}


def run_absolute(fields):
    return {"blob": reference.encode_absolute(fields["tensors"], fields["changes"]).hex()}


def run_table(fields):
    tensors, aliases, excluded = fields["tensors"], fields["aliases"], fields["excluded"]
    encoded = reference.encode_table(tensors, aliases, excluded)
    reference.decode_table(encoded)
    offsets, layout_size = reference.layout(tensors)
    digest = reference.blake3(encoded).hexdigest()
    return {"encoded": encoded.hex(), "digest": digest, "offsets": offsets, "layout_size_bytes": layout_size}


def run_table_decode(fields):
    return {"table": reference.decode_table(bytes.fromhex(fields["encoded"]))}


def run_root(fields):
    contents = [expand(part) for part in fields["contents"]]
    hashes = [reference.hash_tensor(content).hex() for content in contents]
    return {"hashes": hashes, "root": reference.compute_root(fields["tensors"], contents).hex()}


def run_anchor(fields):
    contents = [expand(part) for part in fields["contents"]]
    blob = reference.encode_anchor(fields["tensors"], contents)
    reference.decode_anchor(blob)
    return {"blob": blob.hex()}


def run_anchor_decode(fields):
    return {"contents": [content.hex() for content in reference.decode_anchor(bytes.fromhex(fields["blob"]))[3]]}


def run_changes(fields):
    encoded = reference.encode_changes(fields["tensors"], fields["tensor_index"], fields["changes"])
    reference.decode_changes(fields["tensors"], encoded)
    return {"encoded": encoded.hex()}


def run_changes_decode(fields):
    return {"spools": reference.decode_changes(fields["tensors"], bytes.fromhex(fields["encoded"]))}


def run_cast(fields):
    return {"bits": [reference.cast_to_bf16(bits) for bits in fields["fp32_bits"]]}


def run_ordered(fields):
    ordered = [reference.to_ordered(bits) for bits in fields["bits"]]
    assert [reference.from_ordered(value) for value in ordered] == fields["bits"]
    return {"ordered": ordered}


def words(segments):
    data = expand(segments)
    return [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]


def run_contribution(fields):
    masters, theta = fields["masters"], [words(part) for part in fields["theta"]]
    root, entries = bytes.fromhex(fields["state_root"]), fields["entries"]
    blob = contribution.encode_contribution(
        masters, theta, entries, root, fields["round_index"], fields["inner_step_count"]
    )
    found = contribution.decode_contribution(masters, theta, blob, root)
    assert [list(entry) for entry in found] == [list(entry) for entry in entries]
    parts = contribution.contribution_parts(
        masters, theta, entries, root, fields["round_index"], fields["inner_step_count"]
    )
    return {"blob": blob.hex(), "chunk_sizes": contribution.chunk_sizes(parts)}


def slice_arguments(fields):
    names = ("round_index", "slice_index", "slice_count")
    return bytes.fromhex(fields["state_root"]), *(fields[name] for name in names)


def run_slice(fields):
    masters, theta = fields["masters"], [words(part) for part in fields["theta"]]
    blob = contribution.encode_slice(masters, theta, fields["entries"], *slice_arguments(fields))
    found = contribution.decode_slice(masters, theta, blob, *slice_arguments(fields))
    assert all(list(entry) in [list(given) for given in fields["entries"]] for entry in found)
    return {"blob": blob.hex()}


def run_slice_decode(fields):
    theta, blob = [words(part) for part in fields["theta"]], bytes.fromhex(fields["blob"])
    return {"entries": contribution.decode_slice(fields["masters"], theta, blob, *slice_arguments(fields))}


def run_contribution_decode(fields):
    theta, root = [words(part) for part in fields["theta"]], bytes.fromhex(fields["state_root"])
    blob = bytes.fromhex(fields["blob"])
    return {"entries": contribution.decode_contribution(fields["masters"], theta, blob, root)}


OPERATIONS = {
    "contribution": run_contribution,
    "contribution-decode": run_contribution_decode,
    "slice": run_slice,
    "slice-decode": run_slice_decode,
    "patch": run_patch,
    "decode": run_decode,
    "absolute": run_absolute,
    "table": run_table,
    "table-decode": run_table_decode,
    "root": run_root,
    "anchor": run_anchor,
    "anchor-decode": run_anchor_decode,
    "changes": run_changes,
    "changes-decode": run_changes_decode,
    "cast": run_cast,
    "ordered": run_ordered,
}

WEIGHT = [["w", "BF16", [64]]]
ONES = [0x3F80] * 64
MIXED = [
    ["a.bias", "F32", [3]],
    ["b.empty", "BF16", [0, 5]],
    ["c.mask", "BOOL", [4]],
    ["d.scalar", "BF16", []],
    ["e.steps", "I64", [2]],
    ["f.weight", "F16", [2, 3]],
]


def patch_vectors():
    def pair(name, old, new, comment, codec="auto"):
        fields = {"tensors": [["w", "BF16", [len(old)]]], "codec": codec, "old": [u16(*old)], "new": [u16(*new)]}
        return vector(name, "patch", fields, comment)

    yield pair("signed-zero", [0x0000, 0x3F80], [0x8000, 0x3F80], "A-ENC-1: one entry, a step of one.")
    yield pair("nan-kept", [0x7FC0, 0x7F81], [0x7FC0, 0x7F81], "A-ENC-2 and A-ENC-6: no entry, an empty patch.")
    yield pair("nan-payload", [0x7FC0, 0x7F81], [0x7FC1, 0x7F81], "A-ENC-2: the payload alone changes.")
    yield pair("high-byte", [0x3F80, 0x3F80], [0x4080, 0xBF80], "A-ENC-3: only the high byte changes.")
    extremes = [0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8001]
    yield pair("extremes-forward", [0x3F80] * 5, extremes, "A-ENC-4: infinities, largest, subnormals.")
    yield pair("extremes-back", extremes, [0x3F80] * 5, "A-ENC-4: and back.")
    yield pair("step-wraps", [0x7FFF, 0xFFFF] * 20, [0xFFFF, 0x7FFF] * 20, "Largest +1 is smallest, and back.")
    base = [0x3F80 + index % 7 for index in range(1000)]
    steps = {index: base[index] + (1 if index % 3 else -1) for index in range(5, 1000, 37)}
    yield pair(
        "plain-exceptions",
        base,
        [steps.get(index, value) if index != 300 else 0xC000 for index, value in enumerate(base)],
        "Steps of one, and one exception at rank 8 of the changes.",
        "plain",
    )
    yield from tight_vectors()
    dense = [(value * 40503 + index) & 0xFFFF for index, value in enumerate(base)]
    yield pair("dense-block", base, dense, "Every element changes at random: dense is the shortest.")
    yield pair("absolute-form", base, [steps.get(i, v) for i, v in enumerate(base)], "No plain allowed.", "absolute")
    yield pair("dense-only", [0x3F80] * 3, [0x3F80, 0x3F81, 0x3F80], "dense is the only codec allowed.", "dense")
    old = [[["0000803f", 3]], [], [["00", 4]], [["803f", 1]], [["00" * 8, 2]], [["003c", 6]]]
    new = [
        [["0000803f", 1], ["0100803f", 1], ["0000803f", 1]],
        [],
        [["00010001", 1]],
        [["813f", 1]],
        [["00" * 8, 1], ["ff" * 8, 1]],
        [["013c", 1], ["003c", 4], ["003d", 1]],
    ]
    fields = {"tensors": MIXED, "codec": "plain", "old": old, "new": new}
    yield vector(
        "mixed-dtypes", "patch", fields, "A-DT-1, A-DT-2: each dtype keeps its bits; scalar and empty tensors."
    )
    count = (1 << 20) + 9
    fields = {
        "tensors": [["u", "U8", [count]]],
        "codec": "auto",
        "old": [[["00", count]]],
        "new": [[["00", 70_000], ["01", 1], ["00", (1 << 20) - 70_001], ["02", 1], ["00", 8]]],
    }
    yield vector("two-blocks", "patch", fields, "A wide gap in the first block, position 0 in the second.")


def tight_vectors():
    def pair(name, dtype, old, edits, comment):
        size = reference.ELEMENT_SIZES[dtype]
        new = [edits.get(index, value) for index, value in enumerate(old)]
        packed = [[b"".join(value.to_bytes(size, "little") for value in part).hex(), 1] for part in (old, new)]
        fields = {"tensors": [["w", dtype, [len(old)]]], "codec": "tight", "old": [packed[:1]], "new": [packed[1:]]}
        made = vector(name, "patch", fields, comment)
        assert made["output"]["blob"][80:82] == "04", f"{name}: another codec is shorter"
        return made

    def scatter(index, end):
        return (index * index * 2654435761 + 12345 * index >> 7) % end

    # Three exponents, mixed; steps of one at irregular places.
    mixed = [0x3F00 - 0x80 * scatter(index, 3) + index % 5 for index in range(900)]
    chosen = [index for index in range(900) if scatter(index, 19) == 4]
    ones = {index: mixed[index] + (1 if scatter(index, 2) else -1) for index in chosen}
    yield pair("tight-classes", "BF16", mixed, ones, "Three classes, gaps counted in each, steps of one.")
    sparse = {**ones, chosen[5]: mixed[chosen[5]] + 2, chosen[9]: mixed[chosen[9]] - 40}
    yield pair("tight-sparse", "BF16", mixed, sparse, "Two larger steps are listed as exceptions.")
    small = [0x3000 + index % 50 for index in range(400)]
    many = {index: small[index] + (scatter(index, 23) - 11 or 3) for index in range(400) if scatter(index, 3) == 1}
    yield pair("tight-sizes", "BF16", small, many, "Most steps are larger than one: sizes are Rice codes.")
    ends = [0x7FFF, 0xFFFF, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x7FC0] * 50
    step = {i: 1 if scatter(i, 2) else -1 for i in range(400) if scatter(i, 9) == 3}
    wraps = {i: reference.step_from(ends[i], step[i], 16) for i in step}
    yield pair("tight-ends", "BF16", ends, wraps, "Wrapping steps, signed zeros, infinities, NaN payloads.")
    bits8 = [0x30 + scatter(index, 16) + 0x80 * scatter(index, 2) for index in range(600)]
    for dtype in ("F8_E4M3", "F8_E5M2"):
        edits = {
            i: reference.step_from(bits8[i], 1 if scatter(i, 2) else -1, 8) for i in range(600) if scatter(i, 17) == 5
        }
        yield pair(f"tight-{dtype[3:].lower()}", dtype, bits8, edits, "Eight bits, both signs.")
    halves = [0x3000 + index * 11 % 0x900 for index in range(500)]
    edits = {i: halves[i] - 1 + 2 * scatter(i, 2) for i in range(500) if scatter(i, 17) == 8}
    yield pair("tight-f16", "F16", halves, edits, "F16 has sixteen classes.")
    singles = [0x3D000000 + index * 0x9E3779 % 0x2000000 for index in range(200)]
    edits = {i: singles[i] + (scatter(i, 9000) - 4500 or 1) for i in range(1, 200)}
    yield pair(
        "tight-f32", "F32", singles, edits, "FP32 after an optimiser step: nearly all change, by thousands of steps."
    )
    far = {7: singles[7] ^ 0x80000000, **{i: singles[i] + 1 for i in range(9, 200) if scatter(i, 7) == 3}}
    yield pair("tight-f32-far", "F32", singles, far, "A changed sign among steps of one.")


def tight_faults(refused, one):
    varint = reference.varint
    # Elements are 64 ones of class 0. Gap 5, up: zeros, one, one.
    sound = varint(1) + b"\1" + varint(1) + b"\0" + bytes([0b1100000])
    fields = {"tensors": WEIGHT, "old": [u16(*ONES)], "blob": one(4, sound).hex()}
    yield vector("decode-tight", "decode", fields, "The body that the refused ones below differ from in one point.")
    for name, expect, body, comment in (
        ("tight-no-changes", "patch-count", b"\0\0", "No change at all."),
        ("tight-classes-beyond", "patch-values", varint(1) + varint(1 << 20) + sound[2:], "Class 20."),
        (
            "tight-class-empty",
            "patch-count",
            varint(1) + b"\1" + varint(0) + sound[3:],
            "A listed class without changes.",
        ),
        ("tight-class-count", "patch-count", varint(2) + sound[1:], "Two changes stated, one in the classes."),
        ("tight-mode", "patch-values", sound[:3] + b"\x60" + sound[4:], "Step mode 3."),
        ("tight-parameter", "patch-values", sound[:3] + b"\x40\x20" + sound[4:], "Parameter 32."),
        (
            "tight-no-exceptions",
            "patch-count",
            sound[:3] + b"\x20\0\0\0" + sound[4:],
            "Mode sparse without exceptions.",
        ),
        ("tight-exceptions", "patch-count", sound[:3] + b"\x20\2\0\0" + sound[4:], "Two exceptions among one change."),
        ("tight-head-cut", "patch-truncated", sound[:3], "The head is cut."),
        ("tight-stream-cut", "patch-truncated", sound[:4], "The stream is missing."),
        ("tight-code-open", "patch-truncated", sound[:4] + bytes(3), "Zeros without a one."),
        ("tight-padding", "patch-trailing", sound[:4] + bytes([0b11100000]), "A bit after the last code."),
        ("tight-byte-more", "patch-trailing", sound + b"\0", "A byte after the last code."),
        ("tight-gap-beyond", "patch-gaps", sound[:4] + bytes(8) + b"\3", "A-APP-5: gap 64 of 64 elements."),
        ("tight-gap-huge", "patch-gaps", sound[:3] + b"\x1f" + bytes([2, 0, 0, 0, 1]), "A gap of 2^31."),
        ("tight-rank-beyond", "patch-values", sound[:3] + b"\x20\1\0\0" + bytes([0b10100011, 1]), "Rank 2 of 1."),
        ("tight-size-beyond", "patch-values", sound[:3] + b"\x40\x0f" + bytes([0b1011, 0, 8]), "A step of 2^15 + 1."),
    ):
        yield refused(name, expect, one(4, body), comment)
    # Class 1 has no element in this base.
    other = varint(1) + b"\2" + varint(1) + b"\0" + bytes([0b11])
    yield refused("tight-class-missing", "patch-mismatch", one(4, other), "The base has no element of class 1.")


def decode_vectors():
    def refused(name, expect, blob, comment, tensors=WEIGHT, old=ONES):
        fields = {"tensors": tensors, "old": [u16(*old)], "blob": blob.hex()}
        return vector(name, "decode", fields, comment, expect)

    def blob(*records, form=0, count=None, record_count=None):
        counts = [1] * len(records) if count is None else [count]
        end = reference.end(len(records) if record_count is None else record_count, sum(counts))
        return reference.header(WEIGHT, form) + b"".join(records) + end

    def one(codec, body):
        # The end record agrees with the body, so that the body's fault stays the only one.
        try:
            count = reference.Reader(body).varint() >> (codec in (reference.ABSOLUTE, reference.PLAIN))
        except reference.Refused:
            count = 1
        return blob(reference.record(codec, 0, body), count=count)

    varint, plane = reference.varint, reference.plane
    sound = reference.absolute_body([5], [0x3F81], 2)
    good = blob(reference.record(1, 0, sound))
    fields = {"tensors": WEIGHT, "old": [u16(*ONES)], "blob": good.hex()}
    yield vector("decode-absolute", "decode", fields, "The blob that the refused ones below differ from in one point.")
    yield refused("magic", "patch-magic", b"PLSC" + good[4:], "Another magic.")
    yield refused("version", "patch-version", good[:4] + b"\2" + good[5:], "A format not yet made.")
    yield refused("form", "patch-form", good[:5] + b"\2" + good[6:], "Form 2.")
    yield refused("reserved", "patch-form", good[:6] + b"\1" + good[7:], "A reserved byte is set.")
    yield refused("other-table", "patch-table", good[:8] + bytes(32) + good[40:], "Made for another table.")
    yield refused("header-cut", "patch-truncated", good[:39], "The header is cut.")
    yield refused("body-cut", "patch-truncated", good[:44], "The blob ends inside a body.")
    yield refused("end-missing", "patch-truncated", good[:-3], "The end record is missing.")
    yield refused("trailing-byte", "patch-trailing", good + b"\0", "A-MSG-5: a byte after the end record.")
    yield refused("codec-unknown", "codec-unknown", one(5, sound), "Codec 5 is kept for later.")
    yield refused("plain-in-absolute", "codec-unsuitable", blob(reference.record(2, 0, sound), form=1), "Form 1.")
    yield refused("tight-in-absolute", "codec-unsuitable", blob(reference.record(4, 0, sound), form=1), "Form 1.")
    yield refused("block-outside", "patch-block", blob(reference.record(1, 1, sound)), "Block 1 of 1.")
    twice = blob(reference.record(1, 0, sound), reference.record(1, 0, sound), count=2)
    yield refused("block-twice", "patch-block", twice, "A second record can only name a later block.")
    yield refused("body-too-large", "patch-size", one(1, bytes(209)), "128 + 16 + 64 bytes are the most.")
    yield refused("body-trailing", "patch-trailing", one(1, sound + b"\0"), "A byte after the last plane.")
    yield refused("varint-long", "patch-varint", one(1, b"\x82\x00" + sound[1:]), "1 change in two bytes.")
    yield refused("varint-endless", "patch-varint", one(1, b"\xff" * 9 + sound), "More than nine bytes.")
    yield refused("no-changes", "patch-count", one(1, b"\0" + sound[1:]), "A record of 0 changes.")
    yield refused("too-many", "patch-count", one(1, varint(65 * 2) + sound[1:]), "65 changes in 64 elements.")
    yield refused("end-changes", "patch-count", blob(reference.record(1, 0, sound), count=2), "Total of 2.")
    yield refused("end-records", "patch-count", blob(reference.record(1, 0, sound), record_count=2), "2 records.")
    values = reference.integer_planes([0x3F81], 2)
    yield refused("index-at-end", "patch-gaps", one(1, b"\2" + plane([64]) + values), "A-APP-5: index = numel.")
    yield refused("index-escape", "patch-plane", one(1, b"\2" + plane([255, 5]) + values), "An escape too many.")
    wide = b"\3" + plane([0]) + plane([255]) + values
    yield refused("index-wide", "patch-gaps", one(1, wide), "A-APP-5: a wide gap beyond the block.")
    yield refused("gap-open", "patch-gaps", one(1, b"\2" + plane([255]) + values), "The last gap does not end.")
    more = reference.integer_planes([0x3F81, 0x3F82], 2)
    yield refused("more-values", "patch-plane", one(1, b"\2" + plane([5]) + more), "A-APP-5: values over indices.")
    yield refused("same-bits", "patch-mismatch", good, "The base already holds the new bits.", old=[0x3F81] * 64)
    yield from dense_and_plain_faults(refused, one)
    yield from frame_faults(refused, one)
    yield from tight_faults(refused, one)


def dense_and_plain_faults(refused, one):
    varint, plane = reference.varint, reference.plane
    dense = reference.integer_planes([0x3F81, *ONES[1:]], 2)
    yield refused("dense-count", "patch-mismatch", one(3, varint(2) + dense), "One differs, two are stated.")
    yield refused("dense-short", "patch-plane", one(3, varint(1) + plane([0] * 63)), "63 bytes for 64 elements.")
    head = varint(4) + plane([0, 0])
    for name, expect, rest, comment in (
        ("step-bits-beyond", "patch-values", plane([4]) + varint(0), "A step bit of a change that is not there."),
        ("exceptions-too-many", "patch-count", plane([0]) + varint(3), "Three exceptions among two changes."),
        ("rank-outside", "patch-values", plane([0]) + varint(1) + plane([2]) + plane([0]) + plane([64]), "Rank 2."),
        ("rank-not-shortest", "patch-values", plane([0]) + varint(1) + plane([0x81, 0]) + plane([0]) * 2, "Long 1."),
        ("rank-open", "patch-values", plane([0]) + varint(1) + plane([0x81]) + plane([0]) * 2, "The rank is cut."),
        ("exception-step-bit", "patch-values", plane([1]) + varint(1) + plane([0]) + plane([0]) * 2, "Bit set."),
    ):
        yield refused(name, expect, one(2, head + rest), comment)


def frame_faults(refused, one):
    varint = reference.varint
    values = reference.integer_planes([0x3F81] * 60, 2)

    def compressed(frame):
        return one(1, varint(60 * 2) + varint(len(frame) * 2 + 1) + frame + values)

    frame = zstandard.ZstdCompressor(level=1).compress(bytes(60))
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 19))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(60))
    lying = frame[:5] + bytes([61]) + frame[6:]
    window = bytes.fromhex("28b52ffd8098") + struct.pack("<I", 60) + (60 << 3 | 3).to_bytes(3, "little") + b"\0"
    for name, data, comment in (
        ("frame-window", window, "A sound frame, but for a window of 512 MiB."),
        ("frame-bomb", bomb, "A-MSG-3: the frame states 512 KiB where 60 to 64 bytes are due."),
        ("frame-huge", bytes.fromhex("28b52ffde06c06060663636363"), "A-MSG-4: 13 bytes that state 2^62 bytes."),
        ("frame-unsized", unsized, "A frame must state its size."),
        ("frame-lying", lying, "States 61 bytes, holds 60."),
        ("frame-cut", frame[:-1], "Cut by a byte."),
        ("frame-twice", frame + frame, "A-MSG-5: two frames, one after the other."),
        ("frame-junk", frame + b"junk", "A-MSG-5: junk after the frame."),
        ("frame-skippable", bytes.fromhex("502a4d1804000000deadbeef"), "A skippable frame holds nothing."),
        ("frame-empty", zstandard.ZstdCompressor(level=1).compress(b""), "An empty frame."),
        ("frame-none", b"no zstandard frame", "Not a frame at all."),
    ):
        yield refused(name, "patch-plane", compressed(data), comment)


def absolute_vectors():
    far = (1 << 31) + 5
    fields = {"tensors": [["w", "U8", [(1 << 31) + 8]]], "changes": [[0, 3, 0, 1], [0, far, 0, 2]]}
    beyond = (1 << 32) + 7
    wide = {"tensors": [["w", "U8", [(1 << 32) + 8]]], "changes": [[0, far, 0, 1], [0, beyond, 0, 2]]}
    yield vector("beyond-2-31", "absolute", fields, "A-DT-4: index 2147483653.")
    yield vector("beyond-2-32", "absolute", wide, "Indices that need 64 bits.")


def table_vectors():
    fields = {"tensors": MIXED, "aliases": [["lm_head.weight", "f.weight"]], "excluded": ["rotary.inv_freq"]}
    yield vector("table", "table", fields, "Aliases and exclusions; offsets are multiples of 64.")
    yield vector("table-empty", "table", {"tensors": [], "aliases": [], "excluded": []}, "Nothing at all.")
    encoded = reference.encode_table([["a", "BF16", [2]], ["b", "BF16", [300]]])
    long_form = encoded.replace(b"\xcd\x01\x2c", b"\xce\x00\x00\x01\x2c")
    for name, expect, data, comment in (
        ("table-cut", "table-decode", encoded[:-1], "Cut by a byte."),
        ("table-trailing", "table-decode", encoded + b"\0", "A-MSG-5: a byte after the end."),
        ("table-array-bomb", "table-decode", bytes.fromhex("ddffffffff"), "A-MSG-1: five bytes claim 2^32 items."),
        ("table-deep", "table-decode", b"\x91" * 2000, "A-MSG-2: nested arrays."),
        ("table-long-integer", "table-not-canonical", long_form, "300 in four bytes."),
        ("table-order", "table-invalid", reference.encode_table([["b", "U8", []], ["a", "U8", []]]), "b before a."),
        ("table-twice", "table-invalid", reference.encode_table([["a", "U8", []], ["a", "U8", []]]), "a twice."),
        ("table-dtype", "table-invalid", reference.encode_table([["a", "bf16", []]]), "No such dtype."),
        ("table-alias", "table-invalid", reference.encode_table([], [["a", "b"]]), "An alias of nothing."),
        ("table-name-empty", "table-invalid", reference.encode_table([["", "U8", []]]), "A name without a byte."),
        ("table-size", "table-invalid", reference.encode_table([["a", "U8", [1 << 48, 2, 0]]]), "Product beyond."),
        ("table-float", "table-decode", encoded.replace(b"\x02", b"\xca\x40\x00\x00\x00"), "A float for a size."),
    ):
        yield vector(name, "table-decode", {"encoded": data.hex()}, comment, expect)


def other_vectors():
    contents = [[["0000803f", 3]], [], [["00", 4]], [["803f", 1]], [["00" * 8, 2]], [["003c", 6]]]
    yield vector("root", "root", {"tensors": MIXED, "contents": contents}, "Root over mixed dtypes.")
    yield vector(
        "anchor", "anchor", {"tensors": MIXED, "contents": contents}, "Mixed dtypes, scalar and empty tensors."
    )
    blob = reference.encode_anchor(MIXED, [expand(content) for content in contents])
    for name, expect, data, comment in (
        ("anchor-magic", "anchor-header", b"PLSB" + blob[4:], "Another magic."),
        ("anchor-version", "anchor-header", blob[:4] + b"\2" + blob[5:], "A format not yet made."),
        ("anchor-reserved", "anchor-header", blob[:7] + b"\1" + blob[8:], "A reserved byte is set."),
        ("anchor-table-size", "anchor-header", blob[:8] + b"\xff" * 4 + blob[12:], "A table of 4 GiB."),
        ("anchor-table-cut", "table-decode", blob[:8] + b"\x05\0\0\0" + blob[12:], "A table of five bytes."),
        ("anchor-cut-header", "anchor-truncated", blob[:11], "The header is cut."),
        ("anchor-cut", "anchor-truncated", blob[:-1], "Cut by a byte."),
        ("anchor-trailing", "anchor-trailing", blob + b"\0", "A byte after the last tensor."),
    ):
        yield vector(name, "anchor-decode", {"blob": data.hex()}, comment, expect)
    contents = [[["803f", 64]]]
    yield vector("root-one-tensor", "root", {"tensors": WEIGHT, "contents": contents}, "A tensor of ones.")
    changes = [[1, 0x3F80, 0x3F81], [5, 0x0000, 0x8000], [63, 0x7FC0, 0x7FC1]]
    spool = {"tensors": WEIGHT, "tensor_index": 0, "changes": changes}
    yield vector("changes", "changes", spool, "Three changes; arrays are padded to 8 bytes.")
    wide = {"tensors": [["w", "U8", [1 << 33]]], "tensor_index": 0, "changes": [[(1 << 32) + 1, 0, 255]]}
    yield vector("changes-wide", "changes", wide, "Indices of 8 bytes from 2^32 elements on.")
    encoded = reference.encode_changes(WEIGHT, 0, changes)
    bad = [[5, 0, 1], [5, 0, 2]]
    for name, expect, data, comment in (
        ("changes-magic", "changes-header", b"PCHH" + encoded[4:], "Another magic."),
        ("changes-tensor", "changes-header", encoded[:4] + b"\1" + encoded[5:], "Tensor 1 of 1."),
        ("changes-width", "changes-header", encoded[:9] + b"\4" + encoded[10:], "Another element width."),
        ("changes-count", "changes-header", encoded[:16] + b"\xff" * 8 + encoded[24:], "2^64 - 1 records."),
        ("changes-padding", "changes-header", encoded[:-1] + b"\1", "Padding is not zero."),
        ("changes-cut", "changes-truncated", encoded[:-8], "The new bits are missing."),
        ("changes-cut-header", "changes-truncated", encoded + encoded[:23], "A cut second header."),
        ("changes-twice", "changes-index", reference.encode_changes(WEIGHT, 0, bad), "A-APP-5: an index twice."),
        ("changes-order", "changes-index", reference.encode_changes(WEIGHT, 0, [*bad[::-1], [4, 0, 1]]), "Unsorted."),
        ("changes-outside", "changes-index", reference.encode_changes(WEIGHT, 0, [[64, 0, 1]]), "Index = numel."),
    ):
        yield vector(name, "changes-decode", {"tensors": WEIGHT, "encoded": data.hex()}, comment, expect)
    fp32 = [0x3F800000, 0x3F800001, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000000, 0x00000001]
    nans = [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0xFF800000]
    yield vector("cast", "cast", {"fp32_bits": fp32 + nans}, "Ties to even, overflow to infinity, NaN stays NaN.")
    bits = [0xFFFF, 0xFF80, 0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80, 0x7F80, 0x7FFF]
    yield vector("ordered", "ordered", {"bits": bits}, "Ascending; -0 and +0 are neighbours.")


ROOT = bytes(range(32))


def contribution_vectors():
    def made(name, theta, entries, comment, codec):
        packed = [[[struct.pack(f"<{len(part)}I", *part).hex(), 1]] if part else [] for part in theta]
        masters = [[f"w{index}", [len(part)]] for index, part in enumerate(theta)]
        fields = {"masters": masters, "theta": packed, "state_root": ROOT.hex(), "entries": entries}
        built = vector(name, "contribution", fields | {"round_index": 3, "inner_step_count": 8}, comment)
        assert built["output"]["blob"][168:170] == codec, f"{name}: another codec is shorter"
        return built

    def scatter(index, end):
        return (index * index * 2654435761 + 12345 * index >> 7) % end

    def crossing(weight, beyond, away=0):
        return contribution.value_from(weight, beyond, away)

    # Weights of four exponents and both signs; those within some 3,000 places at 1.0 of an edge cross it.
    theta = [(0x3F800000 - (scatter(i, 4) << 23) | scatter(i, 2) << 31) + scatter(i + 7, 1 << 16) for i in range(300)]
    near = [i for i in range(300) if contribution.reach(theta[i]) < 2 * 127 + 2 * 12]
    gated = [[0, i, crossing(theta[i], scatter(i, 2000) + 1)] for i in near]
    yield made(
        "contribution", [theta, [], [0x3F808000]], [*gated, [2, 0, 0x34000000]], "Towards the nearest edge.", "02"
    )
    far = [[0, i, crossing(theta[i], scatter(i, 2000) + 1, i % 3 == 0)] for i in near]
    yield made("contribution-away", [theta], far, "One in three crosses the other edge of its cell.", "02")
    odd = [list(entry) for entry in gated]
    for rank, value in ((1, 0x7FC00001), (4, 0x80000000), (9, 0x00000001), (11, 0x7F7FFFFF)):
        odd[rank][2] = value
    yield made(
        "contribution-escapes", [theta], odd, "NaN, -0.0, a subnormal and the largest value among the rest.", "02"
    )
    tiny = [0, 1 << 31, 1, 0x007F8000, 0x00808001, 0x7F7F7FFF, 0x7F800000, 0xFFC00000]
    all_of = [[0, i, crossing(weight, 5)] for i, weight in enumerate(tiny) if i not in (5, 7)]
    yield made("contribution-extremes", [tiny], all_of, "Weights that are zeros, subnormals, infinity.", "02")
    random = [[0, i, scatter(i, 1 << 16) << 16 | scatter(i + 3, 1 << 16)] for i in range(60)]
    yield made("contribution-full", [theta[:60]], random, "Dense, of random bits: all values are shortest.", "03")
    some = [entry for entry in random if entry[1] % 3]
    yield made("contribution-listed", [theta[:60]], some, "Two in three, of random bits: listed is shorter.", "01")
    fields = {"masters": [["w0", [64]]], "theta": [[["0080803f", 64]]], "state_root": ROOT.hex()}
    head = contribution.header(fields["masters"], ROOT, 3, 8)
    # Gap 5, escapes none, towards, number 2; every weight is 1.0 on an edge: reach 254, exponent class 0.
    front, back = varint_bytes(1, 254, 1, 1) + b"\0", b"\0" + reference.plane([0]) + b"\1\0" + b"\4"
    sound = front + b"\1\x20" + back

    def decoded(name, body, comment, expect="ok", codec=2, header=head, count=1, skipped=0):
        blob = header + reference.record(codec, skipped, body) + reference.end(1, count)
        return vector(name, "contribution-decode", fields | {"blob": blob.hex()}, comment, expect)

    yield decoded("decode-gated", sound, "The body that the refused ones below differ from in one point.")
    other_root = contribution.header(fields["masters"], bytes(32), 3, 8)
    other_table = contribution.header([["w1", [64]]], ROOT, 3, 8)
    for name, expect, header, comment in (
        ("contribution-base", "contribution-base", other_root, "Starts from another state."),
        ("contribution-table", "contribution-table", other_table, "Made for other masters."),
        ("contribution-magic", "contribution-header", b"PLSB" + head[4:], "Another magic."),
        ("contribution-version", "contribution-header", head[:4] + b"\2" + head[5:], "A format not yet made."),
        ("contribution-reserved", "contribution-header", head[:7] + b"\1" + head[8:], "A reserved byte is set."),
    ):
        yield decoded(name, sound, comment, expect, header=header)
    yield decoded("contribution-codec", sound, "Codec 4 is kept for later.", "codec-unknown", codec=4)
    short = reference.plane([0] * 63) * 4
    yield decoded("contribution-full-short", short, "63 of 64 values.", "patch-plane", codec=3, count=64)
    yield decoded("contribution-block", sound, "A block that its section does not hold.", "patch-block", skipped=1)
    yield decoded("contribution-count", sound, "Two entries stated at the end.", "patch-count", count=2)
    for name, expect, body, comment in (
        ("gated-no-entries", "patch-count", b"\0", "No entry at all."),
        ("gated-top", "patch-values", varint_bytes(1, 543) + sound[3:], "No weight reaches so far."),
        (
            "gated-class-count",
            "patch-count",
            varint_bytes(1, 254, 1, 2) + sound[5:],
            "Two entries in a class, one stated.",
        ),
        ("gated-parameter", "patch-values", front[:-1] + b"\x20" + sound[6:], "Parameter 32."),
        ("gated-gap-beyond", "patch-gaps", front + b"\x09" + bytes(8) + b"\1" + back, "A-APP-5: gap 64 of 64 weights."),
        ("gated-gap-open", "patch-truncated", front + b"\1\0" + back, "Zeros without a one."),
        ("gated-gap-padding", "patch-trailing", front + b"\1\x60" + back, "A bit after the last gap."),
        ("gated-escapes", "patch-count", front + b"\1\x20\2", "Two escapes among one entry."),
        (
            "gated-rank",
            "patch-values",
            front + b"\1\x20\1" + reference.plane([1]) + reference.plane([0]) * 4,
            "Rank 1.",
        ),
        ("gated-aways", "patch-values", sound[:-4] + b"\2\1\0\4", "A direction beyond the last value."),
        ("gated-value-class", "patch-values", sound[:-3] + b"\2\0\4", "No entry's weight is of class 1."),
        ("gated-number-huge", "patch-values", sound[:-2] + b"\x1f" + bytes([4, 0, 0, 0, 0]), "2^32 places."),
        ("gated-number-bits", "patch-values", sound[:-2] + b"\x19" + bytes([3, 0, 0, 2]), "2^24 + 1 places: 25 bits."),
        ("gated-byte-more", "patch-trailing", sound + b"\0", "A byte after the last number."),
        ("gated-cut", "patch-truncated", sound[:-1], "The last byte is missing."),
    ):
        yield decoded(name, body, comment, expect)


def slice_vectors():
    million = reference.BLOCK_ELEMENTS
    ones = struct.pack("<I", 0x3F800000).hex()
    fields = {
        "masters": [["w0", [million + 40]], ["w1", [30]]],
        "theta": [[[ones, million + 40]], [[ones, 30]]],
        "state_root": ROOT.hex(),
        "entries": [
            *([0, 7 * i, 0x3F000000 + i] for i in range(5)),
            *([0, million + i, 0x3B000000 + i] for i in range(40)),
            [1, 3, 0x80000000],
        ],
        "round_index": 3,
    }
    whole = fields | {"inner_step_count": 8}
    yield vector("contribution-sections", "contribution", whole, "Two sections, each with chunks of its own.")
    for name, index, count, comment in (
        ("slice-first", 0, 2, "The first of two sections: listed, without a frame."),
        ("slice-second", 1, 2, "The second: all values of a block, and one of the next."),
        ("slice-empty", 1, 3, "Three slices of two sections: the second has none."),
    ):
        yield vector(name, "slice", fields | {"slice_index": index, "slice_count": count}, comment)
    small = {"masters": [["w0", [64]]], "theta": [[[ones, 64]]], "state_root": ROOT.hex(), "round_index": 3}
    gated = small | {"entries": [[0, i, contribution.value_from(0x3F800000, 5 * i, 0)] for i in range(0, 64, 4)]}
    place = {"slice_index": 0, "slice_count": 1}
    made = vector("slice-gated", "slice", gated | place, "Sums that cross an edge.")
    assert made["output"]["blob"][2 * 88 : 2 * 88 + 2] == "02"
    yield made
    blob = bytes.fromhex(made["output"]["blob"])
    for name, expect, data, comment in (
        ("slice-decode", "ok", blob, "The slice that the refused ones below differ from in one point."),
        ("slice-magic", "slice-header", b"PLSC" + blob[4:], "A contribution's magic."),
        ("slice-place", "slice-header", blob[:80] + b"\1" + blob[81:], "Another slice."),
        ("slice-trailing", "patch-trailing", blob + b"\0", "A byte after the end."),
    ):
        yield vector(name, "slice-decode", small | place | {"blob": data.hex()}, comment, expect)


def varint_bytes(*values):
    return b"".join(reference.varint(value) for value in values)


def main(folder):
    vectors = [*patch_vectors(), *decode_vectors(), *absolute_vectors(), *table_vectors(), *other_vectors()]
    vectors += contribution_vectors()
    vectors += slice_vectors()
    names = [item["name"] for item in vectors]
    assert len(set(names)) == len(names), "a name is used twice"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for item in vectors:
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in item.items())
        (folder / f"{item['name']}.json").write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(vectors)} vectors in {folder}")


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "vectors" / "codec"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
