"""Loaded into the test servers' workers: looks at parameters, and breaks the adapter where a test wants it to."""

from __future__ import annotations

import os
import signal
from typing import Any

from pulsenet.serving.vllm.rank import RankWeights

_commit = RankWeights.commit


class WorkerExtension:
    """Methods that vLLM's collective calls find on every worker."""

    rank: int
    model_runner: Any

    def pulsenet_addresses(self) -> dict[str, int]:
        """Return where every parameter lies."""
        return {name: tensor.data_ptr() for name, tensor in self.model_runner.get_model().named_parameters()}

    def pulsenet_fail_commit(self, rank: int) -> None:
        """Let one rank write and then fail, once."""
        if self.rank != rank:
            return

        def fail(weights: RankWeights) -> None:
            RankWeights.commit = _commit  # type: ignore[method-assign]
            _commit(weights)
            raise RuntimeError("failed on request")

        RankWeights.commit = fail  # type: ignore[method-assign]

    def pulsenet_die_in_commit(self, rank: int) -> None:
        """Let one rank's process die in the middle of its next commit."""
        if self.rank != rank:
            return

        def die(weights: RankWeights) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        RankWeights.commit = die  # type: ignore[method-assign]
