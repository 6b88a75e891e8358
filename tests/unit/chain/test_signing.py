"""Signing records and opening them again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from pulsenet import limits
from pulsenet.chain.records import Descriptor, EpochRecord, Head, Manifest, RolloutBatch, SignedRecord
from pulsenet.chain.signing import (
    add_signature,
    decode_signed,
    encode_signed,
    keep_signatures,
    open_record,
    payload_size_bytes_max,
    record_digest,
    seal,
    signed_bytes,
)
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, TrustError
from pulsenet.ids import Version, compute_digest
from pulsenet.wire.schema import encode_value


def code_of(run: Any, cls: Any, signed: SignedRecord, verify: Any, **arguments: Any) -> str:
    with pytest.raises((TrustError, RemoteProtocolError)) as caught:
        open_record(cls, signed, verify, run_id=run.run_id, **arguments)
    return caught.value.code


def test_a_sealed_record_opens(run: Any, real_verify: Any) -> None:
    manifest = run.manifest(2)
    signed = decode_signed(encode_signed(seal(manifest, run.publisher.sign, run.publisher.peer_id)))
    assert open_record(Manifest, signed, real_verify, run_id=run.run_id) == manifest
    assert record_digest(signed) == compute_digest(encode_value(manifest))
    assert signed_bytes("head", b"x") == b"pulsenet-v1\0head\0x"


def test_signatures_cover_the_type_a_auth_6(run: Any, real_verify: Any) -> None:
    signed = run.signed_head(1)
    assert code_of(run, Manifest, signed, real_verify) == "wrong-type"
    assert code_of(run, Manifest, replace(signed, type="manifest"), real_verify) == "signature"


def test_every_listed_signature_must_hold(run: Any, real_verify: Any) -> None:
    signed = run.sign(run.epoch(1, 9), run.owner, run.publisher)
    assert signed.signers == tuple(sorted(signed.signers))
    assert decode_signed(encode_signed(signed)) == signed
    open_record(EpochRecord, signed, real_verify, run_id=run.run_id)
    broken = replace(signed, signatures=(signed.signatures[1], signed.signatures[0]))
    assert code_of(run, EpochRecord, broken, real_verify) == "signature"
    assert code_of(run, EpochRecord, replace(signed, signatures=()), real_verify) == "signature"
    assert code_of(run, EpochRecord, replace(signed, signatures=(), signers=()), real_verify) == "signature"


def test_strangers_are_refused_before_any_signature_is_verified(run: Any) -> None:
    def never(*_: Any) -> bool:
        raise AssertionError("verified")

    assert code_of(run, Head, run.signed_head(1), never, signers=(run.owner.peer_id,)) == "untrusted"


def test_another_signature_of_one_key_replaces_the_first(run: Any) -> None:
    signed = run.sign(run.epoch(1, 9), run.owner)
    assert add_signature(signed, run.owner.sign, run.owner.peer_id) == signed
    with pytest.raises(LocalProtocolError, match="one signer"):
        add_signature(run.signed_head(1), run.second.sign, run.second.peer_id)


def test_signatures_of_other_keys_are_left_out(run: Any, real_verify: Any) -> None:
    both = run.sign(run.epoch(1, 9), run.owner, run.publisher)
    alone = keep_signatures(both, {run.publisher.peer_id, run.second.peer_id})
    assert alone == run.sign(run.epoch(1, 9), run.publisher)
    assert open_record(EpochRecord, alone, real_verify, run_id=run.run_id) == run.epoch(1, 9)
    assert keep_signatures(both, ()).signers == ()


def test_a_record_that_breaks_its_rules_is_neither_sealed_nor_opened(run: Any, real_verify: Any) -> None:
    broken = replace(run.manifest(2), base_root=None)
    with pytest.raises(LocalProtocolError, match="base version"):
        run.sign(broken, run.publisher)
    payload = encode_value(broken)
    message = signed_bytes("manifest", payload)
    signed = SignedRecord("manifest", payload, (run.publisher.peer_id,), (run.publisher.sign(message),))
    assert code_of(run, Manifest, signed, real_verify) == "schema"


def test_an_unknown_field_stays_covered_by_the_signature(run: Any, real_verify: Any) -> None:
    fields = msgpack.unpackb(encode_value(run.head(1))) | {"later": [1, {"a": None}]}
    payload = msgpack.packb(dict(sorted(fields.items())))
    signature = run.publisher.sign(signed_bytes("head", payload))
    signed = SignedRecord("head", payload, (run.publisher.peer_id,), (signature,))
    assert open_record(Head, signed, real_verify, run_id=run.run_id) == run.head(1)
    fields["later"] = [2]
    changed = replace(signed, payload=msgpack.packb(dict(sorted(fields.items()))))
    assert code_of(run, Head, changed, real_verify) == "signature"


def test_the_run_of_a_genesis_is_its_digest_and_of_a_revision_its_chain(run: Any, real_verify: Any) -> None:
    revision = run.revise(run.genesis, run.descriptor)
    assert open_record(Descriptor, revision, real_verify, run_id=run.run_id).revision == 1
    with pytest.raises(TrustError) as caught:
        open_record(Descriptor, run.genesis, real_verify, run_id=compute_digest(b"other"))
    assert caught.value.code == "wrong-run"


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "Head"},
        {"type": "he\0d"},
        {"type": ""},
        {"type": "tête"},
        {"signers": ()},
        {"signatures": ()},
        {"signers": (), "signatures": ()},
        {"signers": (bytes(32), bytes(32)), "signatures": (bytes(64), bytes(64)), "type": "epoch"},
        {"signers": (b"b" * 32, b"a" * 32), "signatures": (bytes(64), bytes(64)), "type": "epoch"},
        {"signers": (b"a" * 32, b"b" * 32), "signatures": (bytes(64), bytes(64))},
        {"payload": bytes(limits.RECORD_SIZE_BYTES_MAX)},
    ],
)
def test_a_malformed_signed_record_is_refused(run: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_signed(encode_value(replace(run.signed_head(1), **changes)))
    assert caught.value.code == "schema"


def test_sizes_are_bounded_by_type(run: Any) -> None:
    assert payload_size_bytes_max("rollouts") == limits.ROLLOUT_BATCH_SIZE_BYTES_MAX
    big = replace(run.signed_head(1), payload=bytes(limits.RECORD_SIZE_BYTES_MAX))
    with pytest.raises(LocalProtocolError, match="too large"):
        encode_signed(big)
    with pytest.raises(RemoteProtocolError, match="schema"):
        decode_signed(bytes(limits.ROLLOUT_BATCH_SIZE_BYTES_MAX + 1))
    batch = RolloutBatch(run.run_id, 1, Version(0, 1), Version(0, 1), 1, (), 32, None, (), bytes((1 << 20) - 100), "{}")
    with pytest.raises(LocalProtocolError, match="too large"):
        run.sign(batch, run.inferencer)


@pytest.mark.parametrize("kind", ["rollouts", "head"])
def test_a_record_may_fill_its_limit_and_no_more(run: Any, kind: str) -> None:
    size_max = payload_size_bytes_max(kind)
    signed = replace(run.signed_head(1), type=kind, payload=b"")
    excess_bytes = len(encode_value(replace(signed, payload=bytes(size_max)))) - size_max
    full = replace(signed, payload=bytes(size_max - excess_bytes))
    assert decode_signed(encode_signed(full)) == full
    over = replace(full, payload=full.payload + b"x")
    with pytest.raises(LocalProtocolError, match="too large"):
        encode_signed(over)
    with pytest.raises(RemoteProtocolError) as caught:
        decode_signed(encode_value(over))
    assert caught.value.code == "schema"


def test_what_no_type_allows_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match=f"^schema: a record of {limits.ROLLOUT_BATCH_SIZE_BYTES_MAX + 1} b"):
        decode_signed(bytes(limits.ROLLOUT_BATCH_SIZE_BYTES_MAX + 1))


def test_a_payload_may_fill_the_limit(run: Any) -> None:
    def batch(size_bytes: int) -> RolloutBatch:
        versions = (Version(0, 1), Version(0, 1))
        return RolloutBatch(run.run_id, 1, *versions, 1, (), 32, None, (), bytes(size_bytes), "{}")

    near = limits.ROLLOUT_BATCH_SIZE_BYTES_MAX - 1000
    room_bytes = limits.ROLLOUT_BATCH_SIZE_BYTES_MAX - len(encode_value(batch(near)))
    assert len(run.sign(batch(near + room_bytes), run.inferencer).payload) == limits.ROLLOUT_BATCH_SIZE_BYTES_MAX
    with pytest.raises(LocalProtocolError, match="too large"):
        run.sign(batch(near + room_bytes + 1), run.inferencer)
