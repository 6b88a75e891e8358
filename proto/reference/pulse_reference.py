"""Slow, plain reference of proto/SPEC.md version 1: encoding, frames, records, chunk lists, tokens, trust.

It imports nothing from pulsenet and follows the text of the specification, not the code. Values are plain
Python: a record is a dict, a version a list [epoch, number], None is nil. ``Refused.code`` is the error code.
"""

import base64
import json
import math
import operator
import struct

import msgpack
import zstandard
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

CHUNK_MAX = 1 << 20
FRAME_MAX = CHUNK_MAX + 4096
RECORD_MAX = 256 << 10
ROLLOUTS_MAX = 1 << 20
BODY_MAX = 4 << 20
LIST_ENTRIES_MAX = 1 << 20
ITEMS_MAX = 65_536
DEPTH_MAX = 8
TENSORS_MAX = 65_536
VALIDITY_MS = 300_000
EVIDENCE_MAX = 128


class Refused(Exception):
    def __init__(self, code, detail=""):
        super().__init__(code, detail)
        self.code = code


def require(condition, code, detail=""):
    if not condition:
        raise Refused(code, detail)


def digest(data):
    return blake3(data).digest()


# Section 2: canonical msgpack. A text is canonical if writing what was read gives the same bytes.


def sort_maps(value):
    if isinstance(value, dict):
        return {key: sort_maps(value[key]) for key in sorted(value, key=lambda key: key.encode())}
    if isinstance(value, list):
        return [sort_maps(item) for item in value]
    return value


def encode(value):
    return msgpack.packb(sort_maps(value), use_bin_type=True)


def check_plain(value, depth=1):
    if isinstance(value, (dict, list)):
        require(depth <= DEPTH_MAX, "decode", "too deep")
        require(len(value) <= ITEMS_MAX, "decode", "too many items")
        items = value.values() if isinstance(value, dict) else value
        require(not isinstance(value, dict) or all(isinstance(key, str) for key in value), "decode", "map key")
        for item in items:
            check_plain(item, depth + 1)
    else:
        require(value is None or isinstance(value, (bool, int, str, bytes)), "decode", "float or extension")


def decode(data):
    def pairs(items):
        require(len({key for key, _ in items if isinstance(key, str)}) == len(items), "decode", "map keys")
        return dict(items)

    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=False, object_pairs_hook=pairs)
    except Refused:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, OverflowError, RecursionError) as error:
        raise Refused("decode", repr(error)) from error
    check_plain(value)
    require(encode(value) == bytes(data), "decode", "not the canonical form")
    return value


# The schema language. "u" integer, "?" boolean, "s8" text, "b8" bytes, "=32" exact bytes, "v" version, "kind",
# "share-kind"; ("opt", x), ("list", max, x), ("tuple", x, y), or a dict of fields, of which
# ("later", default, x) may be missing.

