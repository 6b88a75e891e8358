"""The seam between the outer optimizer and whatever carries contributions between trainers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable


class Outcome(StrEnum):
    """What a round made of one trainer's contribution."""

    COUNTED = "counted"
    """The final receipt lists it."""
    MISSED = "missed"
    """The final receipt does not list it: absent or late. Nothing of it is lost."""
    REJECTED = "rejected"
    """Its content was refused."""
    DEFERRED = "deferred"
    """Nothing was sent, because no round is open: go on with inner steps and offer a new contribution later."""


class Aggregate(Protocol):
    """The combined contributions of one round, read tensor by tensor."""

    @property
    def contributor_count(self) -> int:
        """Contributions combined, at least 1."""

    def entries(self, tensor_index: int) -> Entries:
        """Return what the round moves one tensor by; positions not listed are zero."""


@dataclass(frozen=True, slots=True, eq=False)
class FinalRound:
    """A round whose receipt is final."""

    round_index: int
    base_state_root: Digest
    """Root of the state that it steps from."""
    aggregate: Aggregate | None
    """``None`` if the receipt lists nobody: the state stays, the round index rises."""
    own: Contribution | None = None
    """This trainer's contribution if the receipt lists it."""
    own_scale: float = 1.0
    """The FP32 scale that the receipt gives it."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """What :meth:`Exchange.submit` comes back with."""

    outcome: Outcome
    rounds: tuple[FinalRound, ...] = ()
    """Final rounds from the contribution's own on, ascending without gaps. Empty if ``deferred``, or if nobody's
    contribution could be counted."""
    reason: str = ""
    """Stable code, if missed, rejected or deferred."""


class StateAnchor(Protocol):
    """A whole outer state, read tensor by tensor."""

    @property
    def round_index(self) -> int:
        """Rounds stepped to reach it."""

    @property
    def state_root(self) -> Digest:
        """Its root."""

    def read(self, tensor_index: int) -> tuple[FP32s, FP32s]:
        """Return theta and outer momentum of one tensor, flat."""


class Exchange(Protocol):
    """How one trainer meets the others. One instance a trainer; calls come from one thread.

    Every method may raise :class:`~pulsenet.errors.UnavailableError`; the same call may then be made again.
    """

    @property
    def settings(self) -> OuterSettings:
        """Return the run's outer algorithm and constants."""

    def open(self, table: ParameterTable, self_test: Digest) -> None:
        """Say which masters this trainer has, and that its arithmetic is sound.

        Raises:
            ConfigError: the run has other masters.
        """

    def submit(self, contribution: Contribution) -> RoundResult:
        """Store and send a contribution, and wait until its round's receipt is final.

        Submitting the same contribution again after an error or a restart is the same as waiting on.
        """

    def abstain(self, round_index: int, reason: str) -> RoundResult:
        """Take part in a round without a contribution; the outcome is ``rejected`` with that reason."""

    def catch_up(self, round_index: int) -> tuple[FinalRound, ...]:
        """Return the rounds that are final already, from ``round_index`` on, without waiting for more.

        Raises:
            UnavailableError: That far back nothing is kept: fetch a state anchor.
        """

    def fetch_state(self) -> StateAnchor | None:
        """Return the newest state anchor, ``None`` if there is none yet."""

    def offer_state(self, anchor: StateAnchor) -> None:
        """Take a state anchor, read during the call only; offered every ``state_anchor_interval`` rounds."""
