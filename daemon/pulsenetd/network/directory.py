"""Finding peers and the newest head: hivemind's DHT, sharing the transport's p2pd.

Only signed records of this run are stored or returned; the validator sees to that. Records are found by
time slot, expire after two minutes and are announced again by whoever signs them anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

from pulsenet import limits
from pulsenet.chain.records import Have, Head, SignedRecord
from pulsenet.chain.signing import Verify, encode_signed
from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId, short
from pulsenet.wire.schema import decode_value
from pulsenetd.identity import to_libp2p_bytes
from pulsenetd.network import hivemind_repairs
from pulsenetd.network.clock_offset import ClockOffset
from pulsenetd.network.directory_keys import DirectoryKeys, get_read_slots, get_shard, get_slot
from pulsenetd.network.p2pd import deadline
from pulsenetd.network.validator import RecordValidator, get_expiry

logger: Final = logging.getLogger("pulsenet.directory")

SUBKEYS_MAX: Final = 512
SHARD_SIZE_BYTES_MAX: Final = 3 << 19
"""Have records one node stores per shard and time slot. A reader asks for two slots in one answer of 4 MiB."""

RANK_LISTED: Final = 2
RANK_KNOWN: Final = 1
"""Of keys the run lists, and of those whose record was here in the last time slot; anybody else has 0."""

CACHED_KEYS_MAX: Final = 256
_CALL_SECONDS: Final = limits.DIRECTORY_CALL_SECONDS_MAX
_PING_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 2.0


class Directory:
    """This node's part of the DHT.

    Args:
        peer_id: This node; its place in the key space follows from it.
        run_id: Records of other runs are refused.
        secret: Secret of a private run's token; empty otherwise.
        verify: Checks one signature.
        wall_clock: Unix seconds, as the machine believes.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        peer_id: PeerId,
        run_id: RunId,
        verify: Verify,
        secret: bytes = b"",
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer_id = peer_id
        self.run_id = run_id
        """The run whose records are kept."""
        self._keys = DirectoryKeys(run_id, secret)
        self._client_mode = False
        self._wall_clock = wall_clock
        self._clock = clock
        self._wall_minus_monotonic = wall_clock() - clock()
        self.clock_offset = ClockOffset()
        self.validator = RecordValidator(self._keys, verify, self.now)
        self._listed: frozenset[bytes] = frozenset()
        self._node: Any = None
        self._p2p: Any = None
        self._storage: Any = None
        self._announced_expiry: dict[str, float] = {}
        self._overdue: dict[str, SignedRecord] = {}
        """The newest record of each type, if the directory did not take it."""
        self._is_clock_off = False

    # -- time -----------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the Unix time in seconds, corrected where enough peers say this clock is off."""
        return self._wall_clock() - self.clock_offset.correction_seconds

    def now_ms(self) -> int:
        """Return the corrected Unix time in milliseconds: what records are to be issued and judged by."""
        return int(self.now() * 1000)

    # -- life cycle -----------------------------------------------------------------------------

    async def open(self, hivemind_p2p: Any) -> None:
        """Take part in the DHT through a running p2pd; what was stored before a restart is kept.

        Raises:
            UnavailableError: p2pd did not take the handlers in time.
        """
        assert self._node is None
        await hivemind_repairs.load()
        hivemind_repairs.set_clock(self.now)
        node_module = importlib.import_module("hivemind.dht.node")
        node_id = node_module.DHTID.from_bytes(hashlib.sha1(self._peer_id, usedforsecurity=False).digest())
        async with deadline(_CALL_SECONDS, "joining the directory"):
            hivemind_repairs.separate_directory(self._keys.get_directory_name())
            node = await node_module.DHTNode.create(
                p2p=hivemind_p2p,
                node_id=node_id,
                client_mode=self._client_mode,
                record_validator=self.validator,
                ensure_bootstrap_success=False,
                # answers must be the newest the swarm has, so nothing is answered from a cache of ours
                cache_locally=False,
                cache_nearest=0,
                cache_on_store=False,
                cache_size=CACHED_KEYS_MAX,
            )
        if self._storage is None:
            self._storage = hivemind_repairs.make_storage(SUBKEYS_MAX, SHARD_SIZE_BYTES_MAX, self._rank_subkey)
        node.protocol.storage = self._storage
        self._node, self._p2p = node, hivemind_p2p

    async def close(self, *, p2pd_is_alive: bool = True) -> None:
        """Leave the DHT. With a dead p2pd there is nobody to tell."""
        node, self._node = self._node, None
        if node is None:
            return
        node.is_alive = False
        if node.cache_refresh_task is not None:
            node.cache_refresh_task.cancel()
        if p2pd_is_alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await node.shutdown()

    async def set_client_mode(self, client_mode: bool) -> bool:
        """Ask only, or store and answer for others too; return whether that is a change. Join again after one.

        Raises:
            UnavailableError: see :meth:`open`.
        """
        if client_mode == self._client_mode:
            return False
        self._client_mode = client_mode
        if self._node is not None:
            await self.close()
            await self.open(self._p2p)
        return True

    @property
    def is_open(self) -> bool:
        """Whether this node takes part."""
        return self._node is not None

    def set_authorities(self, authorities: Iterable[PeerId], listed: Iterable[PeerId] = ()) -> None:
        """Look for, store and believe heads of these keys only.

        Args:
            authorities: Keys that sign heads.
            listed: Keys whose have records strangers' never push out, however many.
        """
        self.validator.set_authorities(authorities)
        self._listed = frozenset(listed)

    # -- peers ----------------------------------------------------------------------------------

    async def join(self, peer_ids: Sequence[PeerId]) -> tuple[PeerId, ...]:
        """Get to know connected peers' part of the DHT; return those that answered.

        Done at start, and on a timer with bootstraps and remembered peers: it is what makes two halves
        of a healed partition one again. Also measures the clock's offset.

        Raises:
            UnavailableError: this node does not take part at the moment.
        """
        node = self._get_node()
        known = [peer_id for peer_id in dict.fromkeys(peer_ids) if peer_id != self._peer_id]
        answers = await asyncio.gather(*(self._ping(node, peer_id) for peer_id in known))
        answered = tuple(peer_id for peer_id, answer in zip(known, answers, strict=True) if answer)
        if answered:
            with contextlib.suppress(UnavailableError):
                async with _asking("looking for near nodes"):
                    await node.find_nearest_nodes([node.node_id])
        return answered

    # -- records --------------------------------------------------------------------------------

    async def announce_head(self, record: SignedRecord) -> bool:
        """Store an authority's signed head; return ``False`` if it was dropped here.

        That happens to a head whose expiry has passed or is not later than the last one announced, and to one of a key
        that is no authority: it may have been revoked since the head was signed.
        ``True`` does not promise that anybody else holds it: hivemind cannot tell.

        Raises:
            LocalProtocolError: it is no head.
            UnavailableError: this node does not take part, or the DHT did not answer in time.
        """
        if record.type != Head.TYPE:
            raise LocalProtocolError(f"a {record.type} is no head")
        if record.signers[0] not in self.validator.authorities:
            logger.debug("a head of %s, which is no authority, is not announced", short(record.signers[0]))
            self._overdue.pop(Head.TYPE, None)
            return False
        key = self._keys.get_head_key(record.signers[0], get_slot(self.now()))
        return await self._announce(record, decode_value(Head, record.payload).issued_at_ms, key, None)

    async def announce_have(self, record: SignedRecord) -> bool:
        """Store this node's signed have record; return ``False`` if it was dropped here, as a head is.

        Raises:
            LocalProtocolError: it is no have record.
            UnavailableError: this node does not take part, or the DHT did not answer in time.
        """
        if record.type != Have.TYPE:
            raise LocalProtocolError(f"a {record.type} is no have record")
        signer = record.signers[0]
        key = self._keys.get_have_key(get_shard(signer), get_slot(self.now()))
        return await self._announce(record, decode_value(Have, record.payload).issued_at_ms, key, bytes(signer))

    async def announce_overdue(self) -> None:
        """Announce again what the directory did not take: its next regular announcement may be minutes away.

        Raises:
            UnavailableError: as before.
        """
        for record in tuple(self._overdue.values()):
            await (self.announce_head if record.type == Head.TYPE else self.announce_have)(record)

    async def read_heads(self) -> list[bytes]:
        """Return the encoded signed heads of all authorities, this time slot's and the last's.

        Raises:
            UnavailableError: this node does not take part, or the DHT did not answer in time.
        """
        slots = get_read_slots(self.now())
        authorities = self.validator.authorities
        found = await self._read([self._keys.get_head_key(one, slot) for one in authorities for slot in slots])
        return [value for value in found if isinstance(value, bytes)]

    async def read_haves(self, shard: int) -> list[bytes]:
        """Return the encoded signed have records of one shard, the newest of each node.

        Raises:
            UnavailableError: this node does not take part, or the DHT did not answer in time.
        """
        newest: dict[bytes, tuple[float, bytes]] = {}
        slots = get_read_slots(self.now())
        for found in await self._read([self._keys.get_have_key(shard, slot) for slot in slots]):
            if not isinstance(found, dict):
                continue
            for peer_id, entry in found.items():
                if peer_id not in newest or newest[peer_id][0] < entry.expiration_time:
                    newest[peer_id] = (entry.expiration_time, entry.value)
        return [value for _, value in newest.values()]

    # -- inside ---------------------------------------------------------------------------------

    def _rank_subkey(self, key_id: Any, subkey: Any) -> int:
        """Say how much a have record matters at this node: who fills a shard must not take the places of others."""
        if subkey in self._listed:
            return RANK_LISTED
        before = self.validator.get_key_before(key_id.to_bytes())
        entry = None if before is None else self._storage.data.get(type(key_id).from_bytes(before))
        return RANK_KNOWN if entry is not None and subkey in entry.value.data else 0

    def _get_node(self) -> Any:
        if self._node is None:
            raise UnavailableError("the directory is down: p2pd is being restarted")
        self._notice_clock_change()
        return self._node

    def _notice_clock_change(self) -> None:
        """After the machine's clock was set, drop what was stored by the wrong time (A-DHT-3)."""
        difference = self._wall_clock() - self._clock()
        jump_seconds = difference - self._wall_minus_monotonic
        self._wall_minus_monotonic = difference
        if abs(jump_seconds) <= limits.CLOCK_OFFSET_SECONDS_MAX:
            return
        logger.warning("this machine's clock jumped by %.1f s", jump_seconds)
        self.clock_offset.clear()
        self._is_clock_off = False
        self._forget_announced()

    def _forget_announced(self) -> None:
        """Drop what was stored by another time than the one that counts now."""
        self._announced_expiry.clear()
        self._storage.clear()

    async def _ping(self, node: Any, peer_id: PeerId) -> bool:
        protocol = importlib.import_module("hivemind.proto.dht_pb2")
        libp2p_id = importlib.import_module("hivemind.p2p").PeerID(to_libp2p_bytes(peer_id))
        node_id_type = importlib.import_module("hivemind.dht.routing").DHTID
        request = protocol.PingRequest(peer=node.protocol.node_info, validate=False)
        sent_at, sent_wall = self._clock(), self._wall_clock()
        try:
            async with asyncio.timeout(_PING_SECONDS):
                response = await node.protocol.get_stub(libp2p_id).rpc_ping(request)
            round_trip_seconds = self._clock() - sent_at
            if len(response.peer.node_id) == node_id_type.HASH_NBYTES:
                node_id = node_id_type.from_bytes(response.peer.node_id)
                await node.protocol.update_routing_table(node_id, libp2p_id, responded=True)
        except Exception as error:  # whatever no answer, or a wrong one, leads to in hivemind
            logger.debug("%s does not answer in the directory: %r", short(peer_id), error)
            return False
        if response.dht_time:
            ahead_seconds = sent_wall + round_trip_seconds / 2 - response.dht_time
            self._learn_offset(peer_id, ahead_seconds, round_trip_seconds)
        return True

    def _learn_offset(self, peer_id: PeerId, ahead_seconds: float, round_trip_seconds: float) -> None:
        before = self.clock_offset.correction_seconds
        self.clock_offset.add(peer_id, ahead_seconds=ahead_seconds, round_trip_seconds=round_trip_seconds)
        after = self.clock_offset.correction_seconds
        warning = self.clock_offset.warning
        is_corrected_anew = abs(after - before) > limits.CLOCK_OFFSET_SECONDS_MAX
        if is_corrected_anew or (warning is not None) != self._is_clock_off:
            # said at the first peer that disagrees: two nodes alone never get the three that correct it
            logger.warning("%s", warning or "this machine's clock agrees with its peers again")
        self._is_clock_off = warning is not None
        if is_corrected_anew:
            self._forget_announced()

    async def _announce(self, record: SignedRecord, issued_at_ms: int, key: bytes, subkey: bytes | None) -> bool:
        data = encode_signed(record)
        if len(data) > limits.DHT_RECORD_SIZE_BYTES_MAX:
            raise LocalProtocolError(f"a {record.type} of {len(data)} bytes is too large for the directory")
        expiry = get_expiry(issued_at_ms)
        self._overdue[record.type] = record
        node = self._get_node()
        before = self._announced_expiry.get(record.type, 0.0)
        is_due = expiry > max(before, self.now())
        if is_due:
            # At once, so that of two announcements at a time the older one is dropped.
            self._announced_expiry[record.type] = expiry
            try:
                async with _asking(f"announcing a {record.type}"):
                    await node.store(key, data, expiry, subkey=subkey)
            except UnavailableError:
                if self._overdue.get(record.type) is record:
                    self._announced_expiry[record.type] = before
                raise
        else:
            logger.debug("a %s whose expiry does not grow is not announced", record.type)
        if self._overdue.get(record.type) is record:
            del self._overdue[record.type]
        return is_due

    async def _read(self, keys: Sequence[bytes]) -> list[Any]:
        """Return the newest values found under the keys, without those that are absent."""
        node = self._get_node()
        if not keys:
            return []
        async with _asking("reading from the directory"):
            found = await node.get_many(list(keys), sufficient_expiration_time=float("inf"))
        return [entry.value for entry in found.values() if entry is not None]


@contextlib.asynccontextmanager
async def _asking(what: str) -> AsyncIterator[None]:
    """Limit what others answer to, in time and in what comes of it: hivemind raises whatever a wrong answer leads to.

    Raises:
        UnavailableError: There was no answer in time, or hivemind failed.
    """
    try:
        async with deadline(_CALL_SECONDS, what):
            yield
    except UnavailableError:
        raise
    except Exception as error:
        logger.warning("%s failed in hivemind: %r", what, error)
        raise UnavailableError(f"{what}: {error!r}") from error
