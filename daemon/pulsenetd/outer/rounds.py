"""A node's part in the rounds of its run: every node follows them, and a trainer contributes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from pulsenet.chain.records import Aggregate, Contribution, Receipt, StateAnchor
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.errors import StorageError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.candidacy import BALLOT_KEY, decode_ballot
from pulsenet.node.coordinator import Coordinator
from pulsenet.node.effects import Effect
from pulsenet.node.events import StoreFailed
from pulsenet.node.mixing.respond import MIXING_REQUESTS, MixingRequest
from pulsenet.node.onlooker import Onlooker
from pulsenet.node.own_work import OWN_KEY
from pulsenet.node.rounds import Rounds
from pulsenet.node.verdicts import RoundPush
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable
from pulsenet.wire.messages import GetAggregates, GetRounds, Message, Refusal
from pulsenet.wire.schema import decode_value
from pulsenetd.driver import Handler
from pulsenetd.handlers.training import TrainingDesk
from pulsenetd.local.rounds import RoundsHook
from pulsenetd.logs import logger
from pulsenetd.outer.pace import Measured, Pace, predict
from pulsenetd.outer.part import OuterPart
from pulsenetd.storage.orphans import Needs
from pulsenetd.storage.store import Store

UNAVAILABLE_RETRY_MS: Final = 60_000

_KINDS: Final = (Contribution, Receipt, StateAnchor, Aggregate)


class RoundsPart(OuterPart):
    """The part of a node whose run has rounds, or no outer algorithm yet."""

    name = "rounds"
    coordinator: Coordinator | None

    def _build(self) -> None:
        self._params = 0
        """Of the masters that are trained here."""
        self.coordinator = None
        self.rounds: Rounds | None = None
        """``None`` unless this node is a trainer of a run with rounds."""
        self._desk = TrainingDesk(
            self._trust,
            self.ledger,
            self._peer_id,
            self._metrics,
            pace=Pace(self._tell_pace, self._monotonic),
            post=self._post,
            settle=lambda: self._require_driver().settle(self.name),
        )
        if self.shape:
            if self.is_whole:
                self._take_in_promised()
            self._add_machines()

    def _add_machines(self) -> None:
        seat, index = self._seat, self._store
        self.coordinator = self._add_voter(lambda ballot: Coordinator(seat, index, ballot=ballot))
        if self._is_trainer:
            try:
                self.rounds = Rounds(seat, index, own=self._store.state(OWN_KEY))
            except StorageError as error:
                # A second contribution to a round is refused by its coordinator: nothing is counted twice.
                logger.warning("%s: what was sent before is learnt from receipts", error)
                self.rounds = Rounds(seat, index)
            self.machines[self.name] = self.rounds
            self._add_listener()
        else:
            self.machines["onlooker"] = Onlooker(seat)

    def _take_in_promised(self) -> None:
        """Take in own contributions that the ledger does not name yet: they may have been promised before a crash."""
        for data in self._store.records_of_type(Contribution.TYPE):
            signed = decode_signed(data)
            record = decode_value(Contribution, signed.payload)
            if record.peer_id == self._peer_id and record.round_index >= self.ledger.next_round_index:
                self.ledger.accept_listed(signed)

    @property
    def needs(self) -> Needs:
        """What the ledger and the ballot name; where the ledger is lost, nothing tells what is still needed."""
        if not self.shape or not self.is_whole:
            return Needs()
        return Needs(_KINDS, frozenset(map(record_digest, self.ledger.records())) | _read_newest(self._store))

    @property
    def handlers(self) -> Mapping[type[Effect], Handler]:
        """How the effects of these machines are executed, beside those that every machine has."""
        return self._desk.table()

    def hook(self, take_up: Callable[[], Awaitable[bool]]) -> RoundsHook:
        """Return what local processes may ask; ``take_up`` as in :meth:`tell_settings`."""
        return RoundsHook(
            desk=self._desk,
            settings=lambda: self.tell_settings(take_up),
            check_masters=self.check_masters,
            make_blobs=self.make_blobs,
            on_damage=self._begin_again,
            on_residual=lambda norm: self._note(residual_norm=norm),
            threads=self._threads,
            metrics=self._metrics,
        )

    def _has_rounds(self) -> bool:
        # Until a round is final, nothing rests on the masters of the first attempt.
        return self.ledger.next_round_index > 0

    def _take_masters(self, table: ParameterTable) -> None:
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
        for name in self.machines.keys() & {"coordinator", self.name}:
            self._post(StoreFailed(None, "damaged"), name)

    async def answer(self, peer_id: PeerId, request: RoundPush | GetRounds | GetAggregates | MixingRequest) -> Message:
        """Answer a peer's request about rounds."""
        if not self.shape or isinstance(request, MIXING_REQUESTS):
            return Refusal("unavailable", "this run has no rounds", retry_after_ms=UNAVAILABLE_RETRY_MS)
        return await self._answer_round(peer_id, request)


def _read_newest(store: Store) -> frozenset[Digest]:
    """Return the receipt that this authority stored last, if there is one."""
    try:
        newest = decode_ballot(store.state(BALLOT_KEY)).newest
    except StorageError:
        return frozenset()  # said aloud where the coordinator is built
    return frozenset() if newest is None else frozenset([newest.digest])