ADDRESSES = ("list", 16, "s256")
RECORD = f"b{RECORD_MAX}"
VOTES = ("list", 64, "b2048")
MESSAGES = {
    1: {
        "run_id": "=32",
        "wire_version_min": "u",
        "wire_version_max": "u",
        "role": "s16",
        "software": "s64",
        "features": ("later", [], ("list", 16, "s32")),
    },
    2: {},
    3: {"head": ("opt", RECORD)},
    4: {"digests": ("list", 64, "=32")},
    5: {"records": ("list", 64, RECORD)},
    6: {"revision_min": "u"},
    7: {"epoch_min": "u"},
    8: {"blob_id": "=32", "offset": "u"},
    9: {"blob_id": "=32", "total_size_bytes": "u", "data": f"b{CHUNK_MAX}"},
    10: {"digests": ("list", 4, "=32"), "blob_id": ("later", None, ("opt", "=32"))},
    11: {"digest": "=32", "data": ("opt", f"b{CHUNK_MAX}")},
    12: {},
    13: {"head": RECORD},
    14: {"first": RECORD, "second": RECORD},
    15: {"batch": f"b{ROLLOUTS_MAX}"},
    16: {"accepted": "?", "reason": "s64"},
    17: {"have": RECORD},
    18: {"have": ("opt", RECORD), "neighbours": ("list", 12, {"peer_id": "=32", "addresses": ADDRESSES})},
    19: {"code": "s64", "detail": "s512", "retry_after_ms": "u"},
    20: {"vote": "b2048"},
    21: {"votes": VOTES},
    22: {"contribution": RECORD},
    23: {"receipt": RECORD, "votes": VOTES},
    24: {"round_index": "u"},
    25: {
        "round_index": "u",
        "votes": VOTES,
        "receipts": ("list", 64, RECORD),
        "state_anchor": ("opt", RECORD),
    },
    26: {"round_index": "u"},
    27: {"aggregates": ("list", 64, RECORD)},
    28: {"count_max": "u"},
    29: {"tasks": ("list", 64, {"task_id": "=16", "content": "s65536", "lease_ms": "u"})},
    30: {"blob_id": "=32"},
    31: {"blob_id": "=32", "held": "b131072", "given": "b131072"},
    32: {"round_index": ("opt", "u")},
    33: {"votes": VOTES, "rosters": ("list", 3, RECORD)},
    34: {"share": "b2048"},
    35: {"round_index": ("opt", "u"), "job": "u", "slice_index": "u"},
    36: {
        "round_index": ("opt", "u"),
        "known_from": "u",
        "is_open": "?",
        "shares": ("list", 256, "b2048"),
    },
    37: {"probe": RECORD},
}
KEYS = ("list", 1024, "=32")
ENTRY = {
    "kind": "kind",
    "base_version": ("opt", "v"),
    "version": "v",
    "root": "=32",
    "manifest_digest": "=32",
    "encoded_size_bytes": "u",
}
RECORDS = {
    "descriptor": {
        "name": "s128",
        "nonce": "=16",
        "revision": "u",
        "previous": ("opt", "=32"),
        "owners": KEYS,
        "owner_threshold": "u",
        "authorities": KEYS,
        "trainers": KEYS,
        "inferencers": KEYS,
        "open_trainers_max": "u",
        "open_inferencers_max": "u",
        "private": "?",
        "table_digest": ("opt", "=32"),
        "base_root": ("opt", "=32"),
        "base_blob_id": ("opt", "=32"),
        "algorithm": "s128",
        "constants": ("list", 64, ("tuple", "s128", "u")),
        "publish_interval_min_ms": "u",
        "anchor_interval": "u",
        "wire_version_min": "u",
        "wire_version_max": "u",
    },
    "epoch": {
        "run_id": "=32",
        "revision": "u",
        "epoch": "u",
        "kept_version": ("opt", "v"),
        "kept_root": ("opt", "=32"),
        "first_number": "u",
        "reason": "s128",
    },
    "manifest": {
        "run_id": "=32",
        "revision": "u",
        "term": "u",
        "kind": "kind",
        "base_version": ("opt", "v"),
        "version": "v",
        "base_root": ("opt", "=32"),
        "root": "=32",
        "table_digest": "=32",
        "blob_id": "=32",
        "raw_size_bytes": "u",
        "encoded_size_bytes": "u",
        "changed_count": "u",
        "element_count": "u",
        "codec_id": "u",
        "trainer_step": "u",
        "consensus": ("later", True, "?"),
        "previous": ("opt", "=32"),
    },
    "catalogue": {"run_id": "=32", "epoch": "u", "entries": ("list", 1024, ENTRY)},
    "head": {
        "run_id": "=32",
        "revision": "u",
        "term": "u",
        "version": "v",
        "root": "=32",
        "manifest_digest": "=32",
        "catalogue_digest": "=32",
        "epoch_digest": ("opt", "=32"),
        "issued_at_ms": "u",
        "valid_until_ms": "u",
    },
    "have": {
        "run_id": "=32",
        "role": "s16",
        "epoch": "u",
        "version_first": "u",
        "version_last": "u",
        "anchors": ("list", 16, "u"),
        "addresses": ADDRESSES,
        "issued_at_ms": "u",
    },
    "rollouts": {
        "run_id": "=32",
        "sequence": "u",
        "version_first": "v",
        "version_last": "v",
        "sample_count": "u",
        "part_names": ("list", 16, "s64"),
        "logprob_bits": "u",
        "trainer": ("opt", "=32"),
        "task_ids": ("list", 256, "=16"),
        "body": f"b{ROLLOUTS_MAX}",
        "metadata": "s65536",
    },
    "vote": {
        "run_id": "=32",
        "revision": "u",
        "term": "u",
        "candidate": "=32",
        "newest": ("opt", {"round_index": "u", "term": "u", "outcome": "=32", "digest": "=32"}),
    },
    "contribution": {
        "run_id": "=32",
        "revision": "u",
        "peer_id": "=32",
        "round_index": "u",
        "base_state_root": "=32",
        "blob_id": "=32",
        "encoded_size_bytes": "u",
        "entry_count": "u",
        "element_count": "u",
        "norm_bits": "u",
        "codec_id": "u",
    },
    "receipt": {
        "run_id": "=32",
        "revision": "u",
        "term": "u",
        "coordinator": "=32",
        "round_index": "u",
        "base_state_root": "=32",
        "previous": ("opt", "=32"),
        "members": ("list", 1024, {"peer_id": "=32", "contribution_digest": "=32", "scale_bits": "u"}),
        "rejected": ("list", 1024, {"peer_id": "=32", "contribution_digest": "=32", "reason": "s128"}),
    },
    "aggregate": {
        "run_id": "=32",
        "revision": "u",
        "round_index": "u",
        "outcome": "=32",
        "slices": ("list", 1024, {"blob_id": "=32", "encoded_size_bytes": "u"}),
    },
    "stateanchor": {
        "run_id": "=32",
        "revision": "u",
        "round_index": "u",
        "state_root": "=32",
        "outcome": ("opt", "=32"),
        "blob_id": "=32",
        "encoded_size_bytes": "u",
    },
    "roster": {
        "run_id": "=32",
        "revision": "u",
        "term": "u",
        "number": "u",
        "first_round": "u",
        "round_count": "u",
        "members": KEYS,
        "subset": ("list", 65_536, "u"),
        "probe_round": ("later", None, ("opt", "u")),
        "distance_bits": ("later", None, ("opt", "u")),
    },
    "probe": {
        "run_id": "=32",
        "revision": "u",
        "peer_id": "=32",
        "roster": "=32",
        "round_index": "u",
        "batch": "=32",
        "bins": "=32",
        "answer": "b163840",
        "scores": "b65536",
    },
    "share": {
        "run_id": "=32",
        "revision": "u",
        "peer_id": "=32",
        "roster": "=32",
        "round_index": "u",
        "job": "u",
        "kind": "share-kind",
        "slice_index": "u",
        "slice_count": "u",
        "contributors": "b128",
        "blob_id": "=32",
        "encoded_size_bytes": "u",
        "element_count": "u",
        "norm_bits": "u",
        "mixed_root": ("opt", "=32"),
    },
}
SIGNED = {
    "type": "s16",
    "payload": f"b{ROLLOUTS_MAX}",
    "signers": ("list", 64, "=32"),
    "signatures": ("list", 64, "=64"),
}
TOKEN = {
    "run_id": "=32",
    "revision_min": "u",
    "bootstraps": ADDRESSES,
    "secret": "b32",
    "expires_at_ms": ("opt", "u"),
}


