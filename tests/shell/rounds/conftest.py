"""The daemon's end of the rounds on a real socket: scripted answers, or a small run that closes rounds."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsenet.errors import PulsenetError
from pulsenet.ids import Digest, PeerId, compute_digest
from pulsenet.local import protocol
from pulsenet.local import rounds_protocol as local
from pulsenet.local.client import Client
from pulsenet.local.framing import Frame, FrameReader, encode_frame
from pulsenet.local.protocol import LocalMessage
from pulsenet.local.shared_memory import Region, create_memory, seal_snapshot, write_at
from pulsenet.local.sockets import receive_part, socket_path
from pulsenet.node.effects import Fate
from pulsenet.outer.settings import OuterSettings
from pulsenet.training.daemon_exchange import DaemonExchange
from pulsenet.wire.sections import BlobCutter

sys.path.insert(0, str(Path(__file__).parent))

SECONDS_MAX = 30.0
OWN_KEY = PeerId(bytes([1]) * 32)


def name_blob(data: bytes) -> Digest:
    """Return the id of a blob that is cut as it must be; of what cannot be cut so, any digest."""
    cutter = BlobCutter()
    try:
        cutter.feed(data)
        cutter.finish()
    except PulsenetError:
        return compute_digest(data)
    return cutter.chunk_list.blob_id


class HangUp(Exception):
    """Closes the connection without an answer."""


@dataclass(eq=False)
class ScriptedDaemon:
    """Answers as a daemon does, from lists; a test may replace any answer or hang up at any message."""

    directory: Path
    settings: OuterSettings
    peer_id: PeerId = OWN_KEY
    blobs: dict[Digest, bytes] = field(default_factory=dict)
    said: list[LocalMessage] = field(default_factory=list)
    """Everything the process said after it attached."""
    orders: list[local.Order] = field(default_factory=list)
    answers: dict[type[LocalMessage], Callable[[Any], LocalMessage]] = field(default_factory=dict)
    """Replaces the answer to messages of a type; may raise :class:`HangUp`."""
    on_said: Callable[[LocalMessage], None] = lambda message: None
    """Told each message before it is answered; may raise :class:`HangUp`."""

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.connections: set[socket.socket] = set()
        self.listener: socket.socket | None = None
        self.life = 0
        self.given: local.Order | None = None
        """Given out last, if a check that is not answered."""

    def start(self) -> None:
        """Listen, as a daemon that starts does."""
        path = socket_path(self.directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(8)
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def stop(self) -> None:
        """Die: every connection is cut and nobody listens."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
            self.listener = None
        with self.changed:
            # Whoever waits for an order waits no longer.
            self.life += 1
            self.changed.notify_all()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def order(self, *orders: local.Order) -> None:
        """Let orders wait for the process."""
        with self.changed:
            self.orders += orders
            self.changed.notify_all()

    def put(self, data: bytes) -> Digest:
        """Hold a blob."""
        blob_id = name_blob(data)
        self.blobs[blob_id] = data
        return blob_id

    def kinds(self) -> list[str]:
        """Name what was said, without waiting and blobs."""
        quiet = (local.AwaitOrder, local.PutBlobPart, local.FetchBlobPart, local.GetRoundSettings)
        return [type(message).__name__ for message in self.said if not isinstance(message, quiet)]

    def last(self, kind: type[Any]) -> Any:
        """Return the newest message of a type."""
        return next(message for message in reversed(self.said) if isinstance(message, kind))

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self.connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader, putting = FrameReader(), bytearray()
        try:
            while True:
                frame = None
                while frame is None:
                    frame = receive_part(connection, reader)
                try:
                    self._answer(connection, frame, putting)
                finally:
                    frame.close()
        except (OSError, PulsenetError, HangUp):
            pass
        finally:
            self.connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, frame: Frame, putting: bytearray) -> None:
        message = frame.message
        if isinstance(message, protocol.Attach):
            self._send(connection, protocol.Attached(protocol.PROTOCOL_VERSION, "trainer"))
            return
        self.said.append(message)
        self.on_said(message)
        made = self.answers.get(type(message))
        if made is not None:
            self._send(connection, made(message))
            return
        match message:
            case local.GetRoundSettings():
                algorithm, constants = str(self.settings.algorithm), self.settings.to_constants()
                self._send(connection, local.RoundSettingsReply(algorithm, constants, self.peer_id))
            case local.OpenRounds():
                self._send(connection, local.RoundsOpened())
            case local.PutBlobPart(size_bytes, is_last, is_first):
                if is_first:
                    putting.clear()
                region = Region.open_snapshot(frame.take_descriptor(), size_bytes)
                putting += bytes(region.bytes)
                region.close()
                blob_id, size_bytes = self.put(bytes(putting)) if is_last else None, len(putting)
                self._send(connection, local.BlobTaken(blob_id, size_bytes))
            case local.FetchBlobPart(blob_id, offset_bytes, size_bytes_max):
                self._send_part(connection, blob_id, offset_bytes, size_bytes_max)
            case local.AwaitOrder(timeout_ms):
                with self.changed:
                    life = self.life
                    self.changed.wait_for(lambda: self.orders or self.life != life, timeout_ms / 1000)
                    if self.life != life:
                        raise HangUp
                    reply = self.orders.pop(0) if self.orders else local.NoOrder()
                    self.given = reply if isinstance(reply, local.CheckOrder) else None
                self._send(connection, reply)
            case _:
                self._send(connection, local.Waiting())

    def _send_part(self, connection: socket.socket, blob_id: Digest, offset_bytes: int, size_bytes_max: int) -> None:
        blob = self.blobs.get(blob_id)
        if blob is None:
            self._send(connection, local.NoBlobPart("not-found"))
            return
        data = blob[offset_bytes : offset_bytes + size_bytes_max]
        memory = create_memory("test-part", len(data))
        write_at(memory, data, 0)
        seal_snapshot(memory)
        message = local.BlobPart(len(data), offset_bytes + len(data) == len(blob))
        socket.send_fds(connection, [encode_frame(message, descriptor_count=1)], [memory])
        Region.open_snapshot(memory, len(data)).close()

    def _send(self, connection: socket.socket, message: LocalMessage) -> None:
        connection.sendall(encode_frame(message))


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., ScriptedDaemon]]:
    """Start daemons; each in a directory of its own."""
    daemons: list[ScriptedDaemon] = []

    def make(settings: OuterSettings | None = None, **fields: Any) -> ScriptedDaemon:
        directory = tmp_path / f"node{len(daemons)}"
        daemon = ScriptedDaemon(directory, settings or OuterSettings(inner_steps=3), **fields)
        daemons.append(daemon)
        daemon.start()
        return daemon

    yield make
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., DaemonExchange]]:
    """Make exchanges that give up soon."""
    exchanges: list[DaemonExchange] = []

    def make(daemon: ScriptedDaemon, **fields: Any) -> DaemonExchange:
        chosen = {"order_seconds": SECONDS_MAX, "reconnect_seconds": SECONDS_MAX, "linger_seconds": 0.0, **fields}
        exchange = DaemonExchange(Client.connect(daemon.directory), **chosen)
        exchanges.append(exchange)
        return exchange

    yield make
    for exchange in exchanges:
        exchange.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of trainers share the cores; torch's own would fight them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(eq=False)
