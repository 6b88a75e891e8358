"""What a mixer says of a round."""

from __future__ import annotations

from pulsenet.training.mixer import NOTHING_MIXED, Mixed, MixingReport


def make_report(inner_seconds: float, blocked_seconds: float) -> MixingReport:
    return MixingReport(
        round_index=3,
        next_round_index=4,
        is_listed=True,
        mix1_count=4,
        mix2_count=2,
        mix1_reason="",
        mix2_reason="",
        delta_norm=1.0,
        distance=None,
        inner_seconds=inner_seconds,
        blocked_seconds=blocked_seconds,
    )


def test_utilisation_is_the_share_of_time_in_inner_steps() -> None:
    assert make_report(9.0, 1.0).utilization == 0.9
    assert make_report(0.0, 0.0).utilization == 1.0


def test_a_mean_of_one_mixed_nothing() -> None:
    assert not NOTHING_MIXED.is_mixed
    assert not Mixed((), 1).is_mixed
    assert Mixed((), 2).is_mixed
