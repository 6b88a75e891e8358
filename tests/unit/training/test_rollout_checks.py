"""A few samples are recomputed, and those that do not match are found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pulsenet.chain.records import RolloutBatch
from pulsenet.errors import ConfigError, LocalProtocolError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local.rollouts import ReceivedRollouts, Sample, pack_rollouts, unpack_rollouts
from pulsenet.training.rollout_checks import CheckResult, LogprobCheck


def receive(*samples: Sample) -> ReceivedRollouts:
    packed = pack_rollouts(Version(0, 1), Version(0, 1), samples)
    fields = {name: getattr(packed, name) for name in packed.__slots__}
    return unpack_rollouts(PeerId(bytes(32)), RolloutBatch(run_id=RunId(bytes(32)), sequence=1, **fields))


def model(sample: Sample) -> list[float]:
    """A model whose log-probability of a token is minus the token."""
    return [-float(token) for token in sample.completion_tokens]


def make_sample(*tokens: int, error: float = 0.0) -> Sample:
    return Sample([9], list(tokens), [-float(token) + (error if token else 0.0) for token in tokens], 0.0)


def test_samples_that_match_within_the_tolerance_pass() -> None:
    check = LogprobCheck(model, share=1.0, tolerance=0.1)
    assert check.judge(receive(make_sample(1, 2), make_sample(3, error=0.09), make_sample())) == CheckResult(3, 0)


@pytest.mark.parametrize("error", [0.2, -0.2])
def test_a_sample_of_other_weights_is_found(error: float) -> None:
    check = LogprobCheck(model, share=1.0, tolerance=0.1)
    assert check.judge(receive(make_sample(1, 2), make_sample(3, 4, error=error))) == CheckResult(2, 1)


def test_infinities_agree_with_themselves_only() -> None:
    samples = [Sample([1], [5, 6], [-math.inf, -1.0], 0.0)]
    for computed, mismatched in (([-math.inf, -1.0], 0), ([-3.0, -1.0], 1)):
        check = LogprobCheck(lambda sample, computed=computed: computed, share=1.0)  # type: ignore[misc]
        assert check.judge(receive(*samples)) == CheckResult(1, mismatched)


def test_the_drawn_samples_alone_are_recomputed_with_their_versions() -> None:
    seen: list[Sample] = []

    def compute(sample: Sample) -> list[float]:
        seen.append(sample)
        return model(sample)

    draws = iter([0.5, 0.1, 0.2, 0.19])
    check = LogprobCheck(compute, share=0.2, draw=lambda: next(draws))
    batch = receive(*(make_sample(token) for token in (1, 2, 3, 4)))
    assert check.judge(batch) == CheckResult(2, 0)
    assert [(list(sample.completion_tokens), sample.version_first) for sample in seen] == [
        ([2], Version(0, 1)),
        ([4], Version(0, 1)),
    ]


def test_by_default_the_share_is_drawn_and_no_two_checks_draw_alike() -> None:
    batch = receive(*(make_sample(1) for _ in range(2_000)))
    check = LogprobCheck(model, share=0.25)
    counts = [check.judge(batch).checked_count for _ in range(8)]
    assert all(350 < count < 650 for count in counts)
    assert len(set(counts)) > 1


def test_where_nothing_is_drawn_nothing_is_computed() -> None:
    def compute(_: Sample) -> list[float]:
        raise AssertionError

    check = LogprobCheck(compute, share=0.1, draw=lambda: 0.1)
    assert check.judge(receive(make_sample(1), make_sample(2))) == CheckResult(0, 0)


def test_weights_that_are_gone_leave_a_sample_unchecked() -> None:
    check = LogprobCheck(lambda _: None, share=1.0)
    assert check.judge(receive(make_sample(1))) == CheckResult(0, 0)


def test_arrays_of_numpy_do_as_well() -> None:
    check = LogprobCheck(lambda sample: np.array(model(sample), np.float32), share=1.0)
    assert check.judge(receive(make_sample(1, 2))) == CheckResult(1, 0)


@pytest.mark.parametrize("computed", [[], [0.0, 0.0], [math.nan]])
def test_a_function_that_returns_something_else_is_our_own_fault(computed: Sequence[float]) -> None:
    with pytest.raises(LocalProtocolError, match="one number per completion token"):
        LogprobCheck(lambda _: computed, share=1.0).judge(receive(make_sample(1)))


@pytest.mark.parametrize("changes", [{"share": 0.0}, {"share": 1.5}, {"tolerance": 0.0}, {"tolerance": math.nan}])
def test_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LogprobCheck(model, **changes)
