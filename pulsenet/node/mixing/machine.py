"""A trainer's part in mixing, as a machine: open rounds, show parts, take means, and never wait for longer than agreed.

The training process holds every array and the shell every blob; this machine moves names of them between members. It
promises little and keeps that across restarts: one share of a kind in each job, since no round is opened twice or gone
on in by another life, and in a pair's exchange who took the mean first (``Journal``). Who comes late, lies or dies
costs the others what it would have given, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.rosters import KnownRoster, Rosters
from pulsenet.chain.rules import STATE_JOB
from pulsenet.chain.signing import decode_signed, record_digest
from pulsenet.errors import RemoteProtocolError, TrustError
from pulsenet.ids import Digest, PeerId
from pulsenet.node.effects import Count, Effect, Release, Report, ShowToMachines
from pulsenet.node.events import Event, PeerConnected, ReplyReceived, RequestFailed, TermSeen
from pulsenet.node.fetch import StoreIndex
from pulsenet.node.ledger_machine import LedgerMachine
from pulsenet.node.machine import Seat
from pulsenet.node.mixing.asking import Asking
from pulsenet.node.mixing.blobs import Blobs
from pulsenet.node.mixing.contact import RosterContact
from pulsenet.node.mixing.debts import Debts
from pulsenet.node.mixing.effects import JobPlan, MixReady, OpenRound, StartMixing, StoreState
from pulsenet.node.mixing.events import (
    AdoptFailed,
    MixingAttached,
    MixingLost,
    PartFailed,
    PartsCombined,
    PartSlice,
    PartStored,
    PresenceEnded,
    ProbeMade,
    ResultWanted,
    RosterSeen,
    RoundWanted,
    ShareSeen,
    StateStored,
)
from pulsenet.node.mixing.inbox import Inbox
from pulsenet.node.mixing.joining import Joining
from pulsenet.node.mixing.journal import Journal, Stand
from pulsenet.node.mixing.maker import RoundMaker, Tools
from pulsenet.node.mixing.outbox import Outbox
from pulsenet.node.mixing.prober import Prober
from pulsenet.node.mixing.reach import Reach
from pulsenet.node.mixing.report import make_report
from pulsenet.node.mixing.serving import Serving
from pulsenet.node.mixing.work import Work
from pulsenet.node.verdicts import Verdicts
from pulsenet.outer.mixing.settings import Job, MixingSettings
from pulsenet.wire.messages import GetShares, RosterReply, SharesReply
from pulsenet.wire.schema import decode_value

FIRST_ROSTER_SECONDS: Final = 15.0
ROSTER_SECONDS: Final = 3.0
"""How long the opening of a round waits for a roster that names it: the first one ever, and later ones. One that did
not come is not waited for again."""


class Mixing(LedgerMachine):
    """The machine of a trainer in a run whose algorithm is ``gossip``.

    Args:
        seat: The node's; machines of one node share its rules and its ledger.
        rosters: By which rounds are mixed; shared likewise.
        settings: Of the run.
        index: What the store holds.
        journal: What was last saved under ``MIXING_KEY``.

    Raises:
        StorageError: ``journal`` is damaged.
    """

    def __init__(
        self,
        seat: Seat,
        rosters: Rosters,
        settings: MixingSettings,
        index: StoreIndex,
        *,
        journal: bytes | None = None,
    ) -> None:
        super().__init__(seat)
        self._rosters, self._settings = rosters, settings
        self._journal = Journal(journal)
        rosters.restore(self._journal.stored_rosters)
        courier = self._courier
        self._reach = Reach(courier)
        self._contact = RosterContact(seat, courier)
        self._inbox, self._outbox = Inbox(), Outbox(courier)
        self._blobs = Blobs(seat.draw, index, courier.take_request_id)
        self._debts = Debts(self._journal, courier)
        self._prober = Prober(seat, rosters, settings, courier)
        tools = Tools(self._inbox, self._outbox, self._blobs, self._journal, self._reach)
        self._maker = RoundMaker(seat, settings, tools)
        self._attached: MixingAttached | None = None
        self._joining: Joining | None = None
        self._opening: tuple[int, float] | None = None
        """The round that is wanted, and until when its roster is waited for."""
        self._opened: OpenRound | None = None
        self._works: dict[Job, Work] = {}
        self._before: dict[Job, Work] = {}
        """Jobs of the round before, of which others may still ask."""
        self._told: set[Job] = set()
        self._asking = Asking(courier)
        self._hopes = True
        self._state: tuple[int, bytes] | None = None
        """The state this node offers, and its round."""
        self._state_ordered: int | None = None
        self._heard_late: list[Effect] = []
        self._started: StartMixing | None = None
        self._reported: Report | None = None
        self._serving = Serving(self._journal, settings)
        self.verdicts = Verdicts()
        """What became of shares that were pushed here."""

    @property
    def round_index(self) -> int | None:
        """The round that is open, or else the newest that was opened by a roster."""
        return self._journal.round_index if self._opened is None else self._opened.round_index

    @property
    def works(self) -> dict[Job, Work]:
        """The jobs of the open round that this node takes part in."""
        return dict(self._works)

    @property
    def kept_count(self) -> int:
        """Shares of others, pushes and blobs that are kept: what peers can make this node hold."""
        return len(self._inbox) + len(self._outbox) + self._journal.blob_count

    def stands(self) -> dict[tuple[int, int], Stand]:
        """Return where this node stands in the exchanges it remembers, by round and job."""
        return self._journal.stands()

    def reply_shares(self, request: GetShares, asker: PeerId) -> SharesReply:
        """Answer ``GetShares``."""
        # Who looks for a state itself has none to wait for, whatever round its last life was in.
        is_there = self._attached is not None and self._joining is None
        if self._is_unsaved:
            # What is not stored may be forgotten: nothing of it is said.
            return SharesReply(self.round_index if is_there else None, 0, True, ())
        return self._serving.reply(request, asker, self._works, self._before, self._state, is_attached=is_there)

    def _fetch(self, event: Event, now: float) -> list[Effect]:
        self._reach.handle(event, now)
        return self._blobs.handle(event, now)

    def _note_refusal(self, event: Event, error: RemoteProtocolError | TrustError) -> list[Effect]:
        self.verdicts.note(event, error.code)
        return super()._note_refusal(event, error)

    def _take(self, event: Event, now: float) -> list[Effect]:
        match event:
            case PeerConnected(peer_id):
                self._debts.note_connected(peer_id)
                self._contact.ask_soon(now)
            case TermSeen(votes, _):
                self._ledger.accept_mandate(votes)
                self._contact.ask_soon(now)
            case RosterSeen():
                self._hopes = True
            case ShareSeen():
                self.verdicts.note(event, self._take_share(event, now))
                late, self._heard_late = self._heard_late, []
                return late
            case ReplyReceived(_, _, RosterReply() as reply) if self._contact.is_ours(event):
                return self._take_rosters(reply)
            case ReplyReceived() | RequestFailed():
                return self._take_answer(event, now)
            case _:
                return self._take_training(event, now)
        return []

    # What others say

    def _take_rosters(self, reply: RosterReply) -> list[Effect]:
        if reply.votes:
            self._ledger.accept_mandate(reply.votes)
        effects: list[Effect] = []
        for record in reply.rosters:
            try:
                if self._rosters.accept(record):
                    self._hopes = True
            except TrustError as error:
                # A roster of an earlier term may have been good when it was signed; it proves nothing now.
                effects.append(Count("rejected", error.code))
        return effects

    def _take_answer(self, event: ReplyReceived | RequestFailed, now: float) -> list[Effect]:
        outcome = self._outbox.handle(event, now)
        if outcome is not None:
            if outcome.code == "roster":
                self._contact.ask_soon(now, outcome.receiver)
            return [effect for work in self._works.values() for effect in work.note_outcome(outcome, now)]
        effects = self._debts.handle(event, now) + self._prober.handle(event, now)
        if self._joining is not None:
            effects += self._joining.handle(event, now)
        if isinstance(event, ReplyReceived) and isinstance(event.reply, SharesReply):
            for record in event.reply.shares:
                # What was asked for is judged as what is pushed; a state to begin with is the joiner's.
                if decode_value(Share, decode_signed(record).payload).job != STATE_JOB and self._works:
                    self._take_share(ShareSeen(record, event.peer_id), now)
        return effects

    def _take_share(self, event: ShareSeen, now: float) -> str:
        """Judge a share, keep it if it is for this node, and return the code of its answer."""
        signed = decode_signed(event.record)
        peek = decode_value(Share, signed.payload)
        known = self._rosters.get(peek.roster)
        if known is None:
            self._contact.ask_soon(now, event.source)
            return "roster"
        share = self._trust.accept_share(signed, known.roster, known.digest)
        if share.job == STATE_JOB or self._peer_id == share.peer_id:
            return "unexpected"
        round_index, open_round = share.round_index, self._journal.round_index
        if self._is_over(round_index):
            return self._judge_old(share)
        self._inbox.note_heard(share.peer_id, round_index)
        if self._roster_of(round_index) != known:
            self._contact.ask_soon(now, event.source)
            return "roster"
        if not self._maker.is_for_me(share, known):
            return "unexpected"
        work = self._works.get(Job(share.job)) if round_index == open_round else None
        refusal = "" if work is None else work.judge(share)
        if refusal:
            return refusal
        open_round = -1 if open_round is None else open_round
        if not self._inbox.may_keep(round_index, open_round):
            return "early"
        return self._inbox.add(share, record_digest(signed), event.record, open_round)

    def _is_over(self, round_index: int) -> bool:
        """Say whether nothing more is taken here in a round: it ends with the process that opened it, or the next."""
        last = self._journal.round_index
        is_open = self._opened is not None and self._opened.round_index == last
        return last is not None and (round_index < last or (round_index == last and not is_open))

    def _judge_old(self, share: Share) -> str:
        """Judge a share of a round that is over here."""
        if share.kind is ShareKind.TAKEN:
            self._heard_late = self._debts.take_taken(share)
            return ""
        exchange = self._journal.exchange(share.round_index, share.job)
        is_agreed = exchange is not None and exchange.partner == share.peer_id
        return "" if is_agreed or share.round_index < self._journal.known_from else "round"

    def _roster_of(self, round_index: int) -> KnownRoster | None:
        if round_index == self._journal.round_index:
            return None if self._journal.roster is None else self._rosters.get(self._journal.roster)
        return self._rosters.find(round_index)

    # What the training process says

    def _take_training(self, event: Event, now: float) -> list[Effect]:
        self._track(_name_kept(event))
        match event:
            case MixingAttached():
                return self._attach(event, now)
            case MixingLost():
                self._attached = self._joining = self._opening = self._opened = self._started = None
                self._works, self._before, self._told = {}, {}, set()
                return [ShowToMachines(PresenceEnded())]
            case AdoptFailed(reason) if self._joining is not None:
                self._joining.refuse()
                return [Count("rejected", reason)]
            case RoundWanted(round_index) if self._attached is not None:
                self._joining = None
                wait_seconds = FIRST_ROSTER_SECONDS if self._rosters.newest is None else ROSTER_SECONDS
                self._opening = (round_index, now + (wait_seconds if self._hopes else 0.0))
                self._contact.ask_now(now)
            case PartStored(round_index, job):
                effects = self._debts.settle(event.debts)
                work = self._find_work(round_index, job)
                return effects if work is None else effects + work.take_part(event, now)
            case PartFailed(round_index, job):
                work = self._find_work(round_index, job)
                return [] if work is None else work.fail_part(event)
            case ResultWanted(round_index, job):
                work = self._find_work(round_index, job)
                if work is None:
                    reason = "" if round_index == self.round_index else "over"
                    return [MixReady(round_index, job, (), reason)]
                work.want(now)
            case StateStored(round_index, state):
                self._offer_state(round_index, state)
            case ProbeMade():
                return self._prober.take(event, now)
            case _:
                return [effect for work in self._works.values() for effect in work.take_answer(event, now)]
        return []

    def _track(self, blob_ids: Iterable[Digest]) -> None:
        """Keep blobs as long as those of the round that is open, whichever they are of."""
        round_index = self._journal.round_index or 0
        for blob_id in blob_ids:
            self._journal.track(round_index, blob_id)

    def _find_work(self, round_index: int, job: Job) -> Work | None:
        return self._works.get(job) if round_index == self._journal.round_index else None

    def _attach(self, event: MixingAttached, now: float) -> list[Effect]:
        self._attached, self._opening, self._opened, self._started = event, None, None, None
        self._works, self._before, self._told = {}, {}, set()
        self._joining = None
        if event.round_index is None:
            common = (self._trust, self._rosters, self._courier, self._contact, self._blobs, self._peer_id)
            self._joining = Joining(*common, event.element_count, now)
            self._contact.ask_soon(now)
            return []
        self._started = StartMixing(max(event.round_index, self._next_round()))
        return [self._started]

    def _next_round(self) -> int:
        """Return the earliest round that may be mixed in: above the last one, and not behind the others."""
        last = self._journal.round_index
        return max(0 if last is None else last + 1, self._inbox.heard_max(self._rosters.end_round))

    def _offer_state(self, round_index: int, state: PartSlice) -> None:
        known = self._rosters.find(round_index)
        if known is None or self._peer_id not in known.members:
            return
        self._state = (round_index, self._maker.seal_state(round_index, known, state))

    # Opening a round

    def _open_if_due(self, now: float) -> list[Effect]:
        if self._opening is None:
            return []
        wanted, until = self._opening
        round_index = max(wanted, self._next_round())
        known = self._rosters.find(round_index)
        descriptor = self._trust.descriptor
        is_authority = descriptor is not None and self._peer_id in descriptor.authorities
        can_hope = known is None and now < until and (bool(self._courier.connected) or is_authority)
        if can_hope:
            return []
        if known is None and self._courier.connected:
            round_index = self._go_back(round_index)
            known = self._rosters.find(round_index)
        self._hopes = known is not None
        self._opening = None
        return self._open(round_index, known if known is not None and self._peer_id in known.members else None)

    def _go_back(self, round_index: int) -> int:
        """Return the round to open instead of one beyond every roster.

        Who trained alone for a while may be ahead of all others, and would be for ever: alone it is the faster. What it
        counted without a roster was mixed with nobody and is no promise, so it counts anew.
        """
        newest = self._rosters.newest
        if newest is None or round_index < self._rosters.end_round:
            return round_index
        due = max(self._next_round(), newest.roster.first_round)
        return due if newest.covers(due) else round_index

    def _open(self, round_index: int, known: KnownRoster | None) -> list[Effect]:
        self._before = self._works if self._journal.round_index is not None else {}
        members: frozenset[PeerId] = frozenset()
        if known is not None:
            self._journal.open(round_index, known.digest)
            members = frozenset(known.members)
        self._inbox.open(round_index, None if known is None else known.digest, members)
        self._outbox.forget_before(round_index - 1)
        self._works = {} if known is None else self._maker.make_works(round_index, known)
        self._told = set()
        self._asking.open()
        plans = {job: JobPlan(job, 0) for job in Job}
        for job, work in self._works.items():
            plans[job] = JobPlan(job, work.slice_count, self._debts.owed(job))
        self._opened = OpenRound(
            round_index=round_index,
            is_listed=known is not None,
            member_count=len(members) or 1,
            subset=() if known is None else known.roster.subset,
            is_probed=known is not None and self._prober.is_asked(round_index),
            mix1=plans[Job.MIX1],
            mix2=plans[Job.MIX2],
        )
        offered = set() if self._state is None else {_blob_of(self._state[1])}
        gone = self._journal.release_before(round_index - 1, offered)
        released: list[Effect] = [Release(gone, (), spares_versions=True)] if gone else []
        label = "listed" if known is not None else "unlisted"
        return [self._opened, *released, Count("mixing_rounds", label)]

    # What follows

    def _go_on(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._joining is not None and self._joining.started is None:
            effects += self._joining.update(now, self._next_round())
            self._started = self._joining.started
        effects += self._open_if_due(now)
        for job, work in self._works.items():
            effects += work.update(now)
            if work.result is not None and work.wanted_at is not None and job not in self._told:
                self._told.add(job)
                effects.append(work.result)
        wanted = {} if self._joining is None else self._joining.wants()
        self._track(wanted)
        for work in self._works.values():
            wanted |= work.wants()
        effects += self._blobs.set_wants(wanted)
        effects += self._blobs.pump(now)
        effects += self._outbox.pump(now)
        if self._attached is not None:
            told = self.round_index if self._opening is None else max(self._opening[0], self._next_round())
            is_joining = self._joining is not None
            told = None if is_joining else told
            effects += self._contact.poll(now, told, self._trust.descriptor, is_joining=is_joining)
            is_over = {job: work.result is not None for job, work in self._works.items()}
            effects += self._debts.ask(now, is_over, self._journal.round_index)
            effects += self._asking.ask(self._works, now)
            effects += self._order_state()
            effects += self._prober.pump(self._journal.round_index, now)
        records = self._rosters.records()
        if self._journal.is_changed or records != self._journal.stored_rosters:
            effects.append(self._journal.save(records))
        return effects

    def _order_state(self) -> list[Effect]:
        """Have z stored for joiners, once a round at most, if one asked and nothing newer is offered."""
        round_index = self._journal.round_index
        if not self._serving.take_asked() or round_index is None or self._state_ordered == round_index:
            return []
        self._state_ordered = round_index
        return [StoreState()]

    def _store_again(self) -> list[Effect]:
        self._reported = None
        return [self._journal.save(self._rosters.records()), *self._order_again()]

    def _order_again(self) -> list[Effect]:
        """Return every order that may have been lost behind something that the disk refused."""
        effects: list[Effect] = []
        if self._opened is not None:
            effects.append(self._opened)
        elif self._started is not None:
            effects.append(self._started)
        for job, work in self._works.items():
            effects += work.order_again()
            if job in self._told and work.result is not None:
                effects.append(work.result)
        return effects

    def _report(self, now: float) -> list[Effect]:
        phase = "idle" if self._attached is None else "waiting"
        if self._joining is not None and self._joining.started is None:
            phase = "joining"
        elif self._opening is not None:
            phase = "opening"
        elif self._opened is not None:
            phase = "mixing" if any(work.result is None for work in self._works.values()) else "training"
        is_alone = self._opened is not None and not self._opened.is_listed
        known = None if is_alone or self._journal.roster is None else self._rosters.get(self._journal.roster)
        report = make_report(phase, self.round_index, known, self._journal, self._rosters, self._works, self._inbox)
        if report == self._reported:
            return []
        self._reported = report
        return [report]

    def _wakes(self, now: float) -> list[float | None]:
        times = [self._blobs.next_wake(now), self._outbox.next_wake(now), self._debts.next_wake(now)]
        times += [work.next_wake(now) for work in self._works.values()]
        times.append(self._asking.next_wake(self._works, now))
        if self._attached is not None:
            times += [self._contact.next_wake(now), self._prober.next_wake(now)]
        if self._opening is not None:
            times.append(self._opening[1])
        if self._joining is not None:
            times.append(self._joining.next_wake(now))
        return times


def _name_kept(event: Event) -> tuple[Digest, ...]:
    """Return the blobs that the shell keeps until they are released, whatever became of what they were made for."""
    match event:
        case PartStored(_, _, slices):
            return tuple(part.blob_id for part in slices)
        case StateStored(_, state):
            return (state.blob_id,)
        case PartsCombined():
            return (event.blob_id,)
        case _:
            return ()


def _blob_of(record: bytes) -> Digest:
    return decode_value(Share, decode_signed(record).payload).blob_id