def take(schema, value):
    """Return ``value`` without unknown fields, or refuse it."""
    if isinstance(schema, dict):
        require(isinstance(value, dict), "schema", "map due")
        value = {name: part[1] for name, part in schema.items() if part[0] == "later"} | value
        require(set(schema) <= set(value), "schema", "field missing")
        return {name: take(part, value[name]) for name, part in schema.items()}
    if schema[0] == "later":
        return take(schema[2], value)
    if isinstance(schema, tuple) and schema[0] == "opt":
        return None if value is None else take(schema[1], value)
    if isinstance(schema, tuple) and schema[0] == "list":
        require(isinstance(value, list) and len(value) <= schema[1], "schema", "array due")
        return [take(schema[2], item) for item in value]
    if isinstance(schema, tuple) or schema == "v":
        parts = ("u", "u") if schema == "v" else schema[1:]
        require(isinstance(value, list) and len(value) == len(parts), "schema", "array of fixed length due")
        return [take(part, item) for part, item in zip(parts, value, strict=True)]
    if schema == "?":
        require(isinstance(value, bool), "schema", "boolean due")
    elif schema == "u":
        require(type(value) is int and 0 <= value < 1 << 63, "schema", "integer due")
    elif schema == "kind":
        require(value in ("patch", "skip", "anchor"), "schema", "kind due")
    elif schema == "share-kind":
        require(value in ("part", "hint", "mean", "taken"), "schema", "kind of a share due")
    elif schema[0] == "s":
        require(isinstance(value, str) and len(value.encode()) <= int(schema[1:]), "schema", "text due")
    else:
        require(isinstance(value, bytes), "schema", "bytes due")
        size = int(schema[1:])
        require(len(value) == size if schema[0] == "=" else len(value) <= size, "schema", "size")
    return value