class Receipt:
    """A final receipt of the small run."""

    base_state_root: Digest
    members: dict[PeerId, local.OfferContribution]
    rejected: dict[PeerId, str]


class SmallRun:
    """Closes a round when every live node offered and the first one found each contribution sound.

    Each node keeps what its machines would: what it sent, how many rounds in a row it missed, and what it is due.
    """

    def __init__(self, daemons: list[ScriptedDaemon], *, anchor_interval: int = 0) -> None:
        self.daemons = daemons
        self.live = set(range(len(daemons)))
        self.receipts: list[Receipt] = []
        self.kept_from = 0
        self.anchor: local.AnchorStored | None = None
        self.anchor_interval = anchor_interval
        self.offers: dict[PeerId, local.OfferContribution] = {}
        self.verdicts: dict[Digest, str] = {}
        self.missed: dict[tuple[int, int], int] = {}
        self.held: dict[int, int | None] = {}
        """The round that each node's process is in."""
        self.mutex = threading.RLock()
        for index, daemon in enumerate(daemons):
            daemon.blobs = daemons[0].blobs
            daemon.on_said = lambda message, index=index: self.hear(index, message)

    def leave(self, index: int) -> None:
        """Wait for a node no longer."""
        with self.mutex:
            self.live.discard(index)
            self.close()

    def hear(self, index: int, message: LocalMessage) -> None:
        """Do what a node does when its process says something."""
        with self.mutex:
            daemon = self.daemons[index]
            match message:
                case local.HoldState(round_index, state_root):
                    with daemon.changed:
                        # A check is the coordinator's, and stays due.
                        given = [] if daemon.given is None else [daemon.given]
                        waiting = [*given, *daemon.orders]
                        daemon.orders = [order for order in waiting if isinstance(order, local.CheckOrder)]
                        daemon.given = None
                    self.held[index] = round_index
                    self.lead_on(index, round_index, state_root)
                case local.OfferContribution(round_index) if round_index == len(self.receipts):
                    with daemon.changed:
                        daemon.orders = [order for order in daemon.orders if not isinstance(order, local.GoOn)]
                    if daemon.peer_id not in self.offers:
                        self.offers[daemon.peer_id] = message
                        self.ask(message, daemon.peer_id)
                    self.close()
                case local.Checked(digest, reason):
                    self.verdicts[digest], daemon.given = reason, None
                    self.close()
                case local.Stepped(round_index, state_root) | local.Restored(round_index, state_root):
                    self.held[index] = round_index
                    if self.anchor_interval and round_index % self.anchor_interval == 0:
                        daemon.order(local.AnchorOrder(round_index))
                    self.lead_on(index, round_index, state_root)
                case local.AnchorStored():
                    self.anchor = message

    def ask(self, offer: local.OfferContribution, peer_id: PeerId) -> None:
        """Let the first live node look into a contribution."""
        fields = {name: getattr(offer, name) for name in offer.__slots__}
        self.daemons[min(self.live)].order(
            local.CheckOrder(contribution_digest=offer.blob_id, peer_id=peer_id, **fields)
        )

    def close(self) -> None:
        """Make a receipt if everything is there."""
        keys = {self.daemons[index].peer_id for index in self.live}
        if not self.live or not keys <= set(self.offers):
            return
        offers = dict(sorted(self.offers.items()))
        if any(offer.blob_id not in self.verdicts for offer in offers.values()):
            return
        rejected = {key: self.verdicts[one.blob_id] for key, one in offers.items() if self.verdicts[one.blob_id]}
        members = {key: one for key, one in offers.items() if key not in rejected}
        base = self.offers[self.daemons[min(self.live)].peer_id].base_state_root
        self.receipts.append(Receipt(base, members, rejected))
        self.offers, self.verdicts = {}, {}
        newest = len(self.receipts) - 1
        for index, round_index in self.held.items():
            if round_index == newest:
                daemon = self.daemons[index]
                with daemon.changed:
                    daemon.orders = [order for order in daemon.orders if not isinstance(order, local.GoOn)]
                daemon.order(self.step_order(index, newest))

    def step_order(self, index: int, round_index: int) -> local.StepOrder:
        """Return what a receipt asks of one node."""
        receipt, key = self.receipts[round_index], self.daemons[index].peer_id
        missed = self.missed.get((index, round_index), 0) + 1
        if key in receipt.members:
            fate = Fate.COUNTED
        elif key in receipt.rejected:
            fate = Fate.REJECTED
        else:
            fate = Fate.DROPPED if missed >= self.daemons[index].settings.missed_rounds_max else Fate.MISSED
        self.missed[index, round_index + 1] = missed if fate is Fate.MISSED else 0
        members = tuple(
            local.CountedMember(peer_id, 0x3F800000, offer.blob_id, offer.encoded_size_bytes)
            for peer_id, offer in receipt.members.items()
        )
        return local.StepOrder(round_index, receipt.base_state_root, fate, receipt.rejected.get(key, ""), members)

    def lead_on(self, index: int, round_index: int | None, state_root: Digest | None) -> None:
        """Order what follows from the state that a process holds."""
        daemon, newest = self.daemons[index], len(self.receipts)
        if (
            round_index is None
            or round_index < self.kept_from
            or (round_index < newest and self.receipts[round_index].base_state_root != state_root)
        ):
            assert self.anchor is not None
            anchor = self.anchor
            daemon.order(
                local.RestoreOrder(
                    anchor.round_index, anchor.state_root, anchor.blob_id, anchor.encoded_size_bytes, True
                )
            )
        elif round_index < newest:
            daemon.order(self.step_order(index, round_index))
        elif daemon.peer_id not in self.offers:
            daemon.order(local.GoOn(round_index))


@pytest.fixture
def small_run() -> type[SmallRun]:
    """What closes rounds between scripted daemons."""
    return SmallRun
