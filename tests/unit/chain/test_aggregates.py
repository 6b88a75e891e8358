"""What authorities signed of a round's sums: one statement is believed, two are a dispute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.aggregates import Aggregates
from pulsenet.chain.ledger import Ledger
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Aggregate, Member, Receipt, SignedRecord, SliceName
from pulsenet.chain.signing import decode_signed, encode_signed, record_digest
from pulsenet.errors import TrustError
from pulsenet.ids import Digest, compute_digest
from pulsenet.testing.fakes import FakeStore


class Bench:
    """A ledger of a run with two authorities, and a final receipt of three members."""

    def __init__(self, make_run: Callable[..., Any]) -> None:
        self.run = make_run()
        self.authority, self.trainer = self.run.publisher, self.run.trainer
        self.trust = self.run.trust()
        self.ledger = Ledger(self.trust)
        keys = sorted(bytes([n]) * 32 for n in range(3))
        self.receipt = Receipt(
            run_id=self.run.run_id,
            revision=0,
            term=1,
            coordinator=self.authority.peer_id,
            round_index=0,
            base_state_root=compute_digest(b"state"),
            previous=None,
            members=tuple(Member(key, compute_digest(key), 0x3F800000) for key in keys),  # type: ignore[arg-type]
            rejected=(),
        )

    def sign(self, *names: bytes, signer: Any = None, **changes: Any) -> SignedRecord:
        slices = tuple(SliceName(compute_digest(name), 9) for name in names)
        fields = {"revision": 0, "round_index": 0, "outcome": outcome_of(self.receipt), "slices": slices} | changes
        signed: SignedRecord = self.run.sign(Aggregate(run_id=self.run.run_id, **fields), signer or self.authority)
        return signed

    def finish(self) -> None:
        self.ledger.accept_final(self.run.sign(self.receipt, self.authority, self.run.second))


@pytest.fixture
def bench(make_run: Callable[..., Any]) -> Bench:
    return Bench(make_run)


def test_one_statement_is_believed_and_a_second_is_a_dispute(bench: Bench) -> None:
    bench.finish()
    assert bench.ledger.aggregate(0) is None
    assert bench.ledger.aggregate_signer(0) is None
    signed = bench.sign(b"a", b"b", b"c")
    bench.ledger.save()
    assert bench.ledger.accept_aggregate(signed)
    assert bench.ledger.is_changed
    bench.ledger.save()
    assert not bench.ledger.accept_aggregate(signed)
    assert not bench.ledger.is_changed
    assert not bench.ledger.is_disputed(0)
    found = bench.ledger.aggregate(0)
    assert found is not None
    assert [name.blob_id for name in found.slices] == [compute_digest(name) for name in (b"a", b"b", b"c")]
    assert bench.ledger.aggregate_signer(0) == bench.authority.peer_id
    assert bench.ledger.reply_aggregates(0).aggregates == (encode_signed(signed),)
    assert bench.ledger.reply_aggregates(1).aggregates == ()
    assert bench.ledger.accept_aggregate(bench.sign(b"a", b"b", b"d"))
    assert bench.ledger.is_disputed(0)
    assert bench.ledger.aggregate(0) is None
    assert bench.ledger.aggregate_signer(0) is None
    # Two prove it; more add nothing.
    assert not bench.ledger.accept_aggregate(bench.sign(b"a", b"b", b"e"))
    assert len(bench.ledger.reply_aggregates(0).aggregates) == 2


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        ((b"a", b"b"), {}),
        ((b"a", b"b", b"c"), {"outcome": Digest(bytes(32))}),
        ((b"a", b"b", b"c"), {"round_index": 1}),
    ],
)
def test_a_statement_about_another_receipt_is_refused(
    bench: Bench, names: tuple[bytes, ...], changes: dict[str, Any]
) -> None:
    bench.finish()
    with pytest.raises(TrustError, match=r"^mismatch:"):
        bench.ledger.accept_aggregate(bench.sign(*names, **changes))
    assert bench.ledger.aggregate(0) is None


def test_a_statement_counts_from_authorities_about_what_is_final(bench: Bench) -> None:
    with pytest.raises(TrustError, match=r"^mismatch:"):
        bench.ledger.accept_aggregate(bench.sign(b"a", b"b", b"c"))
    bench.finish()
    with pytest.raises(TrustError, match="untrusted"):
        bench.ledger.accept_aggregate(bench.sign(b"a", b"b", b"c", signer=bench.trainer))
    with pytest.raises(TrustError, match="revision-unknown"):
        bench.ledger.accept_aggregate(bench.sign(b"a", b"b", b"c", revision=1))
    signed = bench.sign(b"a", b"b", b"c")
    with pytest.raises(TrustError, match="signature"):
        bench.ledger.accept_aggregate(SignedRecord(signed.type, b"\x80", signed.signers, signed.signatures))


def test_statements_outlive_a_restart_and_go_with_their_round(bench: Bench) -> None:
    bench.finish()
    signed = bench.sign(b"a", b"b", b"c")
    bench.ledger.accept_aggregate(signed)
    store = FakeStore()
    for record in bench.ledger.records():
        store.put_record(record)
    restored = Ledger.restore(bench.trust, bench.ledger.save(), store.record)
    assert restored.aggregate(0) == bench.ledger.aggregate(0)
    for round_index in (4, 8):
        anchor = bench.run.state_anchor(round_index, compute_digest(b"before %d" % round_index))
        restored.accept_anchor(bench.run.sign(anchor, bench.authority))
    gone = restored.forget_old(8)
    assert gone is not None
    assert {compute_digest(name) for name in (b"a", b"b", b"c")} <= set(gone.blob_ids)
    assert record_digest(signed) in gone.record_digests
    assert restored.aggregate(0) is None


def test_of_many_rounds_only_the_older_are_forgotten(bench: Bench) -> None:
    known = Aggregates()
    for round_index in (1, 2, 3):
        signed = bench.sign(b"%d" % round_index, round_index=round_index)
        aggregate = bench.trust.accept_aggregate(decode_signed(encode_signed(signed)))
        assert known.add(aggregate, signed)
    blob_ids, digests = known.forget_before(3)
    assert blob_ids == {compute_digest(b"1"), compute_digest(b"2")}
    assert len(digests) == 2
    assert len(known.digests()) == len(list(known.records())) == 1
