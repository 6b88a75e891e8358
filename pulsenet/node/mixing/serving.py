"""What a trainer answers about mixing: its shares of a round, whether it took a mean, and a state for joiners."""

from __future__ import annotations

from collections.abc import Mapping

from pulsenet import limits
from pulsenet.chain.ledger import Ledger
from pulsenet.chain.records import ShareKind
from pulsenet.chain.rosters import Rosters
from pulsenet.ids import PeerId
from pulsenet.node.mixing.everybody import EverybodyWork
from pulsenet.node.mixing.journal import Journal
from pulsenet.node.mixing.pair import PairWork
from pulsenet.node.mixing.work import Work
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings
from pulsenet.wire.messages import GetShares, RosterReply, SharesReply

Works = Mapping[Job, Work]


def reply_roster(ledger: Ledger, rosters: Rosters) -> RosterReply:
    """Answer ``GetRoster``, after the machines saw who asked."""
    votes = () if ledger.mandate is None else ledger.mandate.votes
    return RosterReply(votes, rosters.records())


class Serving:
    """The pure part of answering ``GetShares``.

    Args:
        journal: What was taken and signed.
        settings: Of the run.
    """

    def __init__(self, journal: Journal, settings: MixingSettings) -> None:
        self._journal = journal
        self._settings = settings
        self._is_asked = False

    def take_asked(self) -> bool:
        """Say whether a joiner asked for a state since the last call, and there was none to offer."""
        asked, self._is_asked = self._is_asked, False
        return asked

    def reply(
        self,
        request: GetShares,
        asker: PeerId,
        works: Works,
        before: Works,
        state: tuple[int, bytes] | None,
        *,
        is_attached: bool,
    ) -> SharesReply:
        """Answer one request.

        Args:
            request: What is asked.
            asker: Who asks; it is told what is for it.
            works: Jobs of the open round.
            before: Jobs of the one before.
            state: What is offered to joiners, and its round.
            is_attached: Whether a training process is there that holds a state.
        """
        open_round = self._journal.round_index
        if request.round_index is None:
            shares = self._offer(works, before, state)
        else:
            shares = self._find_shares(request.round_index, request.job, asker, works, before)
        start = request.slice_index if request.round_index is None else 0
        return SharesReply(
            round_index=open_round if is_attached else None,
            known_from=self._journal.known_from,
            is_open=self._is_open(request, works),
            shares=shares[start : start + limits.SHARES_PER_REPLY_MAX],
        )

    def _is_open(self, request: GetShares, works: Works) -> bool:
        """Say whether this node may still take something in a job of a round."""
        open_round = self._journal.round_index
        if request.round_index is None or request.job not in tuple(Job):
            return False
        if open_round is None or request.round_index > open_round:
            return True
        if request.round_index < open_round:
            return False
        # What an earlier life of this machine, or another training process, had begun is over.
        work = works.get(Job(request.job))
        return work is not None and work.result is None

    def _find_shares(self, round_index: int, job: int, asker: PeerId, works: Works, before: Works) -> tuple[bytes, ...]:
        agreed = self._journal.exchange(round_index, job)
        if agreed is not None and agreed.partner == asker:
            return (agreed.share,)
        found: list[bytes] = []
        for work in (*works.values(), *before.values()):
            if work.bench.round_index != round_index or int(work.job) != job or asker not in work.bench.known.members:
                continue
            if isinstance(work, PairWork):
                # The higher key's part is said with what it agreed to, above; before, there is at most its hint.
                kind = ShareKind.PART if work.bench.peer_id < asker else ShareKind.HINT
                own = work.shown.get((kind, 0)) if work.partner == asker else None
                found += [] if own is None else [own[1]]
            else:
                assert isinstance(work, EverybodyWork), "there are two kinds of work"
                found += work.parts_for(asker)
            found += [record for (kind, _), (_, record) in work.shown.items() if kind is ShareKind.MEAN]
        return tuple(found)

    def _offer(self, works: Works, before: Works, state: tuple[int, bytes] | None) -> tuple[bytes, ...]:
        """Return the newest state there is: a mean that all members hold, or this node's own z."""
        for mix1 in (works.get(Job.MIX1), before.get(Job.MIX1)):
            if mix1 is None:
                continue
            is_whole = not self._settings.mixing_gate and isinstance(mix1, EverybodyWork)
            means = mix1.means() if is_whole and isinstance(mix1, EverybodyWork) else ()
            if means:
                return means
            if self._settings.variant.mix1 is MixingKind.PAIR and mix1.own:
                return (mix1.show(ShareKind.PART, 0, mix1.own[0])[1],)
        open_round = self._journal.round_index
        is_old = state is None or open_round is None or state[0] + 1 < open_round
        # None of this round can be older than the one before; a new one is there when the next round opens.
        self._is_asked |= is_old
        return () if state is None else (state[1],)
