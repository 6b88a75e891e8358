"""Recomputes the logprobs of a few samples, to find inferencers that do not serve the weights they name.

::

    check = LogprobCheck(lambda sample: logprobs_of(model, sample), share=0.02)
    for batch in publisher.rollouts(check=check):
        …
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pulsenet.errors import ConfigError, LocalProtocolError
from pulsenet.local.rollouts import ReceivedRollouts, Sample

SHARE_DEFAULT: Final = 0.02
TOLERANCE_DEFAULT: Final = 0.1
"""Engines that compute in BF16 differ by a few hundredths of a nat a token; another model differs by tenths."""

LogprobFunction = Callable[[Sample], "Sequence[float] | npt.NDArray[Any] | None"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What came of one batch."""

    checked_count: int
    """Samples that were drawn and could be recomputed."""
    mismatched_count: int
    """Those of them whose logprobs were others."""


class LogprobCheck:
    """Draws samples by chance that nobody can foresee, and compares their logprobs with recomputed ones.

    Args:
        compute: Returns the log-probabilities (natural, one per completion token, at the temperature that the
            inferencers report) of ``sample.completion_tokens`` after ``sample.prompt_tokens``, under weights of
            ``sample.version_first`` to ``sample.version_last``; ``None`` if those are gone, and the sample counts as
            not drawn. Called in the thread that iterates.
        share: Share of the samples that are recomputed, above 0 and at most 1.
        tolerance: Mean absolute difference a token, in nats, that still matches.
        draw: Returns numbers from 0 to 1, 1 excluded; by default from the system's own source of chance.

    Raises:
        ConfigError: ``share`` or ``tolerance`` is out of range.
    """

    def __init__(
        self,
        compute: LogprobFunction,
        *,
        share: float = SHARE_DEFAULT,
        tolerance: float = TOLERANCE_DEFAULT,
        draw: Callable[[], float] | None = None,
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"share {share!r} of samples to check: give one above 0 and at most 1")
        if not tolerance > 0:
            raise ConfigError(f"tolerance {tolerance!r} is not above 0: engines never agree exactly")
        self._compute = compute
        self._share = share
        self._tolerance = tolerance
        self._draw = random.SystemRandom().random if draw is None else draw

    def judge(self, batch: ReceivedRollouts) -> CheckResult:
        """Recompute the samples that are drawn.

        Raises:
            LocalProtocolError: ``compute`` did not return one number per token.
        """
        drawn = np.array([self._draw() < self._share for _ in range(batch.arrays.sample_count)], np.bool_)
        if not drawn.any():
            return CheckResult(0, 0)
        outcomes = [self._matches(sample) for sample in batch.select(drawn).samples]
        known = [outcome for outcome in outcomes if outcome is not None]
        return CheckResult(len(known), known.count(False))

    def _matches(self, sample: Sample) -> bool | None:
        computed = self._compute(sample)
        if computed is None:
            return None
        ours = np.asarray(computed, np.float64).reshape(-1)
        theirs = np.asarray(sample.logprobs, np.float64)
        if ours.shape != theirs.shape or np.isnan(ours).any():
            text = f"the check returned {ours.size} logprobs for {theirs.size} tokens, or NaN among them"
            raise LocalProtocolError(f"{text}: it has to return one number per completion token")
        if not theirs.size:
            return True
        # Equal infinities agree; their difference is no number.
        with np.errstate(invalid="ignore"):
            differences = np.where(ours == theirs, 0.0, np.abs(ours - theirs))
        return bool(differences.mean() <= self._tolerance)
