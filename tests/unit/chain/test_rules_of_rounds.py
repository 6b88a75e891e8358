"""What a record of rounds or mixing must satisfy by itself: each bound holds on it and not one beyond."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import (
    Aggregate,
    Contribution,
    Member,
    Probe,
    Receipt,
    ReceiptName,
    Rejection,
    Roster,
    Share,
    ShareKind,
    SliceName,
    StateAnchor,
    Vote,
)
from pulsenet.chain.rules import (
    FP32_INFINITY_BITS,
    FP32_ONE_BITS,
    RAW_SIZE_BYTES_MAX,
    SHARE_ELEMENTS_MAX,
    Signable,
    check_record,
    compute_encoded_size_bytes_max,
)
from pulsenet.errors import RemoteProtocolError
from pulsenet.ids import PeerId, RunId, compute_digest
from pulsenet.wire.schema import INTEGER_MAX

DIGEST = compute_digest(b"x")
RUN_ID = RunId(bytes(32))
A, B, C = (PeerId(letter * 32) for letter in (b"a", b"b", b"c"))
COUNTED = tuple(Member(key, DIGEST, FP32_ONE_BITS) for key in (A, B))
REFUSED = tuple(Rejection(key, DIGEST, "norm") for key in (B, C))

VOTE = Vote(RUN_ID, 0, 1, A, None)
CONTRIBUTION = Contribution(
    run_id=RUN_ID,
    revision=0,
    peer_id=A,
    round_index=0,
    base_state_root=DIGEST,
    blob_id=DIGEST,
    encoded_size_bytes=9,
    entry_count=4,
    element_count=10,
    norm_bits=0,
    codec_id=1,
)
RECEIPT = Receipt(
    run_id=RUN_ID,
    revision=0,
    term=1,
    coordinator=A,
    round_index=0,
    base_state_root=DIGEST,
    previous=None,
    members=COUNTED,
    rejected=REFUSED[1:],
)
AGGREGATE = Aggregate(RUN_ID, 0, 0, DIGEST, (SliceName(DIGEST, 9),))
ANCHOR = StateAnchor(RUN_ID, 0, 0, DIGEST, None, DIGEST, 9)
ROSTER = Roster(
    run_id=RUN_ID,
    revision=0,
    term=1,
    number=0,
    first_round=0,
    round_count=1,
    members=(A, B),
    subset=(),
)
SHARE = Share(
    run_id=RUN_ID,
    revision=0,
    peer_id=A,
    roster=DIGEST,
    round_index=0,
    job=1,
    kind=ShareKind.PART,
    slice_index=0,
    slice_count=2,
    contributors=b"",
    blob_id=DIGEST,
    encoded_size_bytes=9,
    element_count=10,
    norm_bits=0,
    mixed_root=None,
)
PROBE = Probe(RUN_ID, 0, A, DIGEST, 0, DIGEST, DIGEST, b"answer", b"")


def name(term: int) -> ReceiptName:
    return ReceiptName(0, term, DIGEST, DIGEST)


def floats(*bits: int) -> bytes:
    return struct.pack(f"<{len(bits)}I", *bits)


def scaled(bits: int) -> tuple[Member, ...]:
    return (replace(COUNTED[0], scale_bits=bits),)


def sized(record: Contribution | Share, excess: int) -> dict[str, int]:
    return {"encoded_size_bytes": compute_encoded_size_bytes_max(4 * record.element_count) + excess}


SLICE_SIZE_MAX = compute_encoded_size_bytes_max(4 * limits.CONTRIBUTION_ELEMENTS_MAX)

HOLDS: list[tuple[Signable, dict[str, Any]]] = [
    (VOTE, {}),
    (VOTE, {"newest": name(1)}),
    (VOTE, {"term": 5, "newest": name(4)}),
    (CONTRIBUTION, {"entry_count": 10}),
    (CONTRIBUTION, {"entry_count": 0, "element_count": 0}),
    (CONTRIBUTION, {"element_count": limits.CONTRIBUTION_ELEMENTS_MAX}),
    (CONTRIBUTION, {"norm_bits": FP32_INFINITY_BITS - 1}),
    (CONTRIBUTION, sized(CONTRIBUTION, 0)),
    (RECEIPT, {}),
    (RECEIPT, {"round_index": 1, "previous": DIGEST}),
    (RECEIPT, {"members": ()}),
    (RECEIPT, {"rejected": ()}),
    (RECEIPT, {"members": scaled(1)}),
    (AGGREGATE, {"slices": (SliceName(DIGEST, SLICE_SIZE_MAX),) * 2}),
    (ANCHOR, {"encoded_size_bytes": RAW_SIZE_BYTES_MAX}),
    (ANCHOR, {"round_index": 1, "outcome": DIGEST}),
    (ROSTER, {}),
    (ROSTER, {"round_count": limits.ROSTER_ROUNDS_MAX}),
    (ROSTER, {"first_round": INTEGER_MAX - 1}),
    (ROSTER, {"subset": (0, limits.TENSORS_MAX - 1)}),
    (ROSTER, {"probe_round": 0, "distance_bits": 0}),
    (ROSTER, {"probe_round": 3, "distance_bits": FP32_ONE_BITS}),
    (SHARE, {}),
    (SHARE, {"job": 2, "slice_index": 1}),
    (SHARE, {"slice_count": limits.ROSTER_MEMBERS_MAX}),
    (SHARE, {"kind": ShareKind.MEAN, "contributors": b"\x80"}),
    (SHARE, {"kind": ShareKind.HINT, "slice_count": 1}),
    (SHARE, {"kind": ShareKind.TAKEN, "slice_count": 1}),
    (SHARE, {"job": 0, "slice_count": 1}),
    (SHARE, {"element_count": SHARE_ELEMENTS_MAX}),
    (SHARE, {"norm_bits": FP32_INFINITY_BITS - 1}),
    (SHARE, sized(SHARE, 0)),
    (PROBE, {}),
    (PROBE, {"scores": floats(0, FP32_INFINITY_BITS - 1)}),
]

FAILS: list[tuple[Signable, dict[str, Any]]] = [
    (VOTE, {"term": 0}),
    (VOTE, {"newest": name(0)}),
    (VOTE, {"newest": name(2)}),
    (CONTRIBUTION, {"entry_count": 11}),
    (CONTRIBUTION, {"element_count": limits.CONTRIBUTION_ELEMENTS_MAX + 1}),
    (CONTRIBUTION, {"norm_bits": FP32_INFINITY_BITS}),
    (CONTRIBUTION, sized(CONTRIBUTION, 1)),
    (RECEIPT, {"term": 0}),
    (RECEIPT, {"previous": DIGEST}),
    (RECEIPT, {"round_index": 1}),
    (RECEIPT, {"members": COUNTED[::-1]}),
    (RECEIPT, {"members": COUNTED[:1] * 2}),
    (RECEIPT, {"rejected": REFUSED[::-1], "members": COUNTED[:1]}),
    (RECEIPT, {"rejected": REFUSED[:1]}),
    (RECEIPT, {"members": (), "rejected": ()}),
    (RECEIPT, {"members": scaled(0)}),
    (RECEIPT, {"members": scaled(FP32_ONE_BITS + 1)}),
    (AGGREGATE, {"slices": ()}),
    (AGGREGATE, {"slices": (SliceName(DIGEST, 9), SliceName(DIGEST, SLICE_SIZE_MAX + 1))}),
    (ANCHOR, {"encoded_size_bytes": RAW_SIZE_BYTES_MAX + 1}),
    (ANCHOR, {"round_index": 1}),
    (ANCHOR, {"outcome": DIGEST}),
    (ROSTER, {"term": 0}),
    (ROSTER, {"round_count": 0}),
    (ROSTER, {"round_count": limits.ROSTER_ROUNDS_MAX + 1}),
    (ROSTER, {"first_round": INTEGER_MAX}),
    (ROSTER, {"members": ()}),
    (ROSTER, {"members": (B, A)}),
    (ROSTER, {"members": (A, A)}),
    (ROSTER, {"subset": (1, 1)}),
    (ROSTER, {"subset": (0, limits.TENSORS_MAX)}),
    (ROSTER, {"probe_round": 0}),
    (ROSTER, {"distance_bits": 0}),
    (ROSTER, {"probe_round": 0, "distance_bits": FP32_ONE_BITS + 1}),
    (SHARE, {"job": 3}),
    (SHARE, {"slice_index": 2}),
    (SHARE, {"slice_count": limits.ROSTER_MEMBERS_MAX + 1}),
    (SHARE, {"kind": ShareKind.MEAN}),
    (SHARE, {"contributors": b"\x80"}),
    (SHARE, {"kind": ShareKind.HINT}),
    (SHARE, {"kind": ShareKind.TAKEN}),
    (SHARE, {"job": 0}),
    (SHARE, {"job": 0, "slice_count": 1, "kind": ShareKind.MEAN, "contributors": b"\x80"}),
    (SHARE, {"element_count": SHARE_ELEMENTS_MAX + 1}),
    (SHARE, {"norm_bits": FP32_INFINITY_BITS}),
    (SHARE, sized(SHARE, 1)),
    (PROBE, {"answer": b""}),
    (PROBE, {"scores": bytes(5)}),
    (PROBE, {"scores": floats(0, FP32_INFINITY_BITS)}),
]


@pytest.mark.parametrize(("record", "changes"), HOLDS)
def test_a_record_on_the_bound_is_read(record: Any, changes: dict[str, Any]) -> None:
    check_record(replace(record, **changes))


@pytest.mark.parametrize(("record", "changes"), FAILS)
def test_a_record_beyond_the_bound_is_refused(record: Any, changes: dict[str, Any]) -> None:
    check_record(record)
    with pytest.raises(RemoteProtocolError) as caught:
        check_record(replace(record, **changes))
    assert caught.value.code == "schema"


def test_every_score_of_a_probe_is_looked_at() -> None:
    for scores in ((FP32_INFINITY_BITS, 0), (0, FP32_INFINITY_BITS, 0)):
        with pytest.raises(RemoteProtocolError, match="score"):
            check_record(replace(PROBE, scores=floats(*scores)))


def test_the_bounds_are_what_the_spec_says() -> None:
    assert SHARE_ELEMENTS_MAX == 2 * limits.CONTRIBUTION_ELEMENTS_MAX == 1 << 37
    assert RAW_SIZE_BYTES_MAX == 1 << 40
    assert struct.pack("<f", 1.0) == floats(FP32_ONE_BITS)
    assert struct.pack("<f", float("inf")) == floats(FP32_INFINITY_BITS)
