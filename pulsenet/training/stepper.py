"""Moves a trainer's outer state along the run's, by final rounds and state anchors.

A move that breaks off inside leaves the state torn, which is known from then on and never passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from pulsenet.errors import LocalProtocolError, UnavailableError
from pulsenet.ids import Digest
from pulsenet.outer.checks import Expected
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import FP32s
from pulsenet.outer.flush import FlushPlan
from pulsenet.outer.settings import OuterSettings
from pulsenet.outer.state_anchor import Beside
from pulsenet.training.exchange import FinalRound, Outcome, Restoration
from pulsenet.training.masters import Masters
from pulsenet.training.outer_state import OuterState

NO_ROOT: Final = Digest(bytes(32))
"""Stands where there is no state: on ranks other than 0."""


class Stepper:
    """The outer state, the round it is in, and its root; a :class:`pulsenet.training.exchange.StateView`.

    Args:
        masters: What the inner optimizer steps.
        settings: Of the run.
        state: Theta, residual and momentum; ``None`` on ranks other than 0, and under ``ddp``.
    """

    def __init__(self, masters: Masters, settings: OuterSettings, state: OuterState | None) -> None:
        self._masters = masters
        self._settings = settings
        self._flushes = FlushPlan(masters.table, settings)
        self.held = state
        self.round_index = 0
        """Rounds stepped so far."""
        self.contributor_count = 0
        """Contributions in the newest round stepped."""
        self._is_torn = False
        self.is_ahead = False
        """Whether the state moved and the local masters do not start from it yet; a torn one did."""
        self._root = NO_ROOT
        if state is not None:
            self.refresh_root()

    @property
    def holds_state(self) -> bool:
        """Whether there is a state whose root can be computed."""
        return self.held is not None

    @property
    def state(self) -> OuterState:
        """The three FP32 copies.

        Raises:
            LocalProtocolError: there are none.
        """
        if self.held is None:
            raise LocalProtocolError("only rank 0 holds an outer state, and under the algorithm ddp the masters are it")
        return self.held

    @property
    def state_root(self) -> Digest | None:
        """Root of the state; ``None`` while it is torn."""
        return None if self._is_torn else self._root

    @property
    def is_torn(self) -> bool:
        """Whether a move broke off inside: only another state of the run helps."""
        return self._is_torn

    def theta(self, tensor_index: int) -> FP32s:
        """Return theta of one tensor in host memory."""
        return self.state.read_theta(tensor_index)

    def momentum(self, tensor_index: int) -> Beside:
        """Return the outer momentum of one tensor in host memory."""
        return self.state.read_momentum(tensor_index)

    def gate(self, tensor_index: int, local: torch.Tensor) -> Entries:
        """Return what one tensor sends in the round it is in. Nothing changes."""
        flush = self._flushes.of(tensor_index, self.round_index)
        return self.state.gate(tensor_index, local, is_dense=self._settings.is_dense, flush=flush)

    def expected(self) -> Expected:
        """Return what every contribution of the round it is in must be; the state is whole."""
        root = self.state_root
        assert root is not None
        return Expected(
            table=self._masters.table,
            round_index=self.round_index,
            state_root=root,
            is_dense=self._settings.is_dense,
            norm_max=self._settings.norm_max,
        )

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what is held back."""
        return self.state.residual_norm()

    def refresh_root(self) -> None:
        """Compute the root again: the state was written from outside."""
        self._root = self._compute_root(self.round_index)
        self._is_torn = self.is_ahead = False

    def step(self, final: FinalRound, *, has_work: bool) -> None:
        """Settle the residual and do the outer step of a round, both or neither.

        Args:
            final: The round this trainer is in.
            has_work: Whether the masters hold inner steps of that round, to be settled with it.

        Raises:
            LocalProtocolError: a round that does not go on from here; nothing moved.
        """
        if final.round_index != self.round_index:
            raise LocalProtocolError(f"round {final.round_index} follows {self.round_index}")
        if final.base_state_root != self.state_root:
            raise LocalProtocolError(f"round {final.round_index} steps from another state than the one held")
        with self._moving():
            self._move(final, has_work=has_work)
            self.round_index += 1
            self._root = self._compute_root(self.round_index)
        self.contributor_count = 0 if final.aggregate is None else final.aggregate.contributor_count

    def restore(self, move: Restoration) -> None:
        """Replace theta and momentum by those of an anchor.

        Raises:
            UnavailableError: its values could not be read to the end, or changed since they were hashed; the state is
                torn.
        """
        with self._moving():
            self._take(move)
            self.round_index = move.anchor.round_index
            self._root = self._compute_root(self.round_index)
            if self._root != move.anchor.state_root:
                raise UnavailableError(f"the state anchor of round {self.round_index} was damaged while it was read")
        self.contributor_count = 0

    def restart(self) -> None:
        """Start a round: local masters from theta."""
        for index, local in enumerate(self._masters.tensors):
            self.state.restart(index, local)
        self._masters.write_parameters()
        self.is_ahead = False

    def _move(self, final: FinalRound, *, has_work: bool) -> None:
        for index, local in enumerate(self._masters.tensors):
            is_folded = has_work and final.outcome in (Outcome.COUNTED, Outcome.MISSED)
            if is_folded:
                self.state.fold(index, local)
            if final.own is not None:
                # What was cut off from an earlier life's work is nowhere.
                keeps_rest = is_folded and self._settings.cuts_values
                self.state.clear_sent(final.own.entries[index], scale=final.own_scale, keeps_rest=keeps_rest)
            if final.aggregate is not None:
                self.state.step(final.aggregate.entries(index), self._settings, local.device)
        if final.outcome is Outcome.DROPPED:
            self.state.clear_residual()

    def _take(self, move: Restoration) -> None:
        for index, theta, momentum in move.anchor.tensors():
            self.state.write(index, theta, momentum.view(np.float32))
        if move.drops_residual:
            self.state.clear_residual()

    def _compute_root(self, round_index: int) -> Digest:
        return self.state.compute_root(round_index)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self._is_torn = self.is_ahead = True
        yield
        self._is_torn = False
