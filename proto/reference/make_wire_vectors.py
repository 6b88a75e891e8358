"""Write proto/vectors/wire/*.json from the reference: ``python proto/reference/make_wire_vectors.py [FOLDER]``.

One vector a file, one fault a vector. ``input.operation`` says what is done; see proto/vectors/wire/README.md.
Every expectation is written here by hand and the reference must agree with it.
"""

import base64
import json
import math
import struct
import sys
from pathlib import Path

import msgpack
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

sys.path.insert(0, str(Path(__file__).parent))
import pulse_reference as reference
import pulse_reference_trust as reference_trust

NOW_MS = 1_800_000_000_000
OWNER, PUBLISHER, SECOND, TRAINER, INFERENCER, STRANGER = (
    Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in range(1, 7)
)


def public(key):
    return key.public_key().public_bytes_raw()


def name(text):
    return reference.digest(text.encode())


def plain(value):
    """Bytes as {"hex": digits}, so that JSON can hold any value."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def vector(title, operation, fields, comment, expect="ok"):
    output = None
    try:
        output = OPERATIONS[operation](fields)
        found = "ok"
    except reference.Refused as error:
        found = error.code
    assert found == expect, f"{title}: expected {expect}, the reference says {found}"
    return {
        "name": title,
        "expect": expect,
        "input": {"operation": operation, **fields},
        "output": output,
        "comment": comment,
    }


# What each operation does, by the reference.


def run_canonical(fields):
    reference.decode(bytes.fromhex(fields["data"]))
    return {}


def run_frames(fields):
    messages = reference.decode_frames(bytes.fromhex(fields["stream"]))
    encoded = b"".join(reference.encode_frame(number, body) for number, body in messages)
    return {"messages": [[number, plain(body)] for number, body in messages], "encoded": encoded.hex()}


def run_record(fields):
    signed = reference.decode_signed(bytes.fromhex(fields["signed"]))
    record = reference.open_record(fields["type"], signed, bytes.fromhex(fields["run_id"]))
    return {
        "fields": plain(record),
        "digest": reference.digest(signed["payload"]).hex(),
        "encoded": reference.encode(record).hex(),
        "signers": [signer.hex() for signer in signed["signers"]],
    }


def run_chunk_list(fields):
    data = bytes.fromhex(fields["data"])
    entries = reference.decode_chunk_list(data)
    return {
        "entries": [[size, digest.hex()] for size, digest in entries],
        "size_bytes": sum(size for size, _ in entries),
        "blob_id": reference.digest(data).hex(),
    }


def run_outcome(fields):
    signed = reference.decode_signed(bytes.fromhex(fields["signed"]))
    return {
        "outcome": reference.outcome_of(
            reference.take(reference.RECORDS["receipt"], reference.decode(signed["payload"]))
        ).hex()
    }


def run_cut(fields):
    chunks = reference.cut([bytes.fromhex(part) for part in fields["segments"]], fields["chunk_size_bytes"])
    data = reference.encode_chunk_list([(len(chunk), reference.digest(chunk)) for chunk in chunks])
    return {"chunk_list": data.hex(), "blob_id": reference.digest(data).hex()}


def run_token(fields):
    token = reference.decode_token(fields["text"])
    return {"fields": plain(token), "text": reference.encode_token(token)}


def run_trust(fields):
    trust = reference_trust.Trust(bytes.fromhex(fields["run_id"]), fields["revision_min"])
    codes = []
    for step in fields["steps"]:
        signed = [reference.decode_signed(bytes.fromhex(data)) for data in step["records"]]
        arguments = (*signed, step["now_ms"]) if step["accept"] in ("head", "last_head") else signed
        try:
            getattr(trust, f"accept_{step['accept']}")(*arguments)
            codes.append("ok")
        except reference.Refused as error:
            codes.append(error.code)
    assert codes == fields["expected"], f"{codes} instead of {fields['expected']}"
    return {"forked": trust.forked, "epoch": trust.epoch(), "version": trust.head and trust.head[0]["version"]}


def run_rollouts(fields):
    signed = reference.decode_signed(bytes.fromhex(fields["signed"]))
    batch = reference.take(reference.RECORDS["rollouts"], reference.decode(signed["payload"]))
    return {"samples": reference.read_rollouts(batch)}


OPERATIONS = {
    "rollouts": run_rollouts,
    "canonical": run_canonical,
    "frames": run_frames,
    "record": run_record,
    "chunk-list": run_chunk_list,
    "cut": run_cut,
    "outcome": run_outcome,
    "token": run_token,
    "trust": run_trust,
}


# A run and its records.


def make_descriptor(**changes):
    return {
        "name": "vectors",
        "nonce": bytes(range(16)),
        "revision": 0,
        "previous": None,
        "owners": [public(OWNER)],
        "owner_threshold": 1,
        "authorities": sorted([public(PUBLISHER), public(SECOND)]),
        "trainers": [public(TRAINER)],
        "inferencers": [public(INFERENCER)],
        "open_trainers_max": 0,
        "open_inferencers_max": 0,
        "private": False,
        "table_digest": None,
        "base_root": None,
        "base_blob_id": None,
        "algorithm": "none",
        "constants": [["lr", 0x3F333333], ["mu", 0x3F666666]],
        "publish_interval_min_ms": 0,
        "anchor_interval": 50,
        "wire_version_min": 1,
        "wire_version_max": 1,
        **changes,
    }


GENESIS = make_descriptor()
RUN_ID = reference.digest(reference.encode(GENESIS))


def make_manifest(number, **changes):
    is_anchor = number == 1
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "term": 0,
        "kind": "anchor" if is_anchor else "patch",
        "base_version": None if is_anchor else [0, number - 1],
        "version": [0, number],
        "base_root": None if is_anchor else name(f"root {number - 1}"),
        "root": name(f"root {number}"),
        "table_digest": name("table"),
        "blob_id": name(f"blob {number}"),
        "raw_size_bytes": 2000,
        "encoded_size_bytes": 2000 if is_anchor else 30,
        "changed_count": 1000 if is_anchor else 9,
        "element_count": 1000,
        "codec_id": 2,
        "trainer_step": number,
        "previous": None,
        "consensus": True,
        **changes,
    }


def make_head(number, **changes):
    issued = changes.pop("issued_at_ms", NOW_MS)
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "term": 0,
        "version": [0, number],
        "root": name(f"root {number}"),
        "manifest_digest": name(f"manifest {number}"),
        "catalogue_digest": name("catalogue"),
        "epoch_digest": None,
        "issued_at_ms": issued,
        "valid_until_ms": issued + 300_000,
        **changes,
    }


def make_entry(manifest):
    entry = {field: manifest[field] for field in reference.ENTRY if field in manifest}
    return {**entry, "manifest_digest": reference.digest(reference.encode(manifest))}


def make_catalogue(*manifests, epoch=0):
    entries = sorted((make_entry(manifest) for manifest in manifests), key=reference.entry_key)
    return {"run_id": RUN_ID, "epoch": epoch, "entries": entries}


def make_epoch(epoch, first_number, **changes):
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "epoch": epoch,
        "kept_version": [0, first_number - 1],
        "kept_root": name(f"root {first_number - 1}"),
        "first_number": first_number,
        "reason": "restart",
        **changes,
    }


def make_have(**changes):
    return {
        "run_id": RUN_ID,
        "role": "seed",
        "epoch": 0,
        "version_first": 2,
        "version_last": 57,
        "anchors": [1, 51],
        "addresses": ["/ip4/127.0.0.1/tcp/4001"],
        "issued_at_ms": NOW_MS,
        **changes,
    }


def make_body(
    versions=((0, 6, 0, 7), (0, 7, 0, 7)),
    lengths=((2, 1), (1, 2)),
    prompts=(5, 6, 7),
    completions=(8, 9, 70_000),
    logprobs=(-0.25, -math.inf, 0.0),
    form="<f",
    rewards=(1.0, 0.0),
    parts=(0.5, 0.25, -1.0, 0.0),
):
    columns = [write(*(struct.pack("<Q", row[place]) for place in range(4) for row in versions))]
    columns += [write(*(struct.pack("<I", length) for length in row)) for row in lengths]
    columns += [write(*(struct.pack("<I", token) for token in row)) for row in (prompts, completions)]
    columns.append(write(*(struct.pack(form, value) for value in logprobs)))
    columns += [write(*(struct.pack("<f", value) for value in row)) for row in (rewards, parts)]
    return b"".join(columns)


def write(*items):
    return reference.write_planes(items)


def compress(raw):
    return zstandard.ZstdCompressor(level=1, write_checksum=False).compress(raw)


def make_rollouts(**changes):
    return {
        "run_id": RUN_ID,
        "sequence": 41,
        "version_first": [0, 6],
        "version_last": [0, 7],
        "sample_count": 2,
        "part_names": ["correct", "short"],
        "logprob_bits": 32,
        "trainer": None,
        "task_ids": [],
        "body": compress(make_body()),
        "metadata": "{}",
        **changes,
    }


def make_answer(task_ids):
    return make_rollouts(trainer=public(TRAINER), task_ids=task_ids)


def make_vote(**changes):
    newest = {"round_index": 6, "term": 2, "outcome": name("outcome 6"), "digest": name("receipt 6")}
    vote = {"run_id": RUN_ID, "revision": 0, "term": 3, "candidate": public(PUBLISHER), "newest": newest}
    return {**vote, **changes}


def make_contribution(**changes):
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "peer_id": public(TRAINER),
        "round_index": 7,
        "base_state_root": name("state 7"),
        "blob_id": name("contribution 7"),
        "encoded_size_bytes": 90,
        "entry_count": 30,
        "element_count": 1000,
        "norm_bits": 0x3A83126F,
        "codec_id": 1,
        **changes,
    }


def make_receipt(**changes):
    peers = sorted([public(TRAINER), public(INFERENCER)])
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "term": 3,
        "coordinator": public(PUBLISHER),
        "round_index": 7,
        "base_state_root": name("state 7"),
        "previous": name("outcome 6"),
        "members": [
            {"peer_id": peer, "contribution_digest": name(f"contribution {index}"), "scale_bits": 0x3F800000 - index}
            for index, peer in enumerate(peers)
        ],
        "rejected": [{"peer_id": public(STRANGER), "contribution_digest": name("bad"), "reason": "finite"}],
        **changes,
    }


def make_state_anchor(**changes):
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "round_index": 10,
        "state_root": name("state 10"),
        "outcome": name("outcome 9"),
        "blob_id": name("anchor 10"),
        "encoded_size_bytes": 8000,
        **changes,
    }


def make_aggregate(**changes):
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "round_index": 7,
        "outcome": name("outcome 7"),
        "slices": [{"blob_id": name(f"slice {index}"), "encoded_size_bytes": 90 * index} for index in range(3)],
        **changes,
    }


def make_roster(**changes):
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "term": 3,
        "number": 2,
        "first_round": 8,
        "round_count": 8,
        "members": sorted((public(TRAINER), public(PUBLISHER), public(SECOND))),
        "subset": [0, 3, 300],
        "probe_round": None,
        "distance_bits": None,
        **changes,
    }


def make_probe(**changes):
    rows = [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]
    answer = b"PLSP" + struct.pack("<B3xQII", 1, 16, len(rows), 3) + b"".join(struct.pack("<3e", *row) for row in rows)
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "peer_id": public(TRAINER),
        "roster": name("roster"),
        "round_index": 16,
        "batch": name("batch"),
        "bins": name("bins"),
        "answer": answer,
        "scores": struct.pack("<3f", 0.5, 0.0, 2e-3),
        **changes,
    }


def make_share(**changes):
    return {
        "run_id": RUN_ID,
        "revision": 0,
        "peer_id": public(TRAINER),
        "roster": name("roster"),
        "round_index": 9,
        "job": 1,
        "kind": "part",
        "slice_index": 2,
        "slice_count": 3,
        "contributors": b"",
        "blob_id": name("part"),
        "encoded_size_bytes": 4100,
        "element_count": 1000,
        "norm_bits": 0x3F800000,
        "mixed_root": name("mean 8"),
        **changes,
    }


# The vectors.


def make_canonical():
    def case(title, digits, comment, expect="ok"):
        return vector(f"canonical-{title}", "canonical", {"data": digits.replace(" ", "")}, comment, expect)

    deep = reference.DEPTH_MAX
    yield case("map", "82 a161 01 a162 92 c0 c3", "Keys ascend, integers are shortest.")
    yield case("integers", "99 00 7f cc80 cd0100 ce00010000 cf0000000100000000 ff e0 d0df", "Each form at its least.")
    yield case("deepest", "91" * deep + "c0", "Nested as deep as allowed.")
    for title, digits, comment in (
        ("too-deep", "91" * (deep + 1) + "c0", "One array too many."),
        ("nesting-bomb", "91" * 5000, "Must not exhaust the stack."),
        ("huge-array", "ddffffffff", "Four thousand million items in five bytes."),
        ("huge-map", "dfffffffff", "The same as a map."),
        ("huge-bytes", "c6ffffffff", "Four GiB declared, none there."),
        ("huge-extension", "c9ffffffff01", "Extension types are not used at all."),
        ("extension", "d40100", "An extension of one byte."),
        ("timestamp", "d6ff00000000", "The predefined extension is refused too."),
        ("float", "cb3ff0000000000000", "No floats: a real number travels as its FP32 bits."),
        ("long-integer", "cc7f", "127 fits the one-byte form."),
        ("long-negative", "d0ff", "-1 fits the one-byte form."),
        ("signed-positive", "d1 00ff", "Integers from 0 up use the unsigned forms."),
        ("long-text", "d9 01 61", "A text of one byte in the two-byte form."),
        ("long-array", "dc 0001 c0", "An array of one item in the three-byte form."),
        ("long-map", "de 0001 a161 c0", "A map of one item in the three-byte form."),
        ("unsorted-keys", "82 a162 c0 a161 c0", "b before a."),
        ("duplicate-key", "82 a161 c0 a161 c0", "a twice."),
        ("integer-key", "81 01 c0", "Keys are text."),
        ("bytes-key", "81 c40161 c0", "Keys are text, not bytes."),
        ("bad-utf8", "a1 ff", "Not UTF-8."),
        ("surrogate", "a3 eda080", "A surrogate has no UTF-8 form."),
        ("trailing", "c0 c0", "One byte after the value."),
        ("cut", "a2 61", "One byte of two."),
        ("empty", "", "No value at all."),
        ("reserved", "c1", "Never used in msgpack."),
    ):
        yield case(title, digits, comment, "decode")


def make_frames():
    zero = bytes(32)
    bodies = {
        1: {
            "run_id": RUN_ID,
            "wire_version_min": 1,
            "wire_version_max": 1,
            "role": "seed",
            "software": "x/1",
            "features": ["holdings", "probes"],
        },
        3: {"head": b"record"},
        4: {"digests": [zero, name("a")]},
        5: {"records": [b"one", b"two"]},
        6: {"revision_min": 3},
        7: {"epoch_min": 300},
        8: {"blob_id": zero, "offset": 1 << 20},
        9: {"blob_id": zero, "total_size_bytes": 70_000, "data": b"list"},
        10: {"digests": [zero] * 4, "blob_id": name("blob")},
        11: {"digest": zero, "data": b"chunk"},
        13: {"head": b"record"},
        14: {"first": b"one", "second": b"two"},
        15: {"batch": b"batch"},
        16: {"accepted": True, "reason": ""},
        17: {"have": b"record"},
        18: {"have": None, "neighbours": [{"peer_id": zero, "addresses": ["/ip4/127.0.0.1/tcp/1"]}]},
        19: {"code": "busy", "detail": "später", "retry_after_ms": 1500},
        20: {"vote": b"vote"},
        21: {"votes": [b"one", b"two"]},
        22: {"contribution": b"record"},
        23: {"receipt": b"record", "votes": []},
        24: {"round_index": 7},
        25: {"round_index": 9, "votes": [b"one"], "receipts": [b"seven", b"eight"], "state_anchor": None},
        26: {"round_index": 7},
        27: {"aggregates": [b"nine", b"ten"]},
        28: {"count_max": 8},
        29: {"tasks": [{"task_id": bytes(16), "content": "{}", "lease_ms": 600_000}]},
        30: {"blob_id": zero},
        31: {"blob_id": zero, "held": b"\xa0", "given": b"\x80"},
        32: {"round_index": 9},
        33: {"votes": [b"one"], "rosters": [b"old", b"new"]},
        34: {"share": b"share"},
        35: {"round_index": None, "job": 0, "slice_index": 0},
        36: {"round_index": 9, "known_from": 3, "is_open": True, "shares": [b"one", b"two"]},
        37: {"probe": b"probe"},
    }
    for number in reference.MESSAGES:
        stream = reference.encode_frame(number, bodies.get(number, {}))
        yield vector(f"message-{number:02}", "frames", {"stream": stream.hex()}, "One message of each number.")
    nothing = reference.encode_frame(3, {"head": None}) + reference.encode_frame(11, {"data": None, "digest": zero})
    yield vector("frames-two", "frames", {"stream": nothing.hex()}, "Two frames; nil where nothing is there.")
    later = reference.encode_frame(6, {"revision_min": 3, "zz": [1, {"a": None}]})
    yield vector("frames-unknown-field", "frames", {"stream": later.hex()}, "An unknown field is ignored.")
    older = {key: value for key, value in bodies[1].items() if key != "features"}
    stream = reference.encode_frame(1, older) + reference.encode_frame(10, {"digests": [zero]})
    yield vector("frames-older-sender", "frames", {"stream": stream.hex()}, "Fields added later may be missing.")
    good = reference.encode_frame(16, {"accepted": True, "reason": ""})
    for title, stream, comment, expect in (
        ("length-zero", bytes(4), "A frame holds at least its number.", "framing"),
        ("length-huge", struct.pack("<I", reference.FRAME_MAX + 1) + b"\x02\x80", "Refused at the length.", "framing"),
        ("cut", good[:-1], "The stream ends inside the frame.", "framing"),
        ("cut-length", good[:3], "The stream ends inside the length.", "framing"),
        ("length-short", struct.pack("<I", len(good) - 5) + good[4:], "The length is one too small.", "decode"),
        ("length-long", struct.pack("<I", len(good) - 3) + good[4:] + b"\0", "The length is one too large.", "decode"),
        ("number-unknown", reference.encode_frame(200, {}), "No message has this number.", "message-unknown"),
        ("number-zero", reference.encode_frame(0, {}), "Numbers start at 1.", "message-unknown"),
        ("field-missing", reference.encode_frame(16, {"accepted": True}), "Every field is there.", "schema"),
        ("field-type", reference.encode_frame(16, {"accepted": 1, "reason": ""}), "1 is no boolean.", "schema"),
        ("field-negative", reference.encode_frame(6, {"revision_min": -1}), "Integers start at 0.", "schema"),
        ("field-over", reference.encode_frame(6, {"revision_min": 1 << 63}), "Integers end at 2^63 - 1.", "schema"),
        ("field-long", reference.encode_frame(16, {"accepted": True, "reason": "x" * 65}), "64 bytes.", "schema"),
        ("digest-short", reference.encode_frame(4, {"digests": [bytes(31)]}), "A digest has 32 bytes.", "schema"),
        ("items-over", reference.encode_frame(10, {"digests": [zero] * 5}), "Four chunks a request.", "schema"),
        ("vote-long", reference.encode_frame(20, {"vote": bytes(2049)}), "2,048 bytes.", "schema"),
        ("body-array", reference.encode_frame(2, []), "A message is a map.", "schema"),
    ):
        yield vector(f"frames-{title}", "frames", {"stream": stream.hex()}, comment, expect)


def make_records():
    def case(title, record_type, signed, comment, expect="ok", run_id=RUN_ID):
        fields = {"type": record_type, "run_id": run_id.hex(), "signed": signed.hex()}
        return vector(f"record-{title}", "record", fields, comment, expect)

    sign = reference.sign
    yield case("genesis", "descriptor", sign("descriptor", GENESIS, OWNER), "Its digest is the run id.")
    revision = make_descriptor(revision=1, previous=RUN_ID, trainers=[])
    yield case("revision", "descriptor", sign("descriptor", revision, OWNER), "Names the genesis.")
    yield case("epoch", "epoch", sign("epoch", make_epoch(1, 59), PUBLISHER, SECOND), "Two signers, by key.")
    yield case("anchor", "manifest", sign("manifest", make_manifest(1), PUBLISHER), "No base.")
    yield case("patch", "manifest", sign("manifest", make_manifest(2), PUBLISHER), "From 1 to 2.")
    skip = make_manifest(9, kind="skip", base_version=[0, 1], base_root=name("root 1"))
    yield case("skip", "manifest", sign("manifest", skip, PUBLISHER), "From 1 to 9.")
    catalogue = make_catalogue(make_manifest(1), make_manifest(2), skip)
    yield case("catalogue", "catalogue", sign("catalogue", catalogue, PUBLISHER), "Three entries in order.")
    yield case("head", "head", sign("head", make_head(9), PUBLISHER), "Valid for 300 s.")
    yield case("have", "have", sign("have", make_have(), STRANGER), "Signed by the node itself.")
    yield case("rollouts", "rollouts", sign("rollouts", make_rollouts(), INFERENCER), "Two samples.")
    answer = make_answer([bytes(16), name("task")[:16]])
    yield case("rollouts-answer", "rollouts", sign("rollouts", answer, INFERENCER), "Answers two tasks.")
    later = sign("head", {**make_head(9), "later": [{"a": 1}]}, PUBLISHER)
    lone = sign("manifest", make_manifest(2, consensus=False), PUBLISHER)
    yield case("no-consensus", "manifest", lone, "A version that is one trainer's own.")
    older = {key: value for key, value in make_manifest(2).items() if key != "consensus"}
    yield case("manifest-older", "manifest", sign("manifest", older, PUBLISHER), "By a sender that knows no gossip.")
    yield case("unknown-field", "head", later, "Ignored, but covered by the digest and the signature.")
    head = sign("head", make_head(9), PUBLISHER)
    signed = reference.decode(head)
    yield case("wrong-type", "manifest", head, "A head offered as a manifest.", "wrong-type")
    renamed = reference.encode({**signed, "type": "have"})
    yield case("renamed", "have", renamed, "The signature covers the type.", "signature")
    flipped = bytearray(signed["signatures"][0])
    flipped[0] ^= 1
    broken = reference.encode({**signed, "signatures": [bytes(flipped)]})
    yield case("bad-signature", "head", broken, "One bit of the signature.", "signature")
    stolen = reference.encode({**signed, "signers": [public(SECOND)]})
    yield case("other-signer", "head", stolen, "Signed by another key than named.", "signature")
    changed = reference.encode({**signed, "payload": reference.encode(make_head(10))})
    yield case("other-payload", "head", changed, "Another payload under the signature.", "signature")
    yield case("wrong-run", "head", head, "The same keys in another run.", "wrong-run", run_id=name("other"))
    genesis = sign("descriptor", make_descriptor(name="other"), OWNER)
    yield case("wrong-genesis", "descriptor", genesis, "Its digest is not the run id.", "wrong-run")
    unsorted = msgpack.packb(dict(reversed(reference.sort_maps(make_head(9)).items())))
    yield case("payload-unsorted", "head", sign("head", unsorted, PUBLISHER), "Signed, yet not canonical.", "decode")
    for title, changes, comment in (
        ("no-signer", {"signers": [], "signatures": []}, "At least one."),
        ("signature-missing", {"signatures": []}, "As many signatures as signers."),
        ("signer-twice", {"signers": [bytes(32)] * 2, "signatures": [bytes(64)] * 2, "type": "epoch"}, "No key twice."),
        ("two-signers", {"signers": [bytes(32), name("")], "signatures": [bytes(64)] * 2}, "A head has one."),
        ("type-capital", {"type": "Head"}, "Types are lower-case letters."),
    ):
        yield case(title, "head", reference.encode({**signed, **changes}), comment, "schema")
    for title, record_type, record, key, comment in (
        ("epoch-zero", "epoch", make_epoch(0, 5), OWNER, "Epoch 0 has no record."),
        ("kept-above", "epoch", make_epoch(1, 5, kept_version=[0, 5]), OWNER, "Numbers never fall."),
        ("patch-gap", "manifest", make_manifest(9, base_version=[0, 7]), PUBLISHER, "A patch is one step."),
        ("skip-short", "manifest", make_manifest(9, kind="skip"), PUBLISHER, "A skip is two steps or more."),
        ("base-without-root", "manifest", make_manifest(9, base_root=None), PUBLISHER, "Both or none."),
        ("blob-too-large", "manifest", make_manifest(9, encoded_size_bytes=4_197_349), PUBLISHER, "1.01 x + 4 MiB."),
        ("changed-over", "manifest", make_manifest(9, changed_count=1001), PUBLISHER, "More than there are."),
        ("version-zero", "manifest", make_manifest(1, version=[0, 0]), PUBLISHER, "Numbers start at 1."),
        ("head-too-long", "head", make_head(9, valid_until_ms=NOW_MS + 300_001), PUBLISHER, "300 s at most."),
        ("head-epoch", "head", make_head(9, epoch_digest=name("e")), PUBLISHER, "Epoch 0 has no record."),
        ("kind-unknown", "manifest", make_manifest(9, kind="delta"), PUBLISHER, "Not one of three."),
        ("have-range", "have", make_have(version_first=58), STRANGER, "First above last."),
        ("rollouts-range", "rollouts", make_rollouts(version_first=[0, 8]), INFERENCER, "First above last."),
        ("rollouts-none", "rollouts", make_rollouts(sample_count=0), INFERENCER, "At least one sample."),
        ("rollouts-tasks-twice", "rollouts", make_answer([bytes(16)] * 2), INFERENCER, "A task is answered once."),
        ("rollouts-no-trainer", "rollouts", make_rollouts(task_ids=[bytes(16)]), INFERENCER, "Whose task?"),
        ("rollouts-no-task", "rollouts", make_answer([]), INFERENCER, "A trainer and none of its tasks."),
        ("rollouts-bits", "rollouts", make_rollouts(logprob_bits=8), INFERENCER, "FP16 or FP32."),
        ("rollouts-parts", "rollouts", make_rollouts(part_names=["a", "a"]), INFERENCER, "No name twice."),
        ("threshold", "descriptor", make_descriptor(owner_threshold=2), OWNER, "More than there are owners."),
        ("keys-twice", "descriptor", make_descriptor(trainers=[bytes(32)] * 2), OWNER, "Keys ascend."),
    ):
        yield case(title, record_type, sign(record_type, record, key), comment, "schema")
    yield case("vote", "vote", sign("vote", make_vote(), SECOND), "For another authority.")
    yield case("vote-first", "vote", sign("vote", make_vote(newest=None), PUBLISHER), "Nothing stored yet.")
    yield case("contribution", "contribution", sign("contribution", make_contribution(), TRAINER), "One a round.")
    yield case("receipt", "receipt", sign("receipt", make_receipt(), PUBLISHER, SECOND), "Countersigned.")
    start = make_receipt(round_index=0, previous=None, members=[])
    yield case("receipt-void", "receipt", sign("receipt", start, PUBLISHER), "Round 0, all rejected.")
    anchor = sign("stateanchor", make_state_anchor(), PUBLISHER)
    yield case("stateanchor", "stateanchor", anchor, "State 10, after ten rounds.")
    yield case("aggregate", "aggregate", sign("aggregate", make_aggregate(), SECOND), "Three slices; one is empty.")
    yield case("roster", "roster", sign("roster", make_roster(), PUBLISHER), "Three members, three tensors of Mix2.")
    older = {key: value for key, value in make_roster().items() if key not in ("probe_round", "distance_bits")}
    yield case("roster-older", "roster", sign("roster", older, PUBLISHER), "By a sender that measures nothing.")
    measured = make_roster(probe_round=8, distance_bits=0x3E4CCCCD)
    yield case("roster-measured", "roster", sign("roster", measured, PUBLISHER), "Trainers were 0.2 apart in round 8.")
    yield case("probe", "probe", sign("probe", make_probe(), TRAINER), "Two tokens, two bins and the rest.")
    nothing = make_probe(scores=b"")
    yield case("probe-no-scores", "probe", sign("probe", nothing, TRAINER), "Mix2 came to nothing, or there is none.")
    share = make_share(kind="mean", contributors=b"\xa0", slice_count=3)
    yield case("share-part", "share", sign("share", make_share(), TRAINER), "A slice of an outer iterate.")
    yield case("share-mean", "share", sign("share", share, TRAINER), "The mean of the first and the third member.")
    taken = make_share(job=2, kind="taken", slice_index=0, slice_count=1, mixed_root=None)
    hint = make_share(job=2, kind="hint", slice_index=0, slice_count=1)
    yield case("share-hint", "share", sign("share", hint, TRAINER), "What the higher key of a pair will show.")
    yield case("share-taken", "share", sign("share", taken, TRAINER), "The lower key of a pair took the mean.")
    member = make_receipt()["members"]
    same = [{**make_receipt()["rejected"][0], "peer_id": member[0]["peer_id"]}]
    late = {**make_vote()["newest"], "term": 4}
    for title, record_type, record, key, comment in (
        ("vote-term-zero", "vote", make_vote(term=0, newest=None), SECOND, "Terms start at 1."),
        ("vote-newest-later", "vote", make_vote(newest=late), SECOND, "Stored in a later term."),
        ("entries-over", "contribution", make_contribution(entry_count=1001), TRAINER, "More than there are."),
        ("norm-infinite", "contribution", make_contribution(norm_bits=0x7F800000), TRAINER, "Infinity."),
        ("norm-negative", "contribution", make_contribution(norm_bits=0xBF800000), TRAINER, "-1."),
        ("contribution-large", "contribution", make_contribution(encoded_size_bytes=4_199_369), TRAINER, "1.01 x."),
        ("receipt-empty", "receipt", make_receipt(members=[], rejected=[]), PUBLISHER, "Nobody contributed."),
        ("receipt-order", "receipt", make_receipt(members=member[::-1]), PUBLISHER, "Descending."),
        ("receipt-twice", "receipt", make_receipt(members=member[:1] * 2), PUBLISHER, "One key twice."),
        ("receipt-both", "receipt", make_receipt(rejected=same), PUBLISHER, "Counted and rejected."),
        ("receipt-previous", "receipt", make_receipt(previous=None), PUBLISHER, "Only round 0 has none."),
        ("scale-zero", "receipt", make_receipt(members=[{**member[0], "scale_bits": 0}]), PUBLISHER, "Above 0."),
        ("scale-above", "receipt", make_receipt(members=[{**member[0], "scale_bits": 0x3F800001}]), PUBLISHER, "To 1."),
        ("aggregate-empty", "aggregate", make_aggregate(slices=[]), SECOND, "No slice."),
        (
            "aggregate-large",
            "aggregate",
            make_aggregate(slices=[{"blob_id": name("slice"), "encoded_size_bytes": 1 << 39}]),
            SECOND,
            "Larger than all elements.",
        ),
        ("roster-nobody", "roster", make_roster(members=[]), PUBLISHER, "No member."),
        ("roster-order", "roster", make_roster(members=make_roster()["members"][::-1]), PUBLISHER, "Descending."),
        ("roster-rounds", "roster", make_roster(round_count=1025), PUBLISHER, "Valid for too long."),
        ("roster-end", "roster", make_roster(first_round=(1 << 63) - 8), PUBLISHER, "Ends beyond every integer."),
        ("roster-subset", "roster", make_roster(subset=[3, 3]), PUBLISHER, "One tensor twice."),
        ("roster-tensor", "roster", make_roster(subset=[65_536]), PUBLISHER, "A tensor no table has."),
        ("roster-probe", "roster", make_roster(probe_round=8), PUBLISHER, "A probe without its distance."),
        ("roster-distance", "roster", make_roster(distance_bits=0), PUBLISHER, "A distance without its probe."),
        (
            "roster-distance-above",
            "roster",
            make_roster(probe_round=8, distance_bits=0x3F800001),
            PUBLISHER,
            "A distance above 1.",
        ),
        ("probe-nothing", "probe", make_probe(answer=b""), TRAINER, "No answer."),
        ("probe-scores", "probe", make_probe(scores=bytes(3)), TRAINER, "Three bytes are no FP32 value."),
        ("probe-score-nan", "probe", make_probe(scores=b"\0\0\xc0\x7f"), TRAINER, "NaN."),
        ("probe-score-negative", "probe", make_probe(scores=b"\0\0\x80\xbf"), TRAINER, "-1."),
        ("share-job", "share", make_share(job=3), TRAINER, "There is no third job."),
        ("share-kind", "share", make_share(kind="sum"), TRAINER, "No such kind."),
        ("share-slice", "share", make_share(slice_index=3), TRAINER, "Beyond the last slice."),
        ("share-slices", "share", make_share(slice_count=1025), TRAINER, "More slices than members."),
        ("share-no-contributors", "share", make_share(kind="mean"), TRAINER, "A mean of nobody."),
        ("share-contributors", "share", make_share(contributors=b"\x80"), TRAINER, "Contributors of a part."),
        ("share-taken-slice", "share", make_share(kind="taken"), TRAINER, "Only pairs take."),
        ("share-hint-slice", "share", make_share(kind="hint"), TRAINER, "Only pairs hint."),
        ("share-state-hint", "share", {**hint, "job": 0}, TRAINER, "A state is a part."),
        ("share-state", "share", make_share(job=0), TRAINER, "A state in slices."),
        ("share-elements", "share", make_share(element_count=(1 << 37) + 1), TRAINER, "More than there can be."),
        ("share-large", "share", make_share(encoded_size_bytes=4_199_369), TRAINER, "1.01 x."),
        ("share-norm", "share", make_share(norm_bits=0x7F800000), TRAINER, "Infinity."),
        ("anchor-outcome", "stateanchor", make_state_anchor(outcome=None), PUBLISHER, "Only the start has none."),
    ):
        yield case(title, record_type, sign(record_type, record, key), comment, "schema")
    for title, changes, comment in (
        ("receipt", {}, "As first proposed."),
        (
            "proposed-again",
            {"term": 5, "coordinator": public(SECOND), "revision": 1},
            "By a later coordinator: the same.",
        ),
        ("other", {"members": member[:1]}, "It counts others."),
    ):
        fields = {"signed": sign("receipt", make_receipt(**changes), PUBLISHER).hex()}
        yield vector(f"outcome-{title}", "outcome", fields, comment)
    two_roots = make_catalogue(make_manifest(9), make_manifest(9, kind="skip", base_version=[0, 1], root=name("x")))
    yield case("two-roots", "catalogue", sign("catalogue", two_roots, PUBLISHER), "One version, two roots.", "schema")
    catalogue["entries"].reverse()
    yield case("catalogue-order", "catalogue", sign("catalogue", catalogue, PUBLISHER), "Descending.", "schema")


def make_chunks():
    def case(title, data, comment, expect="ok"):
        return vector(f"chunk-list-{title}", "chunk-list", {"data": data.hex()}, comment, expect)

    entries = [(16, name("a")), (16, name("b")), (8, name("c"))]
    good = reference.encode_chunk_list(entries)
    yield case("three", good, "Three chunks.")
    yield case("empty", reference.encode_chunk_list([]), "The blob of 0 bytes.")
    yield case("repeated", reference.encode_chunk_list([entries[0]] * 3), "Equal chunks are one chunk.")
    for title, data, comment in (
        ("no-header", b"", "No header."),
        ("cut", good[:-1], "One byte short."),
        ("trailing", good + b"\0", "One byte long."),
        ("magic", b"X" + good[1:], "Another magic."),
        ("reserved", good[:12] + b"\1" + good[13:], "The reserved word is zero."),
        ("total", good[:16] + b"\x29" + good[17:], "The sizes do not add up."),
        ("count", good[:8] + b"\xff\xff\xff\xff" + good[12:], "Four thousand million chunks."),
        ("zero-chunk", reference.encode_chunk_list([(0, name("a"))]), "A chunk has a byte."),
        ("large-chunk", reference.encode_chunk_list([(reference.CHUNK_MAX + 1, name("a"))]), "Above 1 MiB."),
        ("two-sizes", reference.encode_chunk_list([(1, name("a")), (2, name("a"))]), "One digest, two sizes."),
    ):
        yield case(title, data, comment, "chunk-list")
    for size in (0, 1, 15, 16, 17, 48):
        fields = {"segments": [bytes(range(size)).hex()], "chunk_size_bytes": 16}
        yield vector(f"cut-{size:02}", "cut", fields, "Sizes at the edge of a chunk.")
    fields = {"segments": ["", "aa" * 20, "bb" * 3, "aa" * 20], "chunk_size_bytes": 16}
    yield vector("cut-boundaries", "cut", fields, "Each segment starts a chunk, so equal tensors share chunks.")


def make_tokens():
    token = {
        "run_id": RUN_ID,
        "revision_min": 2,
        "bootstraps": ["/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWExample"],
        "secret": b"",
        "expires_at_ms": None,
    }
    text = reference.encode_token(token)
    yield vector("token", "token", {"text": text}, "A public run.")
    private = reference.encode_token({**token, "secret": bytes(range(32)), "expires_at_ms": NOW_MS})
    yield vector("token-private", "token", {"text": private}, "With secret and expiry.")
    spaced = f" {text[:30].upper()}\n{text[30:]} "
    yield vector("token-spaced", "token", {"text": spaced}, "White space and case do not matter.")
    data = reference.encode({**token, "secret": bytes(33)})
    wrong = "pulse1" + base64.b32encode(data + reference.digest(data)[:4]).decode().rstrip("=").lower()
    yield vector("token-schema", "token", {"text": wrong}, "A secret of 33 bytes.", "schema")
    for title, bad, comment in (
        ("cut", text[:-3], "Copied in part."),
        ("changed", text[:20] + ("a" if text[20] != "a" else "b") + text[21:], "One letter changed."),
        ("prefix", "pulse2" + text[6:], "Another version."),
        ("letters", text[:20] + "!" + text[21:], "Not base32."),
        ("nothing", "", "No text."),
    ):
        yield vector(f"token-{title}", "token", {"text": bad}, comment, "token")


def make_trust():
    sign = reference.sign
    genesis = sign("descriptor", GENESIS, OWNER)

    def case(title, comment, *steps, revision_min=0):
        written = [
            {"accept": accept, "records": [data.hex() for data in records], "now_ms": now_ms}
            for accept, records, now_ms, _ in [step("descriptor", genesis), *steps]
        ]
        expected = ["ok", *(code for _, _, _, code in steps)]
        fields = {"run_id": RUN_ID.hex(), "revision_min": revision_min, "steps": written, "expected": expected}
        return vector(f"trust-{title}", "trust", fields, comment)

    def step(accept, *records, code="ok", now_ms=None):
        return accept, records, now_ms, code

    def head(number, code="ok", key=PUBLISHER, now_ms=NOW_MS, **changes):
        return step("head", sign("head", make_head(number, **changes), key), code=code, now_ms=now_ms)

    def manifest(number, code="ok", key=PUBLISHER, **changes):
        return step("manifest", sign("manifest", make_manifest(number, **changes), key), code=code)

    def epoch(record, *keys, code="ok"):
        return step("epoch", sign("epoch", record, *keys), code=code)

    def descriptor(code="ok", keys=(OWNER,), **changes):
        changes = {"revision": 1, "previous": RUN_ID, **changes}
        return step("descriptor", sign("descriptor", make_descriptor(**changes), *keys), code=code)

    yield case("forward", "Only forward; a repeat is no news.", head(57), head(57), head(41, "rollback"), head(58))
    yield case(
        "refresh",
        "The newest version signed anew goes on; an earlier issue changes nothing.",
        head(57),
        head(57, issued_at_ms=NOW_MS + 40_000, now_ms=NOW_MS + 40_000),
        head(57, issued_at_ms=NOW_MS - 40_000),
    )
    yield case(
        "replay", "An old head under a fresh directory expiry.", head(41, "expired", issued_at_ms=NOW_MS - 300_000)
    )
    yield case("future", "A clock that runs ahead.", head(5, "future", issued_at_ms=NOW_MS + 300_001), head(5))
    yield case(
        "untrusted",
        "Only authorities publish.",
        head(1, "untrusted", key=OWNER),
        head(1, "untrusted", key=STRANGER),
        manifest(1, "untrusted", key=TRAINER),
    )
    yield case("revision", "Records of a later revision wait.", head(1, "revision-unknown", revision=1))
    yield case(
        "revision-min",
        "Nothing counts below the token's revision.",
        head(1, "revision-unknown"),
        descriptor(),
        head(1),
        revision_min=1,
    )
    yield case(
        "term",
        "A term has one signer and never falls.",
        head(5, term=2),
        head(6, "term", term=1, key=SECOND),
        head(6, "term", term=2, key=SECOND),
        head(6, term=3, key=SECOND),
    )
    yield case(
        "descriptors",
        "Owners before, digest before, one by one.",
        descriptor("untrusted", keys=(PUBLISHER,)),
        descriptor("mismatch", previous=name("other")),
        descriptor("mismatch", nonce=bytes(16)),
        descriptor("revision-gap", revision=2),
        descriptor(),
        descriptor(),
        descriptor("rollback", name="another revision 1"),
    )
    yield case(
        "revoked",
        "A revoked key publishes nothing; its head stays the floor.",
        head(57),
        descriptor(authorities=[public(SECOND)]),
        head(58, "untrusted"),
        head(56, "rollback", key=SECOND),
        head(57, key=SECOND, issued_at_ms=NOW_MS - 5),
    )
    record = make_epoch(1, 59, kept_version=[0, 55], kept_root=name("root 55"))
    named = {"epoch_digest": reference.digest(reference.encode(record))}
    yield case(
        "epoch",
        "A higher epoch needs its record; the history after what it keeps is cut.",
        head(58),
        head(59, "epoch", version=[1, 59], **named),
        epoch(record, PUBLISHER, code="untrusted"),
        epoch(make_epoch(1, 58), OWNER, code="rollback"),
        epoch(record, PUBLISHER, SECOND),
        head(59, "epoch", version=[1, 59], epoch_digest=name("another record")),
        head(59, version=[1, 59], **named),
        head(60, "rollback"),
        manifest(56, "rollback"),
        manifest(55),
        epoch(make_epoch(1, 59, reason="twin"), OWNER, code="fork"),
    )
    order = make_epoch(1, 58, revision=1)
    ordered = {"version": [1, 58], "epoch_digest": reference.digest(reference.encode(order)), "revision": 1}
    yield case(
        "owners-order",
        "A leaked key used the last number: once it is revoked, the owners say where to go on, and nobody else.",
        head(57),
        head((1 << 63) - 1),
        epoch(make_epoch(1, 58), OWNER, code="rollback"),
        descriptor(authorities=[public(SECOND)]),
        epoch(make_epoch(1, 58), OWNER, code="rollback"),
        epoch(order, SECOND, code="rollback"),
        epoch(order, OWNER),
        head((1 << 63) - 1, "untrusted"),
        head(58, key=SECOND, **ordered),
    )
    yield case(
        "epoch-of-owners",
        "What revoked authorities cut is whole again, and beyond 2**32 - 1 only owners open epochs.",
        epoch(make_epoch(1 << 32, 9), PUBLISHER, SECOND, code="untrusted"),
        epoch(make_epoch((1 << 32) - 1, 9, kept_version=[0, 3]), PUBLISHER, SECOND),
        manifest(57, "rollback"),
        descriptor(authorities=[public(TRAINER)]),
        epoch(make_epoch(1 << 32, 58, revision=1), OWNER),
        manifest(57, key=TRAINER),
    )
    yield case(
        "last-head",
        "While nobody hears of a valid head, the last one is taken; it never takes the place of a valid one.",
        head(57, "expired", now_ms=NOW_MS + 300_000),
        step("last_head", sign("head", make_head(57), PUBLISHER), now_ms=NOW_MS + 300_000),
        step("last_head", sign("head", make_head(41), PUBLISHER), now_ms=NOW_MS + 300_000, code="rollback"),
        head(57, issued_at_ms=NOW_MS + 300_000, now_ms=NOW_MS + 300_000),
        step("last_head", sign("head", make_head(58), PUBLISHER), now_ms=NOW_MS + 300_000, code="expired"),
    )
    yield case(
        "epoch-again",
        "Until its first head an epoch may be opened again.",
        epoch(make_epoch(1, 59, reason="died"), OWNER),
        epoch(record, OWNER),
        head(59, version=[1, 59], **named),
    )
    first = {"version": [1, 59], "base_version": [0, 55], "base_root": name("root 55")}
    yield case(
        "epoch-start",
        "An epoch starts on the version it keeps, or with an anchor.",
        epoch(record, OWNER),
        manifest(59, **first),
        manifest(59, "mismatch", **{**first, "base_root": name("other")}),
        manifest(59, "mismatch", **{**first, "base_version": [0, 54]}),
        manifest(59, "epoch", **{**first, "version": [1, 58]}),
        manifest(59, "epoch", **{**first, "version": [2, 59]}),
    )
    yield case(
        "fork-reused-numbers",
        "A publisher went back and gave a version another root.",
        head(57),
        head(58),
        head(57, "fork", root=name("other")),
        head(59, "fork"),
        manifest(59, "fork"),
        epoch(make_epoch(1, 59), OWNER),
        head(60, version=[1, 60], epoch_digest=reference.digest(reference.encode(make_epoch(1, 59)))),
    )
    yield case(
        "fork-by-base", "A patch on another root betrays the fork.", head(58), manifest(59, "fork", base_root=name("x"))
    )
    one, two = (sign("manifest", make_manifest(58, root=name(root)), PUBLISHER) for root in ("one", "two"))
    forged = sign("manifest", make_manifest(58, root=name("two")), STRANGER)
    yield case(
        "fork-proof",
        "Two valid manifests of one version convince a node that saw neither.",
        step("fork_proof", one, one, code="mismatch"),
        step("fork_proof", one, forged, code="untrusted"),
        step("fork_proof", one, two),
        head(59, "fork"),
    )
    manifests = [make_manifest(number) for number in (1, 2, 3)]
    catalogue = make_catalogue(*manifests)
    digests = {
        "manifest_digest": reference.digest(reference.encode(manifests[2])),
        "catalogue_digest": reference.digest(reference.encode(catalogue)),
    }
    yield case(
        "catalogue",
        "Only the one the newest head names; it vouches for manifests of a revoked key.",
        step("catalogue", sign("catalogue", catalogue, PUBLISHER), code="mismatch"),
        head(3, **digests),
        step("catalogue", sign("catalogue", make_catalogue(manifests[0]), PUBLISHER), code="mismatch"),
        step("catalogue", sign("catalogue", catalogue, STRANGER), code="untrusted"),
        step("catalogue", sign("catalogue", catalogue, PUBLISHER)),
        descriptor(authorities=[public(SECOND)]),
        manifest(2, "untrusted"),
        head(3, key=SECOND, **digests),
        step("catalogue", sign("catalogue", catalogue, SECOND)),
        manifest(2),
        manifest(3),
    )
    lacking = make_catalogue(*manifests[:2])
    digests["catalogue_digest"] = reference.digest(reference.encode(lacking))
    yield case(
        "catalogue-lacks-head",
        "A catalogue lists its head's manifest.",
        head(3, **digests),
        step("catalogue", sign("catalogue", lacking, PUBLISHER), code="mismatch"),
    )
    yield case(
        "table",
        "The parameter table holds through an epoch.",
        manifest(1),
        manifest(2, "table", table_digest=name("other")),
        manifest(2),
    )
    yield case(
        "no-base",
        "Without a base model the first version is an anchor.",
        manifest(1, "mismatch", kind="patch", base_version=[0, 0], base_root=name("root 0"), changed_count=9),
    )


def make_rounds_trust():
    sign = reference.sign

    def case(title, comment, *steps, **changes):
        genesis = make_descriptor(**changes)
        run_id = reference.digest(reference.encode(genesis))
        taken = [("descriptor", sign("descriptor", genesis, OWNER), "ok")]
        for accept, record, keys, code in steps:
            record_type = accept.replace("_", "")
            taken.append((accept, sign(record_type, {"run_id": run_id, **record}, *keys), code))
        written = [{"accept": accept, "records": [data.hex()], "now_ms": None} for accept, data, _ in taken]
        expected = [code for _, _, code in taken]
        fields = {"run_id": run_id.hex(), "revision_min": 0, "steps": written, "expected": expected}
        return vector(f"trust-{title}", "trust", fields, comment)

    def without_run(record):
        return {field: value for field, value in record.items() if field != "run_id"}

    vote, contribution = without_run(make_vote()), without_run(make_contribution())
    receipt, anchor = without_run(make_receipt()), without_run(make_state_anchor())
    yield case(
        "vote",
        "Authorities vote for authorities.",
        ("vote", vote, [SECOND], "ok"),
        ("vote", vote, [TRAINER], "untrusted"),
        ("vote", {**vote, "candidate": public(TRAINER)}, [SECOND], "untrusted"),
        ("vote", {**vote, "revision": 1}, [SECOND], "revision-unknown"),
    )
    yield case(
        "contribution",
        "Contributions count from trainers.",
        ("contribution", contribution, [TRAINER], "ok"),
        ("contribution", {**contribution, "peer_id": public(STRANGER)}, [STRANGER], "untrusted"),
        ("contribution", {**contribution, "peer_id": public(STRANGER)}, [TRAINER], "untrusted"),
        ("contribution", {**contribution, "revision": 1}, [TRAINER], "revision-unknown"),
    )
    yield case(
        "contribution-open",
        "An open run takes others too.",
        ("contribution", {**contribution, "peer_id": public(STRANGER)}, [STRANGER], "ok"),
        open_trainers_max=1,
    )
    yield case(
        "receipt",
        "Its coordinator signs it, and nobody but authorities.",
        ("receipt", receipt, [PUBLISHER], "ok"),
        ("receipt", receipt, [PUBLISHER, SECOND], "ok"),
        ("receipt", receipt, [SECOND], "untrusted"),
        ("receipt", receipt, [PUBLISHER, TRAINER], "untrusted"),
        ("receipt", {**receipt, "revision": 1}, [PUBLISHER], "revision-unknown"),
    )
    yield case(
        "stateanchor",
        "An authority states what it holds.",
        ("state_anchor", anchor, [SECOND], "ok"),
        ("state_anchor", anchor, [TRAINER], "untrusted"),
        ("state_anchor", {**anchor, "revision": 1}, [SECOND], "revision-unknown"),
    )
    aggregate = without_run(make_aggregate())
    yield case(
        "aggregate",
        "An authority states what it summed.",
        ("aggregate", aggregate, [SECOND], "ok"),
        ("aggregate", aggregate, [TRAINER], "untrusted"),
        ("aggregate", {**aggregate, "revision": 1}, [SECOND], "revision-unknown"),
    )


def make_mixing_trust():
    sign = reference.sign

    def case(title, comment, *steps, **changes):
        genesis = make_descriptor(**{"authorities": [public(PUBLISHER)], **changes})
        run_id = reference.digest(reference.encode(genesis))
        written = [{"accept": "descriptor", "records": [sign("descriptor", genesis, OWNER).hex()], "now_ms": None}]
        for accept, records, _ in steps:
            signed = [sign(kind, {**record, "run_id": run_id}, key).hex() for kind, record, key in records]
            written.append({"accept": accept, "records": signed, "now_ms": None})
        expected = ["ok", *(code for _, _, code in steps)]
        fields = {"run_id": run_id.hex(), "revision_min": 0, "steps": written, "expected": expected}
        return vector(f"trust-{title}", "trust", fields, comment)

    def roster(code, key=PUBLISHER, **changes):
        vote = make_vote(candidate=public(PUBLISHER))
        return (
            "roster",
            [("vote", vote, PUBLISHER), ("roster", make_roster(members=[public(TRAINER)], **changes), key)],
            code,
        )

    yield case(
        "roster",
        "The coordinator of the proved term says who mixes.",
        roster("ok"),
        roster("untrusted", key=TRAINER),
        roster("term", term=4),
        roster("term", term=2),
        roster("revision-unknown", revision=1),
    )
    crowd = make_roster(members=sorted((public(TRAINER), public(STRANGER))))
    asked = [("vote", make_vote(candidate=public(PUBLISHER)), PUBLISHER), ("roster", crowd, PUBLISHER)]
    yield case("roster-closed", "A closed run mixes with listed trainers.", ("roster", asked, "untrusted"))
    yield case("roster-open", "An open run lets others in.", ("roster", asked, "ok"), open_trainers_max=1)

    genesis = make_descriptor(authorities=[public(PUBLISHER)])
    listed = make_roster(members=sorted((public(TRAINER), public(PUBLISHER), public(STRANGER))))
    listed["run_id"] = reference.digest(reference.encode(genesis))
    whole = reference.digest(reference.encode(listed))

    def share(code, key=TRAINER, **changes):
        record = make_share(**{"peer_id": public(key), "roster": whole, "slice_count": 12, **changes})
        return "share", [("roster", listed, PUBLISHER), ("share", record, key)], code

    yield case(
        "share",
        "Members of the roster share, in its rounds, in the slices that its members make, or in one.",
        share("ok"),
        share("ok", kind="mean", contributors=b"\xe0"),
        share("ok", job=2, kind="hint", slice_index=0, slice_count=1),
        share("ok", job=2, kind="taken", slice_index=0, slice_count=1),
        share("untrusted", key=SECOND),
        share("untrusted", key=STRANGER),
        share("untrusted", peer_id=public(PUBLISHER)),
        share("mismatch", roster=name("other")),
        share("mismatch", round_index=7),
        share("mismatch", round_index=16),
        share("mismatch", slice_count=3),
        share("mismatch", kind="mean", contributors=b"\x10"),
        share("mismatch", kind="mean", contributors=b"\x80\x00"),
        share("revision-unknown", revision=1),
    )

    def probe(code, key=TRAINER, **changes):
        record = make_probe(**{"peer_id": public(key), "roster": whole, "round_index": 8, **changes})
        return "probe", [("roster", listed, PUBLISHER), ("probe", record, key)], code

    yield case(
        "probe",
        "Members of the roster answer, in its rounds, with a score for each tensor of its subset.",
        probe("ok"),
        probe("ok", scores=b""),
        probe("untrusted", key=SECOND),
        probe("untrusted", key=STRANGER),
        probe("untrusted", peer_id=public(PUBLISHER)),
        probe("mismatch", roster=name("other")),
        probe("mismatch", round_index=16),
        probe("mismatch", scores=bytes(8)),
        probe("revision-unknown", revision=1),
    )


def make_rollout_vectors():
    """Arrays of rollout batches."""

    def case(title, comment, expect="ok", **changes):
        signed = reference.sign("rollouts", make_rollouts(**changes), INFERENCER)
        return vector(f"rollouts-{title}", "rollouts", {"signed": signed.hex()}, comment, expect)

    def body(title, comment, expect="ok", **changes):
        return case(title, comment, expect, body=compress(make_body(**changes)))

    yield case("two", "Two samples, two reward parts, logprobs in FP32.")
    half = compress(make_body(form="<e"))
    yield case("half", "Logprobs in FP16.", logprob_bits=16, body=half)
    yield case("no-parts", "A reward alone.", part_names=[], body=compress(make_body(parts=())))
    yield body("empty", "Samples of no tokens.", lengths=((0, 0), (0, 0)), prompts=(), completions=(), logprobs=())
    yield body("above-zero", "Rounding of an engine that sums in BF16.", logprobs=(0.0009765625, -1.0, 0.0))
    raw = make_body()
    shape = "rollouts-shape"
    yield case("no-frame", "Not zstandard.", shape, body=raw)
    yield case("cut", "A frame that ends early.", shape, body=compress(raw)[:-1])
    yield case("trailing", "Bytes after the frame.", shape, body=compress(raw) + b"\0")
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(raw)
    yield case("unsized", "A frame that hides its size.", shape, body=unsized)
    yield case("bomb", "4 MiB and one byte.", shape, body=compress(bytes((4 << 20) + 1)))
    yield case("short", "One byte less than is due.", shape, body=compress(raw[:-1]))
    yield case("long", "One byte more than is due.", shape, body=compress(raw + b"\0"))
    yield case("count", "More samples than there are.", shape, sample_count=3)
    yield case("parts", "More reward parts than there are.", shape, part_names=["a", "b", "c"])
    yield body("length", "A length of 2^32 - 1.", shape, lengths=((2**32 - 1, 1), (1, 2)))
    yield case("metadata", "No object.", "rollouts-metadata", metadata="[1]")
    yield case("metadata-cut", "No JSON.", "rollouts-metadata", metadata="{")
    yield case("metadata-empty", "As an empty object.", metadata="")
    value = "rollouts-value"
    yield body("token", "Above 2^31 - 1.", value, completions=(8, 9, 2**31))
    yield body("reward-infinite", "Infinity.", value, rewards=(math.inf, 0.0))
    yield body("part-nan", "A reward part that is no number.", value, parts=(0.5, 0.25, -1.0, math.nan))
    yield body("logprob-nan", "No number.", value, logprobs=(-0.25, math.nan, 0.0))
    yield body("logprob-above", "Above 0.001.", value, logprobs=(-0.25, 0.002, 0.0))
    yield body("sample-range", "A sample's first above its last.", value, versions=((0, 7, 0, 6), (0, 6, 0, 7)))
    yield body("batch-first", "Newer than the batch says.", value, versions=((0, 7, 0, 7), (0, 7, 0, 7)))
    yield body("batch-last", "Newer than the batch says.", value, versions=((0, 6, 0, 7), (0, 7, 0, 8)))
    wide = compress(make_body(versions=((0, 6, 0, 2**63), (0, 7, 0, 7))))
    yield case("version-wide", "Above 2^63 - 1.", value, body=wide, version_last=[0, 2**63 - 1])


MAKERS = (
    make_canonical,
    make_frames,
    make_records,
    make_rollout_vectors,
    make_chunks,
    make_tokens,
    make_trust,
    make_rounds_trust,
    make_mixing_trust,
)


def make_all():
    """Return {file name: text} of every vector."""
    files = {}
    for maker in MAKERS:
        for made in maker():
            file = f"{made['name']}.json"
            assert file not in files, f"{file} twice"
            files[file] = json.dumps(made, indent=1, ensure_ascii=False) + "\n"
    return files


def main():
    default = Path(__file__).parents[1] / "vectors" / "wire"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    folder.mkdir(parents=True, exist_ok=True)
    files = make_all()
    for stale in folder.glob("*.json"):
        if stale.name not in files:
            stale.unlink()
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    print(f"{len(files)} vectors in {folder}")


if __name__ == "__main__":
    main()