# Section 3: frames.


def encode_frame(number, fields):
    body = bytes([number]) + encode(fields)
    return struct.pack("<I", len(body)) + body


def decode_frames(stream):
    messages = []
    while stream:
        require(len(stream) >= 4, "framing", "cut")
        (length,) = struct.unpack("<I", stream[:4])
        require(1 <= length <= FRAME_MAX, "framing", "length")
        require(len(stream) >= 4 + length, "framing", "cut")
        number, body, stream = stream[4], stream[5 : 4 + length], stream[4 + length :]
        require(number in MESSAGES, "message-unknown")
        messages.append((number, take(MESSAGES[number], decode(body))))
    return messages


# Section 4: records.


def record_max(record_type):
    return ROLLOUTS_MAX if record_type == "rollouts" else RECORD_MAX


def signed_bytes(record_type, payload):
    return b"pulsenet-v1\0" + record_type.encode() + b"\0" + payload


def sign(record_type, fields, *keys):
    """Sign with Ed25519 private keys; return the signed record's bytes."""
    payload = fields if isinstance(fields, bytes) else encode(fields)
    pairs = sorted((key.public_key().public_bytes_raw(), key.sign(signed_bytes(record_type, payload))) for key in keys)
    return encode(
        {
            "type": record_type,
            "payload": payload,
            "signers": [public for public, _ in pairs],
            "signatures": [signature for _, signature in pairs],
        }
    )


def decode_signed(data):
    require(len(data) <= ROLLOUTS_MAX, "schema", "size")
    signed = take(SIGNED, decode(data))
    require(signed["type"] and all("a" <= letter <= "z" for letter in signed["type"]), "schema", "type")
    require(len(data) <= record_max(signed["type"]), "schema", "size")
    signers = signed["signers"]
    require(signers and len(signers) == len(signed["signatures"]), "schema", "signatures")
    require(signers == sorted(set(signers)), "schema", "signers")
    require(len(signers) == 1 or signed["type"] in ("descriptor", "epoch", "receipt"), "schema", "several signers")
    return signed


def verify(public, message, signature):
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def open_record(record_type, signed, run_id, signers=None):
    require(signed["type"] == record_type, "wrong-type")
    require(signers is None or set(signed["signers"]) <= set(signers), "untrusted")
    message = signed_bytes(record_type, signed["payload"])
    for public, signature in zip(signed["signers"], signed["signatures"], strict=True):
        require(verify(public, message, signature), "signature")
    record = take(RECORDS[record_type], decode(signed["payload"]))
    RULES[record_type](record)
    if record_type != "descriptor":
        require(record["run_id"] == run_id, "wrong-run")
    elif record["revision"] == 0:
        require(digest(signed["payload"]) == run_id, "wrong-run")
    return record


def ascends(items):
    return items == sorted(items) and len({repr(item) for item in items}) == len(items)


def rule_descriptor(record):
    ok = (record["revision"] == 0) == (record["previous"] is None)
    ok &= all(ascends(record[role]) for role in ("owners", "authorities", "trainers", "inferencers"))
    ok &= 1 <= record["owner_threshold"] <= min(64, len(record["owners"]))
    ok &= len(record["authorities"]) > 0
    ok &= len({record[name] is None for name in ("table_digest", "base_root", "base_blob_id")}) == 1
    ok &= ascends([name.encode() for name, _ in record["constants"]])
    ok &= record["anchor_interval"] >= 1 and 1 <= record["wire_version_min"] <= record["wire_version_max"]
    require(ok, "schema", "descriptor rule")


