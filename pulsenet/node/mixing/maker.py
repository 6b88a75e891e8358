"""What a round is made of at one member: its jobs, by roster and variant, and the shares it signs in them."""

from __future__ import annotations

from dataclasses import dataclass

from pulsenet.chain.records import Share, ShareKind
from pulsenet.chain.rosters import KnownRoster
from pulsenet.chain.rules import STATE_JOB
from pulsenet.chain.signing import encode_signed, record_digest, seal
from pulsenet.ids import Digest
from pulsenet.node.machine import Seat
from pulsenet.node.mixing import everybody, pair
from pulsenet.node.mixing.blobs import Blobs
from pulsenet.node.mixing.events import PartSlice
from pulsenet.node.mixing.inbox import Inbox
from pulsenet.node.mixing.journal import Journal
from pulsenet.node.mixing.outbox import Outbox
from pulsenet.node.mixing.reach import Reach
from pulsenet.node.mixing.work import Bench, SlicePlace, Work
from pulsenet.outer.mixing.pairing import find_partner
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings, Vector


@dataclass(frozen=True, slots=True)
class Tools:
    """What outlives the rounds."""

    inbox: Inbox
    outbox: Outbox
    blobs: Blobs
    journal: Journal
    reach: Reach


class RoundMaker:
    """Makes the jobs of rounds.

    Args:
        seat: The node's.
        settings: Of the run.
        tools: What jobs work with.
    """

    def __init__(self, seat: Seat, settings: MixingSettings, tools: Tools) -> None:
        self._trust = seat.trust
        self._settings = settings
        self._peer_id = seat.peer_id
        self._sign = seat.sign
        self._tools = tools
        self._number = 0

    def make_works(self, round_index: int, known: KnownRoster) -> dict[Job, Work]:
        """Return the jobs of a round in which somebody else takes part.

        Args:
            round_index: The round.
            known: Its roster.
        """
        works: dict[Job, Work] = {}
        bench, settings = self._make_bench(round_index, known), self._settings
        if self._peer_id not in known.members or len(known.members) == 1:
            return works
        waits = {Job.MIX1: settings.mix1_wait_seconds, Job.MIX2: settings.mix2_wait_seconds}
        for job in Job:
            subset = known.roster.subset if job is Job.MIX2 and settings.variant.mixes_subset else ()
            partner = find_partner(known.digest, round_index, job, known.members, self._peer_id)
            match settings.variant.kind(job):
                case MixingKind.PAIR if partner is not None:
                    works[job] = pair.PairWork(bench, job, partner, subset=subset, wait_seconds=waits[job])
                case MixingKind.GLOBAL:
                    is_relative = job is Job.MIX1 and settings.gates(Vector.ITERATE, round_index)
                    works[job] = everybody.EverybodyWork(
                        bench, job, subset=subset, wait_seconds=waits[job], is_relative=is_relative
                    )
        return works

    def is_for_me(self, share: Share, known: KnownRoster) -> bool:
        """Say whether a share of a roster's round is for this node."""
        job = Job(share.job)
        if self._peer_id not in known.members:
            return False
        match self._settings.variant.kind(job):
            case MixingKind.PAIR:
                partner = find_partner(known.digest, share.round_index, job, known.members, self._peer_id)
                return pair.is_for_me(share, self._peer_id, partner)
            case MixingKind.GLOBAL:
                return everybody.is_for_me(share, self._peer_id, known.members)
        return False

    def seal_state(self, round_index: int, known: KnownRoster, state: PartSlice) -> bytes:
        """Return the encoded share that offers this node's z to joiners."""
        bench = self._make_bench(round_index, known)
        return self._seal(ShareKind.PART, bench, SlicePlace(STATE_JOB, 0, 1), state, b"", None)[1]

    def _make_bench(self, round_index: int, known: KnownRoster) -> Bench:
        tools = self._tools
        return Bench(
            peer_id=self._peer_id,
            round_index=round_index,
            known=known,
            inbox=tools.inbox,
            outbox=tools.outbox,
            blobs=tools.blobs,
            journal=tools.journal,
            reach=tools.reach,
            seal=self._seal,
            take_number=self._take_number,
        )

    def _take_number(self) -> int:
        self._number += 1
        return self._number

    def _seal(
        self,
        kind: ShareKind,
        bench: Bench,
        place: SlicePlace,
        part: PartSlice,
        contributors: bytes,
        mixed_root: Digest | None,
    ) -> tuple[Digest, bytes]:
        assert self._trust.descriptor is not None
        share = Share(
            run_id=self._trust.run_id,
            revision=self._trust.descriptor.revision,
            peer_id=self._peer_id,
            roster=bench.known.digest,
            round_index=bench.round_index,
            job=place.job,
            kind=kind,
            slice_index=place.slice_index,
            slice_count=place.slice_count,
            contributors=contributors,
            blob_id=part.blob_id,
            encoded_size_bytes=part.encoded_size_bytes,
            element_count=part.element_count,
            norm_bits=part.norm_bits,
            mixed_root=mixed_root,
        )
        signed = seal(share, self._sign, self._peer_id)
        return record_digest(signed), encode_signed(signed)
