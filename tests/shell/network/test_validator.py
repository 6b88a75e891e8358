"""What a DHT node stores and believes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from pulsenet import limits
from pulsenet.chain.records import Have, Head
from pulsenet.chain.signing import encode_signed, seal
from pulsenet.ids import Digest, RunId, Version
from pulsenetd.identity import Identity, load_or_create, verify
from pulsenetd.network.directory_keys import DirectoryKeys, get_key_id, get_shard, get_slot
from pulsenetd.network.validator import HAVE_SIZE_BYTES_MAX, RecordValidator, get_expiry, unpack_value

RUN = RunId(bytes(range(32)))
KEYS = DirectoryKeys(RUN)
NOW = 1_000_000.0
NOW_MS = int(NOW * 1000)
NO_SUBKEY = msgpack.packb(None)


@dataclass(frozen=True)
class Record:
    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def make_head(*, issued_at_ms: int = NOW_MS, run_id: RunId = RUN) -> Head:
    digest = Digest(bytes(32))
    return Head(
        run_id=run_id,
        revision=0,
        term=0,
        version=Version(0, 1),
        root=digest,
        manifest_digest=digest,
        catalogue_digest=digest,
        epoch_digest=None,
        issued_at_ms=issued_at_ms,
        valid_until_ms=issued_at_ms + 300_000,
    )


def make_have(*, issued_at_ms: int = NOW_MS, addresses: tuple[str, ...] = ()) -> Have:
    return Have(RUN, "seed", 0, 0, 0, (), addresses, issued_at_ms)


@pytest.fixture
def authority(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path / "authority.key")


@pytest.fixture
def stranger(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path / "stranger.key")


@pytest.fixture
def validator(authority: Identity) -> RecordValidator:
    made = RecordValidator(KEYS, verify, lambda: NOW)
    made.set_authorities([authority.peer_id])
    return made


def head_record(signer: Identity, place: Identity | None = None, **options: Any) -> Record:
    head = make_head(**options)
    key = KEYS.get_head_key((place or signer).peer_id, get_slot(NOW))
    data = encode_signed(seal(head, signer.sign, signer.peer_id))
    return Record(get_key_id(key), NO_SUBKEY, msgpack.packb(data), get_expiry(head.issued_at_ms))


def have_record(signer: Identity, **options: Any) -> Record:
    have = make_have(**options)
    key = KEYS.get_have_key(get_shard(signer.peer_id), get_slot(NOW))
    data = encode_signed(seal(have, signer.sign, signer.peer_id))
    subkey = msgpack.packb(bytes(signer.peer_id))
    return Record(get_key_id(key), subkey, msgpack.packb(data), get_expiry(have.issued_at_ms))


def test_an_authoritys_head_and_anybodys_have_are_taken(
    validator: RecordValidator, authority: Identity, stranger: Identity
) -> None:
    assert validator.validate(head_record(authority))
    assert validator.validate(have_record(stranger))
    assert validator.rejected == {}
    record = head_record(authority)
    assert validator.sign_value(record) == validator.strip_value(record) == record.value


def test_a_head_of_another_key_is_refused_even_under_the_authoritys_name(
    validator: RecordValidator, authority: Identity, stranger: Identity
) -> None:
    """A-DHT-6."""
    assert validator.judge(head_record(stranger, place=authority)) == "untrusted"
    assert validator.judge(head_record(stranger)) == "unknown-key"
    assert not validator.validate(head_record(stranger, place=authority))
    assert validator.rejected == {"untrusted": 1}


def test_a_have_record_counts_under_its_signers_name_only(
    validator: RecordValidator, authority: Identity, stranger: Identity
) -> None:
    record = have_record(stranger)
    assert validator.judge(replace(record, subkey=msgpack.packb(bytes(authority.peer_id)))) == "untrusted"
    assert validator.judge(replace(record, subkey=NO_SUBKEY)) == "untrusted"


def test_an_old_record_cannot_be_stored_again_with_a_later_expiry(
    validator: RecordValidator, authority: Identity
) -> None:
    """A-AUTH-4."""
    record = head_record(authority, issued_at_ms=NOW_MS - 60_000)
    assert validator.judge(record) is None
    for seconds in (-1.0, 0.01, 60.0):
        assert validator.judge(replace(record, expiration_time=record.expiration_time + seconds)) == "expiry"


def test_an_expiry_beyond_the_limit_is_refused(validator: RecordValidator, authority: Identity) -> None:
    """A-DHT-3: a record of a clock that is a day ahead."""
    ahead_ms = int((limits.DHT_EXPIRY_SECONDS_MAX - limits.RECORD_VALIDITY_SECONDS) * 1000)
    assert validator.judge(head_record(authority, issued_at_ms=NOW_MS + ahead_ms)) is None
    assert validator.judge(head_record(authority, issued_at_ms=NOW_MS + ahead_ms + 1)) == "expiry"
    assert validator.judge(head_record(authority, issued_at_ms=NOW_MS + 86_400_000)) == "expiry"


def test_a_record_of_another_run_or_type_is_refused(validator: RecordValidator, authority: Identity) -> None:
    """A-AUTH-6."""
    assert validator.judge(head_record(authority, run_id=RunId(bytes(32)))) == "wrong-run"
    have, head = have_record(authority), head_record(authority)
    assert validator.judge(replace(head, value=have.value)) == "wrong-type"
    assert validator.judge(replace(have, value=head.value)) == "wrong-type"


def test_every_flipped_byte_of_a_value_is_refused(validator: RecordValidator, authority: Identity) -> None:
    """A-AUTH-2."""
    record = head_record(authority)
    for index in range(len(record.value)):
        changed = bytearray(record.value)
        changed[index] ^= 1
        assert validator.judge(replace(record, value=bytes(changed))) is not None, index


def test_a_head_with_a_subkey_is_refused(validator: RecordValidator, authority: Identity) -> None:
    """A-DHT-7: no junk subkeys under the head's key."""
    record = head_record(authority)
    assert validator.judge(replace(record, subkey=msgpack.packb("junk"))) == "schema"