def rule_epoch(record):
    kept = record["kept_version"]
    ok = record["epoch"] >= 1 and record["first_number"] >= 1 and (kept is None) == (record["kept_root"] is None)
    ok &= kept is None or (kept[0] < record["epoch"] and kept[1] < record["first_number"])
    require(ok, "schema", "epoch rule")


def rule_step(kind, base, version):
    ok = version[1] >= 1 and (kind == "anchor") == (base is None)
    if ok and base is not None:
        if base[0] == version[0]:
            ok = version[1] - base[1] == 1 if kind == "patch" else version[1] - base[1] >= 2
        else:
            ok = kind == "patch" and base[0] < version[0] and base[1] < version[1]
    require(ok, "schema", "step rule")


def rule_manifest(record):
    rule_step(record["kind"], record["base_version"], record["version"])
    raw, changed, elements = record["raw_size_bytes"], record["changed_count"], record["element_count"]
    ok = (record["base_version"] is None) == (record["base_root"] is None)
    ok &= raw <= LIST_ENTRIES_MAX * CHUNK_MAX and changed <= elements <= raw
    ok &= record["kind"] != "anchor" or changed == elements
    ok &= record["encoded_size_bytes"] <= (raw * 101 + 99) // 100 + 64 * TENSORS_MAX + 1024
    require(ok, "schema", "manifest rule")


def entry_key(entry):
    return (entry["version"], entry["kind"], entry["base_version"] or [0, 0])


def rule_catalogue(record):
    roots = {}
    require(ascends([entry_key(entry) for entry in record["entries"]]), "schema", "order")
    for entry in record["entries"]:
        rule_step(entry["kind"], entry["base_version"], entry["version"])
        require(entry["version"][0] <= record["epoch"], "schema", "epoch")
        require(roots.setdefault(tuple(entry["version"]), entry["root"]) == entry["root"], "schema", "two roots")


def rule_head(record):
    ok = record["version"][1] >= 1 and (record["version"][0] == 0) == (record["epoch_digest"] is None)
    ok &= 0 < record["valid_until_ms"] - record["issued_at_ms"] <= VALIDITY_MS
    require(ok, "schema", "head rule")


def rule_have(record):
    require(record["version_first"] <= record["version_last"] and ascends(record["anchors"]), "schema", "have rule")


def rule_rollouts(record):
    ok = record["version_first"] <= record["version_last"] and 1 <= record["sample_count"] <= 4096
    ok &= record["logprob_bits"] in (16, 32) and len(set(record["part_names"])) == len(record["part_names"])
    tasks = record["task_ids"]
    ok &= (record["trainer"] is None) == (not tasks) and len(set(tasks)) == len(tasks)
    require(ok, "schema", "rollouts rule")


def rule_vote(record):
    newest = record["newest"]
    ok = record["term"] >= 1 and (newest is None or 1 <= newest["term"] <= record["term"])
    require(ok, "schema", "vote rule")


def rule_contribution(record):
    elements = record["element_count"]
    ok = record["entry_count"] <= elements <= 1 << 36
    ok &= record["norm_bits"] < 0x7F800000
    ok &= record["encoded_size_bytes"] <= (4 * elements * 101 + 99) // 100 + 64 * TENSORS_MAX + 1024
    require(ok, "schema", "contribution rule")


def rule_receipt(record):
    members = [member["peer_id"] for member in record["members"]]
    rejected = [rejection["peer_id"] for rejection in record["rejected"]]
    ok = record["term"] >= 1 and (record["round_index"] == 0) == (record["previous"] is None)
    ok &= ascends(members) and ascends(rejected) and not set(members) & set(rejected)
    ok &= bool(members or rejected)
    ok &= all(0 < member["scale_bits"] <= 0x3F800000 for member in record["members"])
    require(ok, "schema", "receipt rule")


def rule_aggregate(record):
    largest = (4 * (1 << 36) * 101 + 99) // 100 + 64 * TENSORS_MAX + 1024
    ok = len(record["slices"]) > 0 and all(name["encoded_size_bytes"] <= largest for name in record["slices"])
    require(ok, "schema", "aggregate rule")


def rule_stateanchor(record):
    ok = (record["round_index"] == 0) == (record["outcome"] is None)
    ok &= record["encoded_size_bytes"] <= LIST_ENTRIES_MAX * CHUNK_MAX
    require(ok, "schema", "stateanchor rule")


