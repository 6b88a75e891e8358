"""What a DHT node stores and believes: signed records of this run, in their place, for a bounded time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgpack

from pulsenet import limits
from pulsenet.chain.records import Have, Head
from pulsenet.chain.signing import Verify, decode_signed, open_record
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenetd.network.directory_keys import DirectoryKeys, get_accepted_slots, get_key_id, get_slot

HAVE_SIZE_BYTES_MAX: Final = 8 << 10
"""A have record in the directory; a shard's worth of them must fit one answer of 4 MiB."""

_NO_SUBKEY: Final = msgpack.packb(None)
_REMEMBERED_MAX: Final = 4_096
_EXPIRY_TOLERANCE_SECONDS: Final = 0.001


class DhtRecord(Protocol):
    """hivemind's ``DHTRecord``, as far as it is read here."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


class RecordValidator:
    """Judges each record that is stored here or read from others; hivemind calls :meth:`validate`.

    A record's expiry is fixed by its signed ``issued_at_ms``, so an old record cannot be stored again
    with a later expiry to hide a newer one (A-AUTH-4).

    Args:
        keys: Names of this run's keys.
        verify: Checks one signature.
        now: Unix seconds, corrected.
    """

    priority: Final = 0

    def __init__(self, keys: DirectoryKeys, verify: Verify, now: Callable[[], float]) -> None:
        self._keys = keys
        self._verify = verify
        self._now = now
        self._authorities: tuple[PeerId, ...] = ()
        self._places: dict[bytes, PeerId | None] = {}
        """By key: the authority whose head may be stored there, or ``None`` for have records."""
        self._places_slot = -1
        self._shards_before: dict[bytes, bytes] = {}
        self._judged: OrderedDict[Digest, str | None] = OrderedDict()
        self.rejected: Counter[str] = Counter()
        """Refused records by reason."""

    def set_authorities(self, authorities: Iterable[PeerId]) -> None:
        """Admit heads of these keys only, from now on."""
        self._authorities = tuple(sorted(authorities))
        self._places_slot = -1
        self._judged.clear()

    @property
    def authorities(self) -> tuple[PeerId, ...]:
        """The keys whose heads are admitted, ascending."""
        return self._authorities

    def validate(self, record: DhtRecord) -> bool:
        """Return whether the record may be stored or believed."""
        reason = self.judge(record)
        if reason is not None:
            self.rejected[reason] += 1
        return reason is None

    def get_key_before(self, key_id: bytes) -> bytes | None:
        """Return the place of the same shard's have records in the time slot before; ``None`` for another place."""
        self._update_places(self._now())
        return self._shards_before.get(key_id)

    def judge(self, record: DhtRecord) -> str | None:
        """Return the reason to refuse the record, or ``None``; never raises for what is in it."""
        if len(record.value) > limits.DHT_RECORD_SIZE_BYTES_MAX:
            return "too-large"
        now = self._now()
        # Asked so that NaN, which compares as false with every number, is refused too.
        if not record.expiration_time <= now + limits.DHT_EXPIRY_SECONDS_MAX:
            return "expiry"
        self._update_places(now)
        if record.key not in self._places:
            return "unknown-key"
        identity = compute_digest(record.key + record.subkey + repr(record.expiration_time).encode() + record.value)
        if identity not in self._judged:
            self._judged[identity] = self._judge_content(record, self._places[record.key])
            if len(self._judged) > _REMEMBERED_MAX:
                self._judged.popitem(last=False)
        return self._judged[identity]

    def sign_value(self, record: DhtRecord) -> bytes:
        """Return the value unchanged: it was signed by its author long before."""
        return record.value

    def strip_value(self, record: DhtRecord) -> bytes:
        """Return the value unchanged."""
        return record.value

    def _judge_content(self, record: DhtRecord, authority: PeerId | None) -> str | None:
        try:
            data = unpack_value(record.value)
            if authority is None:
                issued_at_ms = self._open_have(data, record.subkey)
            else:
                issued_at_ms = self._open_head(data, record.subkey, authority)
        except (RemoteProtocolError, TrustError) as error:
            return error.code
        if not abs(record.expiration_time - get_expiry(issued_at_ms)) <= _EXPIRY_TOLERANCE_SECONDS:
            return "expiry"
        return None

    def _open_head(self, data: bytes, subkey: bytes, authority: PeerId) -> int:
        if subkey != _NO_SUBKEY:
            raise RemoteProtocolError("schema", "a head has no subkey")
        signed = decode_signed(data)
        head = open_record(Head, signed, self._verify, run_id=self._keys.run_id, signers=(authority,))
        return head.issued_at_ms

    def _open_have(self, data: bytes, subkey: bytes) -> int:
        if len(data) > HAVE_SIZE_BYTES_MAX:
            raise RemoteProtocolError("schema", f"a have record of {len(data)} bytes")
        signed = decode_signed(data)
        if len(signed.signers) != 1 or subkey != msgpack.packb(signed.signers[0]):
            raise TrustError("untrusted", "a have record under another node's name")
        return open_record(Have, signed, self._verify, run_id=self._keys.run_id).issued_at_ms

    def _update_places(self, now: float) -> None:
        """Learn which keys are accepted in the time slot it is now."""
        slot = get_slot(now)
        if slot == self._places_slot:
            return
        self._places, self._places_slot, self._shards_before = {}, slot, {}
        for accepted in get_accepted_slots(now):
            for authority in self._authorities:
                self._places[get_key_id(self._keys.get_head_key(authority, accepted))] = authority
            for shard in range(limits.HAVE_SHARDS):
                key_id = get_key_id(self._keys.get_have_key(shard, accepted))
                self._places[key_id] = None
                if accepted > 0:
                    self._shards_before[key_id] = get_key_id(self._keys.get_have_key(shard, accepted - 1))


def get_expiry(issued_at_ms: int) -> float:
    """Return when a record issued at that Unix time expires in the directory, in Unix seconds."""
    return issued_at_ms / 1000 + limits.RECORD_VALIDITY_SECONDS


def unpack_value(value: bytes) -> bytes:
    """Return the bytes in a DHT value: msgpack of one byte string and nothing else.

    Raises:
        RemoteProtocolError: ``decode``.
    """
    try:
        data = msgpack.unpackb(
            value,
            max_bin_len=limits.DHT_RECORD_SIZE_BYTES_MAX,
            max_str_len=0,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
    except ValueError as error:
        raise RemoteProtocolError("decode", f"a directory value: {error}") from error
    if not isinstance(data, bytes):
        raise RemoteProtocolError("decode", f"a directory value of type {type(data).__name__}")
    return data
