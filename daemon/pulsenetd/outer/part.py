"""A node's part in its run's outer algorithm: the ledger, the machines that share it, and what they need of the shell.

What rounds (:mod:`pulsenetd.outer.rounds`) and mixing (:mod:`pulsenetd.outer.mixing`) have in common. One whose key is
an authority votes; a trainer takes part; an authority that trains may coordinate.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, ClassVar, Final, TypeVar

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.records import ALGORITHM_NONE, Descriptor
from pulsenet.chain.trust import Trust
from pulsenet.codec.patch import RunBlocks
from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local.rounds_protocol import RoundSettingsReply
from pulsenet.node.authority import Authority
from pulsenet.node.candidacy import BALLOT_KEY
from pulsenet.node.effects import Effect
from pulsenet.node.events import Event
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Machine, Seat
from pulsenet.node.mixing.respond import MixingRequest
from pulsenet.node.rounds_respond import event_of, respond_to_round
from pulsenet.node.verdicts import RoundPush
from pulsenet.outer.plan_link import Link
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.messages import GetAggregates, GetRounds, Message, Refusal
from pulsenetd.driver import Driver, Handler
from pulsenetd.identity import Identity, to_libp2p_text
from pulsenetd.logs import logger
from pulsenetd.metrics import Metrics
from pulsenetd.storage.orphans import Needs
from pulsenetd.storage.round_blobs import RoundBlobs
from pulsenetd.storage.store import Store

PUSHES_WAITING_MAX: Final = 64
"""Pushed items shown to the machines at one time; who pushes more is told to come back."""

MASTERS_KEY: Final = "rounds/masters"
"""Digest of the table of masters that this node trains, among its durable state."""

BUSY: Final = Refusal("busy", "others are being heard", retry_after_ms=1_000)

Voter = TypeVar("Voter", bound=Authority)


def shape_of(descriptor: Descriptor | None, peer_id: PeerId) -> tuple[Any, ...]:
    """Return what of a descriptor decides which machines a node has, empty without an outer algorithm.

    When it changes, the node builds them anew, and a training process learns of other constants.
    """
    if descriptor is None or descriptor.algorithm == ALGORITHM_NONE:
        return ()
    return descriptor.algorithm, descriptor.constants, peer_id in descriptor.authorities


class OuterPart(ABC):
    """Built before the role, from what the store holds; blocks on the disk.

    Args:
        trust: The run's rules; its descriptor is known.
        identity: This node's key.
        role: The node's.
        threads: Where blobs are written and read.
        note: Takes fields for status and metrics that no machine reports.
        find_link: Returns this node's link, to predict with, as far as it is known.
        run_blocks: An executor's ``map`` for the blocks of a mean.
        monotonic: Monotonic seconds.
    """

    name: ClassVar[str]
    """Of the machine that a trainer has."""
    coordinator: Authority | None
    """``None`` unless this node's key is an authority."""

    def __init__(
        self,
        store: Store,
        trust: Trust,
        identity: Identity,
        *,
        role: str,
        metrics: Metrics,
        threads: Executor,
        note: Callable[..., None],
        find_link: Callable[[], Link | None] = lambda: None,
        run_blocks: RunBlocks = map,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._trust = trust
        self._peer_id = identity.peer_id
        self._is_trainer = role == "trainer"
        self._metrics = metrics
        self._threads = threads
        self._note = note
        self._find_link = find_link
        self._run_blocks = run_blocks
        self._monotonic = monotonic
        self._driver: Driver | None = None
        self._waiting_count = 0
        self._left: set[Digest] = set()
        """Blobs of training processes that are gone."""
        self.machines: dict[str, Machine] = {}
        self.shape = shape_of(trust.descriptor, self._peer_id)
        """What this part was built for; see :func:`shape_of`."""
        self.is_whole = True
        """Whether the ledger is that of the node's last life; a damaged one is learnt anew from peers."""
        try:
            self.ledger = Ledger.restore(trust, store.state(LEDGER_KEY), store.record)
        except StorageError as error:
            logger.warning("%s: the rounds are learnt anew from peers", error)
            self.ledger, self.is_whole = Ledger(trust), False
        self._seat = Seat(trust, self.ledger, identity.peer_id, identity.sign, secrets.randbelow)
        self._build()

    @abstractmethod
    def _build(self) -> None:
        """Make the machines and the desk where their orders wait for the training process."""

    @property
    def descriptor(self) -> Descriptor:
        """The run's, as it is now."""
        assert self._trust.descriptor is not None
        return self._trust.descriptor

    def _add_voter(self, make: Callable[[bytes | None], Voter]) -> Voter | None:
        """Add the machine of an authority, made with the ballot of its last life, if this node's key is one."""
        if self._peer_id not in self.descriptor.authorities:
            return None
        try:
            voter = make(self._store.state(BALLOT_KEY))
        except StorageError as error:
            logger.error("%s: this key must not vote; let the owner promote another one", error)
            return None
        self.machines["coordinator"] = voter
        return voter

    def _add_listener(self) -> None:
        """Add the machine of an authority that trains."""
        if self._is_trainer and "coordinator" in self.machines:
            self.machines["listener"] = Listener(self._trust, self._peer_id, secrets.randbelow, self._store)

    # Into the node

    def bind(self, driver: Driver) -> None:
        """Learn how to reach the machines."""
        self._driver = driver

    def _post(self, event: Event, name: str = "") -> None:
        self._require_driver().post_to(name or self.name, event)

    def _require_driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    @abstractmethod
    def handlers(self) -> Mapping[type[Effect], Handler]:
        """How the effects of these machines are executed, beside those that every machine has."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What this part of the node refers to in the store."""

    # What the training process asks

    async def tell_settings(self, take_up: Callable[[], Awaitable[bool]]) -> RoundSettingsReply:
        """Return what the run says about its outer algorithm.

        Args:
            take_up: Gives a run without one an algorithm, if it may; says whether it did.

        Raises:
            RemoteProtocolError: ``no-rounds``.
        """
        if not shape_of(self.descriptor, self._peer_id):
            await take_up()
        if not shape_of(self.descriptor, self._peer_id):
            raise RemoteProtocolError(
                "no-rounds",
                f"the run {self.descriptor.name} names no outer algorithm: its owner makes one that does with "
                "'pulsenet run create NAME --algorithm pulseloco'",
            )
        return RoundSettingsReply(self.descriptor.algorithm, self.descriptor.constants, self._peer_id)

    async def check_masters(self, table: ParameterTable, self_test: Digest) -> None:
        """Refuse masters or arithmetic that the run does not have, and remember the masters.

        Raises:
            RemoteProtocolError: ``self-test``, ``not-listed`` or ``table``.
            UnavailableError: The process is to come back.
        """
        if self.shape != shape_of(self._trust.descriptor, self._peer_id):
            # The process finds the machines that are meant for it when it comes back.
            raise UnavailableError("the machines of this node are about to be built anew")
        if self_test != SELF_TEST_DIGEST:
            text = f"the self-test of the training process gave {self_test.hex()}: its arithmetic would diverge"
            raise RemoteProtocolError("self-test", text)
        descriptor = self.descriptor
        listed = (*descriptor.trainers, *descriptor.authorities)
        if not descriptor.open_trainers_max and self._peer_id not in listed:
            key = to_libp2p_text(self._peer_id)
            text = f"the run's owner lists it with 'pulsenet run admit {descriptor.name} {key} --role trainer'"
            raise RemoteProtocolError("not-listed", text)
        known, digest = await asyncio.to_thread(self._store.state, MASTERS_KEY), bytes(table.digest)
        if known is not None and known != digest and self._has_rounds():
            text = "this node trained other masters in this run: names, shapes and frozen parameters must agree"
            raise RemoteProtocolError("table", text)
        if known != digest:
            try:
                await asyncio.to_thread(self._store.save_state, MASTERS_KEY, digest)
            except StorageError as error:
                # The process comes first: what it makes waits for room as well, and says so itself.
                self._metrics.count("rejected", error.reason)
                logger.warning("%s: which masters this node trains is not remembered", error)
        self._take_masters(table)

    @abstractmethod
    def _has_rounds(self) -> bool:
        """Return whether anything rests on the masters of an earlier process."""

    @abstractmethod
    def _take_masters(self, table: ParameterTable) -> None:
        """Learn what is trained here."""

    def make_blobs(self) -> RoundBlobs:
        """Return the blobs of one training process."""
        return RoundBlobs(self._store, self._left)

    # What peers ask

    @abstractmethod
    async def answer(self, peer_id: PeerId, request: RoundPush | GetRounds | GetAggregates | MixingRequest) -> Message:
        """Answer a peer's request: what it pushes is shown to the machines first."""

    async def _answer_round(self, peer_id: PeerId, request: RoundPush | GetRounds | GetAggregates) -> Message:
        if not isinstance(request, GetRounds | GetAggregates) and not await self._show(event_of(request, peer_id)):
            return BUSY
        find_verdict = None if self.coordinator is None else self.coordinator.verdicts.find
        return respond_to_round(request, self.ledger, find_verdict)

    async def _show(self, event: Event) -> bool:
        """Show the machines what a peer said; ``False`` if too many wait to be heard."""
        if self._waiting_count >= PUSHES_WAITING_MAX:
            return False
        self._waiting_count += 1
        try:
            await self._require_driver().show(event)
        finally:
            self._waiting_count -= 1
        return True