def rule_roster(record):
    ok = record["term"] >= 1 and 1 <= record["round_count"] <= 1024
    ok &= record["first_round"] + record["round_count"] < 1 << 63
    ok &= len(record["members"]) > 0 and ascends(record["members"])
    ok &= ascends(record["subset"]) and all(index < TENSORS_MAX for index in record["subset"])
    ok &= (record["probe_round"] is None) == (record["distance_bits"] is None)
    ok &= (record["distance_bits"] or 0) <= 0x3F800000
    require(ok, "schema", "roster rule")


def rule_probe(record):
    scores = record["scores"]
    ok = len(record["answer"]) > 0 and len(scores) % 4 == 0
    ok &= all(int.from_bytes(scores[at : at + 4], "little") < 0x7F800000 for at in range(0, len(scores), 4))
    require(ok, "schema", "probe rule")


def rule_share(record):
    is_mean, is_single = record["kind"] == "mean", record["slice_count"] == 1
    ok = record["job"] <= 2 and record["slice_index"] < record["slice_count"] <= 1024
    ok &= is_mean == (len(record["contributors"]) > 0) and (is_single or record["kind"] not in ("hint", "taken"))
    ok &= record["job"] > 0 or (record["kind"] == "part" and is_single)
    ok &= record["element_count"] <= 1 << 37 and record["norm_bits"] < 0x7F800000
    largest = (4 * record["element_count"] * 101 + 99) // 100 + 64 * TENSORS_MAX + 1024
    require(ok and record["encoded_size_bytes"] <= largest, "schema", "share rule")


def outcome_of(receipt):
    """The digest of what a receipt says, whoever proposed it in whichever term."""
    return digest(encode({**receipt, "term": 0, "coordinator": bytes(32), "revision": 0}))


RULES = {
    "vote": rule_vote,
    "contribution": rule_contribution,
    "receipt": rule_receipt,
    "aggregate": rule_aggregate,
    "stateanchor": rule_stateanchor,
    "roster": rule_roster,
    "share": rule_share,
    "probe": rule_probe,
    "descriptor": rule_descriptor,
    "epoch": rule_epoch,
    "manifest": rule_manifest,
    "catalogue": rule_catalogue,
    "head": rule_head,
    "have": rule_have,
    "rollouts": rule_rollouts,
}


# Section 4.7: the arrays of a rollout batch.


def read_planes(raw, width, count):
    """Take ``count`` little-endian items of ``width`` bytes off ``raw``; return them and the rest."""
    require(len(raw) >= width * count, "rollouts-shape")
    planes = [raw[plane * count : (plane + 1) * count] for plane in range(width)]
    items = [bytes(plane[place] for plane in planes) for place in range(count)]
    return items, raw[width * count :]


def write_planes(items):
    """Undo ``read_planes``: all first bytes, then all second bytes, and so on."""
    return b"".join(bytes(item[plane] for item in items) for plane in range(len(items[0]) if items else 0))


