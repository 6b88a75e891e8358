"""A node's part in the rounds of its run: the ledger, the machines that share it, and what they need of the shell.

Every node of a run that names an outer algorithm knows the rounds. One whose key is an authority votes and
countersigns; a trainer contributes; an authority that trains may coordinate.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Final

from pulsenet.chain.ledger import LEDGER_KEY, Ledger
from pulsenet.chain.records import ALGORITHM_NONE, Contribution, Descriptor, Receipt, SignedRecord, StateAnchor
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.chain.trust import Trust
from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import rounds_protocol as local
from pulsenet.node.candidacy import BALLOT_KEY, decode_ballot
from pulsenet.node.coordinator import Coordinator
from pulsenet.node.effects import Effect
from pulsenet.node.events import StoreFailed
from pulsenet.node.listener import Listener
from pulsenet.node.machine import Machine
from pulsenet.node.mixing.respond import MIXING_REQUESTS, MixingRequest
from pulsenet.node.onlooker import Onlooker
from pulsenet.node.own_work import OWN_KEY
from pulsenet.node.rounds import Rounds
from pulsenet.node.rounds_respond import event_of, respond_to_round
from pulsenet.node.verdicts import RoundPush
from pulsenet.outer.plan_link import Link
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.messages import GetAggregates, GetRounds, Message, Refusal
from pulsenet.wire.schema import decode_value
from pulsenetd.driver import Driver, Handler
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.identity import Identity
from pulsenetd.local_rounds import RoundsHook
from pulsenetd.logs import logger
from pulsenetd.masters import check_masters
from pulsenetd.metrics import Metrics
from pulsenetd.pace import Measured, Pace, predict
from pulsenetd.storage.lookup import StoreLookup
from pulsenetd.storage.round_blobs import RoundBlobs
from pulsenetd.storage.store import Store

PUSHES_WAITING_MAX: Final = 64
"""Pushed items shown to the machines at one time; who pushes more is told to come back."""

BUSY_RETRY_MS: Final = 1_000
UNAVAILABLE_RETRY_MS: Final = 60_000


_RoundRecord = Contribution | Receipt | StateAnchor
_KINDS: Final[tuple[type[_RoundRecord], ...]] = (Contribution, Receipt, StateAnchor)


def shape_of(descriptor: Descriptor | None, peer_id: PeerId) -> tuple[Any, ...]:
    """Return what of a descriptor decides which machines a node has, empty without rounds.

    When it changes, the node builds them anew, and a training process learns of other constants.
    """
    if descriptor is None or descriptor.algorithm == ALGORITHM_NONE:
        return ()
    return descriptor.algorithm, descriptor.constants, peer_id in descriptor.authorities


class RoundsPart:
    """Built before the role, from what the store holds; blocks on the disk.

    Args:
        trust: The run's rules; its descriptor is known.
        identity: This node's key.
        role: The node's.
        threads: Where blobs are written and read.
        note: Takes fields for status and metrics that no machine reports.
        find_link: Returns this node's link, to predict with, as far as it is known.
    """

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
    ) -> None:
        self._store = store
        self._trust = trust
        self._peer_id = identity.peer_id
        self._metrics = metrics
        self._threads = threads
        self._note = note
        self._find_link = find_link
        self._params = 0
        """Of the masters that are trained here."""
        self._driver: Driver | None = None
        self._waiting_count = 0
        self._left: set[Digest] = set()
        """Blobs of training processes that are gone."""
        self.ledger, is_whole = restore_ledger(store, trust)
        self.coordinator: Coordinator | None = None
        """``None`` unless this node's key is an authority of a run with rounds."""
        self.rounds: Rounds | None = None
        """``None`` unless this node is a trainer of a run with rounds."""
        self.machines: dict[str, Machine] = {}
        self._desk = TrainingDesk(
            trust,
            self.ledger,
            self._peer_id,
            metrics,
            pace=Pace(self._tell_pace),
            post=lambda event: self._require_driver().post_to("rounds", event),
            settle=lambda: self._require_driver().settle("rounds"),
        )
        self.shape = shape_of(trust.descriptor, self._peer_id)
        """What this part was built for; see :func:`shape_of`."""
        if self.shape:
            if is_whole:
                self._sort_records()
            self._build(identity, role)

    def _build(self, identity: Identity, role: str) -> None:
        assert self._trust.descriptor is not None
        index = StoreLookup(self._store)
        common = (self._trust, self.ledger, self._peer_id)
        if self._peer_id in self._trust.descriptor.authorities:
            try:
                self.coordinator = Coordinator(
                    *common, identity.sign, secrets.randbelow, index, ballot=self._store.state(BALLOT_KEY)
                )
            except StorageError as error:
                logger.error("%s: this key must not vote; let the owner promote another one", error)
            else:
                self.machines["coordinator"] = self.coordinator
        if role == "trainer":
            try:
                own = self._store.state(OWN_KEY)
                self.rounds = Rounds(*common, identity.sign, secrets.randbelow, index, own=own)
            except StorageError as error:
                # A second contribution to a round is refused by its coordinator: nothing is counted twice.
                logger.warning("%s: what was sent before is learnt from receipts", error)
                self.rounds = Rounds(*common, identity.sign, secrets.randbelow, index)
            self.machines["rounds"] = self.rounds
            if self.coordinator is not None:
                self.machines["listener"] = Listener(self._trust, self._peer_id, secrets.randbelow, index)
        else:
            self.machines["onlooker"] = Onlooker(*common, secrets.randbelow)

    def _sort_records(self) -> None:
        """Put right what a crash left between storing or releasing records and saving the ledger that names them.

        An own contribution that the ledger does not name yet may have been promised: it is taken in. Other records
        nobody names were released.
        """
        kept = {record_digest(signed) for signed in self.ledger.records()}
        newest = _read_newest(self._store)
        if newest is not None:
            kept.add(newest)
        named, orphaned = set[Digest](), set[Digest]()
        orphans: list[Digest] = []
        for kind in _KINDS:
            for data in self._store.records_of_type(kind.TYPE):
                signed = decode_signed(data)
                record: _RoundRecord = decode_value(kind, signed.payload)
                blob_ids = set() if isinstance(record, Receipt) else {record.blob_id}
                if record_digest(signed) in kept or self._takes_in(record, signed):
                    named |= blob_ids
                else:
                    orphaned |= blob_ids
                    orphans.append(record_digest(signed))
        if orphans:
            self._store.release(orphaned - named, orphans, 0.0)

    def _takes_in(self, record: _RoundRecord, signed: SignedRecord) -> bool:
        is_own = isinstance(record, Contribution) and record.peer_id == self._peer_id
        if not is_own or record.round_index < self.ledger.next_round_index:
            return False
        self.ledger.accept_listed(signed)
        return True

    # Into the node

    def bind(self, driver: Driver) -> None:
        """Learn how to reach the machines."""
        self._driver = driver

    def _require_driver(self) -> Driver:
        assert self._driver is not None
        return self._driver

    @property
    def handlers(self) -> Mapping[type[Effect], Handler]:
        """How the effects of these machines are executed, beside those that every machine has."""
        return self._desk.table()

    def hook(self, take_up: Callable[[], Awaitable[bool]]) -> RoundsHook:
        """Return what local processes may ask about rounds.

        Args:
            take_up: Gives a run without an outer algorithm one, if it may; says whether it did.
        """

        async def settings() -> local.RoundSettingsReply:
            if not shape_of(self._trust.descriptor, self._peer_id):
                await take_up()
            descriptor = self._trust.descriptor
            assert descriptor is not None
            if not shape_of(descriptor, self._peer_id):
                raise RemoteProtocolError(
                    "no-rounds",
                    f"the run {descriptor.name} names no outer algorithm: its owner makes one that does with "
                    "'pulsenet run create NAME --algorithm pulseloco'",
                )
            return local.RoundSettingsReply(descriptor.algorithm, descriptor.constants, self._peer_id)

        return RoundsHook(
            desk=self._desk,
            settings=settings,
            check_masters=self._check_masters,
            make_blobs=lambda: RoundBlobs(self._store, self._left),
            on_damage=self._begin_again,
            on_residual=lambda norm: self._note(residual_norm=norm),
            threads=self._threads,
            metrics=self._metrics,
        )

    async def _check_masters(self, table: ParameterTable, self_test: Digest) -> None:
        if self.shape != shape_of(self._trust.descriptor, self._peer_id):
            # The process finds the machines that are meant for it when it comes back.
            raise UnavailableError("the machines of this node are about to be built anew")
        await check_masters(
            self._store,
            self._trust,
            self._peer_id,
            table,
            self_test,
            # Until a round is final, nothing rests on the masters of the first attempt.
            has_rounds=self.ledger.next_round_index > 0,
            metrics=self._metrics,
        )
        self._params = table.element_count

    def _tell_pace(self, measured: Measured) -> None:
        """Show how the process divides its time, and how ``pulsenet plan`` would have it."""
        descriptor, final = self._trust.descriptor, self.ledger.final(self.ledger.next_round_index - 1)
        predicted, link = None, self._find_link()
        if link is not None and descriptor is not None and final is not None:
            predicted = predict(
                OuterSettings.from_constants(descriptor.algorithm, descriptor.constants),
                link,
                params=self._params,
                peer_count=len(final.receipt.members),
                work_seconds=measured.work_seconds,
            )
        self._note(utilization_ratio=measured.utilization, utilization_predicted_ratio=predicted)

    def _begin_again(self) -> None:
        """Chunks of a round's blob rotted on the disk: let the machines fetch what is not there any more."""
        for name in self.machines.keys() & {"coordinator", "rounds"}:
            self._require_driver().post_to(name, StoreFailed(None, "damaged"))

    # What peers ask

    async def answer(self, peer_id: PeerId, request: RoundPush | GetRounds | GetAggregates | MixingRequest) -> Message:
        """Answer a peer's request about rounds: what it pushes is shown to the machines first."""
        if not self.shape or isinstance(request, MIXING_REQUESTS):
            return Refusal("unavailable", "this run has no rounds", retry_after_ms=UNAVAILABLE_RETRY_MS)
        if not isinstance(request, GetRounds | GetAggregates):
            if self._waiting_count >= PUSHES_WAITING_MAX:
                return Refusal("busy", "others are being heard", retry_after_ms=BUSY_RETRY_MS)
            self._waiting_count += 1
            try:
                await self._require_driver().show(event_of(request, peer_id))
            finally:
                self._waiting_count -= 1
        find_verdict = None if self.coordinator is None else self.coordinator.verdicts.find
        return respond_to_round(request, self.ledger, find_verdict)


def restore_ledger(store: Store, trust: Trust) -> tuple[Ledger, bool]:
    """Return the ledger of the node's last life, and whether it is whole: a damaged one is learnt anew from peers."""
    try:
        return Ledger.restore(trust, store.state(LEDGER_KEY), store.record), True
    except StorageError as error:
        logger.warning("%s: the rounds are learnt anew from peers", error)
        return Ledger(trust), False


def _read_newest(store: Store) -> Digest | None:
    """Return the receipt that this authority stored last."""
    try:
        newest = decode_ballot(store.state(BALLOT_KEY)).newest
    except StorageError:
        return None  # said aloud where the coordinator is built
    return None if newest is None else newest.digest
