"""Who mixes with whom, and who sums what: functions of the roster, so nobody has to ask (SPEC outer, "Matching").

Members are put in the order of a digest over the roster's seed, the round, the job and their key: a shuffle that any
language computes with BLAKE3 alone. Neighbours in it are partners; of an odd number the last mixes alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from pulsenet import limits
from pulsenet.errors import LocalProtocolError
from pulsenet.ids import PeerId, compute_digest
from pulsenet.outer.mixing.settings import Job

_DOMAIN: Final = b"pulsenet mixing pairs 1"
_PLACE: Final = struct.Struct("<QB")


def shuffle_members(seed: bytes, round_index: int, job: Job, members: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Return the members in the order of a job.

    Args:
        seed: Of the roster.
        round_index: Of the round.
        job: Each has an order of its own.
        members: In any order; each once.

    Raises:
        LocalProtocolError: nobody, or a member twice.
    """
    listed = sorted(members)
    if not listed or len(set(listed)) != len(listed):
        raise LocalProtocolError(f"{len(listed)} members, {len(set(listed))} different ones")
    head = _DOMAIN + len(seed).to_bytes(4, "little") + seed + _PLACE.pack(round_index, job)
    return tuple(sorted(listed, key=lambda member: compute_digest(head + member)))


def match_members(seed: bytes, round_index: int, job: Job, members: Iterable[PeerId]) -> tuple[tuple[PeerId, ...], ...]:
    """Return the groups of a pairwise job: pairs, and one member alone if their number is odd.

    The lower key of a pair comes first. Arguments and errors as of :func:`shuffle_members`.
    """
    order = shuffle_members(seed, round_index, job, members)
    return tuple(tuple(sorted(order[start : start + 2])) for start in range(0, len(order), 2))


def find_partner(seed: bytes, round_index: int, job: Job, members: Iterable[PeerId], me: PeerId) -> PeerId | None:
    """Return with whom ``me`` mixes in a pairwise job, ``None`` for nobody.

    Arguments and errors as of :func:`shuffle_members`; who is no member has no partner.
    """
    order = shuffle_members(seed, round_index, job, members)
    if me not in order:
        return None
    place = order.index(me) ^ 1
    return order[place] if place < len(order) else None


def choose_probers(seed: bytes, round_index: int, members: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """Return who answers the probe of a round: whole pairs of Mix1, and few enough for one coordinator.

    Arguments and errors as of :func:`shuffle_members`.
    """
    return shuffle_members(seed, round_index, Job.MIX1, members)[: limits.PROBERS_MAX]


SLICES_PER_OWNER_MAX: Final = 4
"""Slices of a global mean that one member owns: while later ones are on their way, earlier ones are summed and come
back. Otherwise every link would stand still until the slowest part of all is there."""

SLICES_MAX: Final = 32
"""Slices in all, for which several may have one owner: each is a signed share to every member."""


def count_slices(member_count: int) -> int:
    """Return into how many slices a global mean of so many members is cut."""
    return member_count * max(1, min(SLICES_PER_OWNER_MAX, SLICES_MAX // member_count))


def find_owner(slice_index: int, members: Sequence[PeerId]) -> PeerId:
    """Return who owns a slice; members in ascending order of keys.

    Slices of one owner lie side by side, so together they are as large as every other owner's, however few blocks the
    vector has.
    """
    return members[slice_index * len(members) // count_slices(len(members))]