def read_rollouts(batch):
    """Return the samples of a batch, each with integers for tokens and bits for reals."""
    count, real = batch["sample_count"], batch["logprob_bits"] // 8
    try:
        metadata = json.loads(batch["metadata"] or "{}")
    except (ValueError, RecursionError):
        raise Refused("rollouts-metadata", "no JSON") from None
    require(isinstance(metadata, dict), "rollouts-metadata", "no object")
    try:
        frame = zstandard.get_frame_parameters(batch["body"])
        require(1 <= frame.content_size <= BODY_MAX, "rollouts-shape", "body size")
        require(frame.dict_id == 0 and frame.window_size <= 1 << 23, "rollouts-shape", "window")
        raw = zstandard.ZstdDecompressor().decompress(batch["body"], read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError:
        raise Refused("rollouts-shape", "no frame") from None
    versions, raw = read_planes(raw, 8, 4 * count)
    numbers = [int.from_bytes(item, "little") for item in versions]
    firsts = list(zip(numbers[:count], numbers[count : 2 * count], strict=True))
    lasts = list(zip(numbers[2 * count : 3 * count], numbers[3 * count :], strict=True))
    lengths = []
    for _ in range(2):
        items, raw = read_planes(raw, 4, count)
        lengths.append([int.from_bytes(item, "little") for item in items])
    prompts, raw = read_planes(raw, 4, sum(lengths[0]))
    completions, raw = read_planes(raw, 4, sum(lengths[1]))
    logprobs, raw = read_planes(raw, real, sum(lengths[1]))
    rewards, raw = read_planes(raw, 4, count)
    every, raw = read_planes(raw, 4, count * len(batch["part_names"]))
    parts = [every[start : start + count] for start in range(0, len(every), count)]
    require(not raw, "rollouts-shape", "more bytes than are due")
    check_rollout_values(batch, firsts, lasts, prompts + completions, logprobs, rewards + every)
    samples = []
    for place in range(count):
        ends = lengths[0][place], lengths[1][place]
        prompt, prompts = prompts[: ends[0]], prompts[ends[0] :]
        completion, completions = completions[: ends[1]], completions[ends[1] :]
        probabilities, logprobs = logprobs[: ends[1]], logprobs[ends[1] :]
        samples.append(
            {
                "version_first": list(firsts[place]),
                "version_last": list(lasts[place]),
                "prompt": [int.from_bytes(token, "little") for token in prompt],
                "completion": [int.from_bytes(token, "little") for token in completion],
                "logprobs": [int.from_bytes(bits, "little") for bits in probabilities],
                "reward": int.from_bytes(rewards[place], "little"),
                "reward_parts": [int.from_bytes(part[place], "little") for part in parts],
            }
        )
    return samples


def check_rollout_values(batch, firsts, lasts, tokens, logprobs, rewards):
    form = "<e" if batch["logprob_bits"] == 16 else "<f"
    require(all(token[3] < 128 for token in tokens), "rollouts-value", "token")
    require(all(math.isfinite(struct.unpack("<f", bits)[0]) for bits in rewards), "rollouts-value", "reward")
    require(all(struct.unpack(form, bits)[0] <= 0.001 for bits in logprobs), "rollouts-value", "logprob")
    require(all(number < 1 << 63 for version in firsts + lasts for number in version), "rollouts-value", "version")
    require(all(map(operator.le, firsts, lasts)), "rollouts-value", "versions of a sample")
    named = [tuple(batch["version_first"]), tuple(batch["version_last"])]
    require([min(firsts), max(lasts)] == named, "rollouts-value", "versions of the batch")


# Section 5: chunk lists.


def cut(segments, size):
    """Cut a blob given as segments, each starting a new chunk; return the chunks."""
    return [part[start : start + size] for part in segments for start in range(0, len(part), size)]


def encode_chunk_list(entries):
    header = b"PNCHUNK1" + struct.pack("<IIQ", len(entries), 0, sum(size for size, _ in entries))
    return header + b"".join(struct.pack("<I", size) + name for size, name in entries)


def decode_chunk_list(data):
    require(len(data) >= 24, "chunk-list")
    magic, count, zero, total = struct.unpack("<8sIIQ", data[:24])
    require(magic == b"PNCHUNK1" and zero == 0 and count <= LIST_ENTRIES_MAX, "chunk-list")
    require(len(data) == 24 + 36 * count, "chunk-list")
    entries = []
    for start in range(24, len(data), 36):
        entries.append([struct.unpack("<I", data[start : start + 4])[0], data[start + 4 : start + 36]])
    sizes = {}
    for size, name in entries:
        require(1 <= size <= CHUNK_MAX and sizes.setdefault(name, size) == size, "chunk-list")
    require(sum(size for size, _ in entries) == total, "chunk-list")
    return entries


# Section 7: join tokens.


def encode_token(fields):
    data = encode(fields)
    return "pulse1" + base64.b32encode(data + digest(data)[:4]).decode().rstrip("=").lower()


def decode_token(text):
    word = "".join(text.split()).lower()
    require(len(text) <= 2 * (16 * 256 + 1024) and word.startswith("pulse1"), "token")
    letters = word[6:].upper()
    try:
        data = base64.b32decode(letters + "=" * (-len(letters) % 8))
    except ValueError as error:
        raise Refused("token") from error
    require(base64.b32encode(data).decode().rstrip("=") == letters, "token")
    require(digest(data[:-4])[:4] == data[-4:], "token")
    return take(TOKEN, decode(data[:-4]))