def test_large_records_are_refused_before_they_are_read(
    validator: RecordValidator, authority: Identity, stranger: Identity
) -> None:
    """A-DHT-5."""
    record = head_record(authority)
    assert validator.judge(replace(record, value=bytes(limits.DHT_RECORD_SIZE_BYTES_MAX + 1))) == "too-large"
    junk = msgpack.packb(bytes(HAVE_SIZE_BYTES_MAX + 1))
    assert validator.judge(replace(have_record(stranger), value=junk)) == "schema"


def test_only_nearby_slots_and_this_runs_keys_are_known(authority: Identity) -> None:
    record = head_record(authority)
    for seconds, reason in ((0.0, None), (599.0, None), (-599.0, None), (1_300.0, "unknown-key")):
        validator = RecordValidator(KEYS, verify, lambda seconds=seconds: NOW + seconds)  # type: ignore[misc]
        validator.set_authorities([authority.peer_id])
        late = replace(record, expiration_time=min(record.expiration_time, NOW + seconds + 300))
        expected = reason if late == record or reason else "expiry"
        assert validator.judge(late) == expected
    other = RecordValidator(DirectoryKeys(RUN, b"secret"), verify, lambda: NOW)
    other.set_authorities([authority.peer_id])
    assert other.judge(record) == "unknown-key"


def test_an_authority_that_was_revoked_is_no_longer_believed(validator: RecordValidator, authority: Identity) -> None:
    assert validator.judge(head_record(authority)) is None
    validator.set_authorities([])
    assert validator.judge(head_record(authority)) == "unknown-key"


def test_a_record_is_verified_once(authority: Identity) -> None:
    calls: list[bytes] = []

    def counting(*arguments: Any) -> bool:
        calls.append(arguments[1])
        return verify(*arguments)

    validator = RecordValidator(KEYS, counting, lambda: NOW)
    validator.set_authorities([authority.peer_id])
    for _ in range(5):
        assert validator.validate(head_record(authority))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 2_000,
        b"\xc1",
        msgpack.packb("text"),
        msgpack.packb({"a": 1}),
        msgpack.packb(7),
        msgpack.packb(b"x") + b"\0",
    ],
)
def test_hostile_msgpack_is_refused(validator: RecordValidator, authority: Identity, value: bytes) -> None:
    """A-MSG-1, A-MSG-2, A-MSG-5."""
    assert validator.judge(replace(head_record(authority), value=value)) == "decode"


def test_a_value_is_one_byte_string() -> None:
    assert unpack_value(msgpack.packb(b"abc")) == b"abc"


@pytest.mark.parametrize("expiry", [float("nan"), float("inf"), -float("inf")])
def test_an_expiry_that_is_no_time_is_refused(validator: RecordValidator, authority: Identity, expiry: float) -> None:
    """A-AUTH-4: a number that compares as false with everything would outlive every record."""
    true = head_record(authority)
    assert validator.validate(true)
    assert not validator.validate(replace(true, expiration_time=expiry))
    assert validator.rejected == {"expiry": 1}
