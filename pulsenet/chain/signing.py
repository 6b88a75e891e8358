"""Signing records and opening them again (SPEC section 4).

No cryptography here: signing and verifying are callables the shell provides. Signatures cover the
payload's bytes as received, never a re-encoding, so unknown fields stay covered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final, TypeVar

from pulsenet import limits
from pulsenet.chain import rules
from pulsenet.chain.records import Descriptor, EpochRecord, Receipt, RolloutBatch, SignedRecord
from pulsenet.errors import LocalProtocolError, RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId, RunId, compute_digest, short
from pulsenet.wire.schema import decode_value, encode_value

SIGNATURE_CONTEXT: Final = b"pulsenet-v1\0"
"""First bytes of everything signed, so that a signature means nothing to another protocol."""

Sign = Callable[[bytes], bytes]
"""Returns the 64-byte Ed25519 signature of a message under our key."""

Verify = Callable[[PeerId, bytes, bytes], bool]
"""Says whether a signature (last) of a message (second) was made by this peer's key."""

SEVERAL_SIGNERS: Final = (Descriptor.TYPE, EpochRecord.TYPE, Receipt.TYPE)
"""Types that more than one key may sign; every other record has exactly one signer."""

R = TypeVar("R", bound=rules.Signable)


def signed_bytes(record_type: str, payload: bytes) -> bytes:
    """Return what a signature of this payload covers."""
    return SIGNATURE_CONTEXT + record_type.encode("ascii") + b"\0" + payload


def record_digest(signed: SignedRecord) -> Digest:
    """Return the record's digest: of the payload alone, whoever signed it."""
    return compute_digest(signed.payload)


def seal(record: rules.Signable, sign: Sign, signer: PeerId) -> SignedRecord:
    """Encode ``record`` and sign it with one key.

    Raises:
        LocalProtocolError: the record breaks its own rules or is too large, so every peer would refuse it.
    """
    try:
        rules.check_record(record)
    except RemoteProtocolError as error:
        raise LocalProtocolError(str(error)) from error
    payload = encode_value(record)
    if len(payload) > payload_size_bytes_max(record.TYPE):
        raise LocalProtocolError(f"{record.TYPE} of {len(payload)} bytes is too large")
    return add_signature(SignedRecord(record.TYPE, payload, (), ()), sign, signer)


def add_signature(signed: SignedRecord, sign: Sign, signer: PeerId) -> SignedRecord:
    """Return the record with one more signature, in its place by key; an earlier one of this key is replaced."""
    signatures = dict(zip(signed.signers, signed.signatures, strict=True))
    signatures[signer] = sign(signed_bytes(signed.type, signed.payload))
    ordered = sorted(signatures)
    if len(ordered) > 1 and signed.type not in SEVERAL_SIGNERS:
        raise LocalProtocolError(f"a {signed.type} has one signer")
    return SignedRecord(signed.type, signed.payload, tuple(ordered), tuple(signatures[key] for key in ordered))


def keep_signatures(signed: SignedRecord, keys: Collection[PeerId]) -> SignedRecord:
    """Return the record with the signatures of these keys alone."""
    kept = [(key, signature) for key, signature in zip(signed.signers, signed.signatures, strict=True) if key in keys]
    return replace(signed, signers=tuple(key for key, _ in kept), signatures=tuple(signature for _, signature in kept))


def payload_size_bytes_max(record_type: str) -> int:
    """Return the largest payload a record of this type may have."""
    if record_type == RolloutBatch.TYPE:
        return limits.ROLLOUT_BATCH_SIZE_BYTES_MAX
    return limits.RECORD_SIZE_BYTES_MAX


def encode_signed(signed: SignedRecord) -> bytes:
    """Return the record as it travels and is stored.

    Raises:
        LocalProtocolError: payload and signatures together exceed the limit of the type.
    """
    data = encode_value(signed)
    if len(data) > payload_size_bytes_max(signed.type):
        raise LocalProtocolError(f"{signed.type} of {len(data)} bytes with its signatures is too large")
    return data


def decode_signed(data: bytes | bytearray | memoryview) -> SignedRecord:
    """Return the signed record in ``data``, its form checked but no signature yet.

    Raises:
        RemoteProtocolError: ``decode`` or ``schema``.
    """
    if len(data) > limits.ROLLOUT_BATCH_SIZE_BYTES_MAX:
        raise RemoteProtocolError("schema", f"a record of {len(data)} bytes")
    signed = decode_value(SignedRecord, data)
    if not (signed.type.isascii() and signed.type.isalpha() and signed.type.islower()):
        raise RemoteProtocolError("schema", f"record type {signed.type!r}")
    if len(data) > payload_size_bytes_max(signed.type):
        raise RemoteProtocolError("schema", f"a {signed.type} of {len(data)} bytes")
    if not signed.signers or len(signed.signers) != len(signed.signatures):
        raise RemoteProtocolError("schema", f"{len(signed.signers)} signers, {len(signed.signatures)} signatures")
    if any(first >= second for first, second in itertools.pairwise(signed.signers)):
        raise RemoteProtocolError("schema", "signers do not ascend, or one occurs twice")
    if len(signed.signers) > 1 and signed.type not in SEVERAL_SIGNERS:
        raise RemoteProtocolError("schema", f"a {signed.type} with {len(signed.signers)} signers")
    return signed


def open_record(
    cls: type[R],
    signed: SignedRecord,
    verify: Verify,
    *,
    run_id: RunId,
    signers: Collection[PeerId] | None = None,
) -> R:
    """Return the record inside, once its type, every signature, its form, its rules and its run hold.

    Args:
        signers: Keys that may sign it; ``None`` leaves that question to the caller. Asked before any
            signature is verified, so that strangers cost nothing.

    Raises:
        TrustError: ``wrong-type``, ``untrusted``, ``signature`` or ``wrong-run``.
        RemoteProtocolError: ``decode`` or ``schema``: signed, but not a record of this format.
    """
    if signed.type != cls.TYPE:
        raise TrustError("wrong-type", f"a {signed.type} offered as {cls.TYPE}")
    if signers is not None:
        for signer in signed.signers:
            if signer not in signers:
                raise TrustError("untrusted", f"{cls.TYPE} signed by {short(signer)}")
    message = signed_bytes(signed.type, signed.payload)
    if not signed.signers or len(signed.signers) != len(signed.signatures):
        raise TrustError("signature", f"{len(signed.signatures)} signatures of {len(signed.signers)} keys")
    for signer, signature in zip(signed.signers, signed.signatures, strict=True):
        if not verify(signer, message, signature):
            raise TrustError("signature", f"{cls.TYPE} in the name of {short(signer)}")
    record = decode_value(cls, signed.payload)
    rules.check_record(record)
    _check_run(record, signed, run_id)
    return record


def _check_run(record: rules.Signable, signed: SignedRecord, run_id: RunId) -> None:
    """Refuse a record of another run. A later revision names its run by its chain alone."""
    if isinstance(record, Descriptor):
        named = record_digest(signed) if record.revision == 0 else run_id
    else:
        named = record.run_id
    if named != run_id:
        raise TrustError("wrong-run", f"{signed.type} of run {short(named)}, not {short(run_id)}")
