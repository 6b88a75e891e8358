"""The seam between the outer optimizer and whatever carries contributions between trainers.

The exchange decides what a round made of this trainer's work and which moves its state makes; the optimizer makes
them. Between two moves the exchange looks at the state through :class:`StateView`, so that it can pass on its root,
serve it to joiners, and decode what others sent against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from pulsenet.ids import Digest
from pulsenet.outer.contribution import Contribution, Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.settings import OuterSettings
from pulsenet.outer.state_anchor import Beside
from pulsenet.tensors.params import ParameterTable


class Outcome(StrEnum):
    """What a round made of one trainer's work."""

    COUNTED = "counted"
    """The final receipt lists it."""
    MISSED = "missed"
    """The final receipt does not list it: absent or late. Nothing of it is lost."""
    REJECTED = "rejected"
    """Its content was refused."""
    DROPPED = "dropped"
    """Missed too often in a row, or made from a state that is not the run's: the residual is given up as well."""
    DEFERRED = "deferred"
    """No round can be closed now: go on with inner steps and offer a new contribution later."""


class Aggregate(Protocol):
    """The combined contributions of one round, read once, ascending by tensor, while the state is stepped."""

    @property
    def contributor_count(self) -> int:
        """Contributions combined, at least 1."""

    def entries(self, tensor_index: int) -> Entries:
        """Return what the round moves one tensor by; positions not listed are zero.

        Asked before that tensor's theta is stepped.
        """


@dataclass(frozen=True, slots=True, eq=False)
class FinalRound:
    """A round whose receipt is final: a move by one outer step."""

    round_index: int
    base_state_root: Digest
    """Root of the state that it steps from."""
    aggregate: Aggregate | None
    """``None`` if the receipt lists nobody: the state stays, the round index rises."""
    own: Contribution | None = None
    """This trainer's contribution if the receipt lists it, perhaps sent by an earlier life of the process."""
    own_scale: float = 1.0
    """The FP32 scale that the receipt gives it."""
    outcome: Outcome = Outcome.MISSED
    """What becomes of this trainer's work of the round, whether the process still holds it or not."""


class StateAnchor(Protocol):
    """A whole outer state, read tensor by tensor."""

    @property
    def round_index(self) -> int:
        """Rounds stepped to reach it."""

    @property
    def state_root(self) -> Digest:
        """Its root."""

    def tensors(self) -> Iterable[tuple[int, FP32s, Beside]]:
        """Yield position, theta and outer momentum of each tensor, flat, in table order; under ``ddp`` the inner
        optimizer's state in place of the momentum.

        The values were hashed and found to have the root.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Restoration:
    """A move to another state of the run, because no final round leads on from the own one."""

    anchor: StateAnchor
    drops_residual: bool = True
    """Whether what was held back is of a state that was wrong, or not known; else it stays."""


Move = FinalRound | Restoration


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """What :meth:`Exchange.submit` comes back with."""

    outcome: Outcome
    rounds: Iterable[Move] = ()
    """Moves from the contribution's own round on, to be made one by one as they are yielded: asking for the next says
    that the one before is done. Empty if ``deferred``, or if nobody's contribution could be counted.

    Asking for a further one may raise :class:`pulsenet.errors.UnavailableError`; those before are then done."""
    reason: str = ""
    """Stable code, if not counted."""
    inner_steps: int = 1
    """If deferred: inner steps after which to offer again."""
    payload_size_bytes: int = 0
    """Of the contribution as it travels; 0 if nothing was sent anywhere."""


class StateView(Protocol):
    """The outer state of a trainer as its exchange may read it during a call, or between two moves."""

    @property
    def round_index(self) -> int:
        """Rounds stepped so far."""

    @property
    def state_root(self) -> Digest | None:
        """Root of the state; ``None`` while it is not whole, because a move broke off."""

    def theta(self, tensor_index: int) -> FP32s:
        """Return theta of one tensor, flat, in host memory; may share the state's."""

    def momentum(self, tensor_index: int) -> Beside:
        """Return the outer momentum of one tensor, likewise; under ``ddp`` the inner optimizer's state as bytes."""


class Exchange(Protocol):
    """How one trainer meets the others. One instance a trainer; calls come from one thread.

    Every method may raise :class:`pulsenet.errors.UnavailableError`; the same call may then be made again.
    """

    @property
    def settings(self) -> OuterSettings:
        """Return the run's outer algorithm and constants."""

    def open(self, table: ParameterTable, self_test: Digest, state: StateView) -> None:
        """Say which masters this trainer has, that its arithmetic is sound, and where its state can be read.

        Raises:
            ConfigError: the run has other masters.
        """

    def submit(self, contribution: Contribution) -> RoundResult:
        """Store and send a contribution, and wait until its round's receipt is final.

        Submitting the same contribution again after an error or a restart is the same as waiting on.
        """

    def abstain(self, round_index: int, reason: str) -> RoundResult:
        """Take part in a round without a contribution, because the own content is not fit to be sent."""

    def catch_up(self) -> Iterable[Move]:
        """Return the moves from the state held to the newest one of the run, as those of a :class:`RoundResult`."""

    def note_residual(self, norm: float) -> None:
        """Take the Euclidean norm of what the gate holds back after a round, for whoever watches. Never raises for
        trouble with the network or the daemon."""

    def publish(self, model: torch.nn.Module, round_index: int) -> None:
        """Make the weights after a round the run's next version, if that falls to this trainer. Never raises for
        trouble with the network or the daemon: training goes on, and the next round's version holds the same."""
