"""The law of what a trainer receives, on a small model: counted from the blobs themselves."""

import bench_received
import pytest
from numba import config as numba_config

from pulsenet import limits
from pulsenet.outer.settings import Algorithm, OuterSettings

pytestmark = pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="loops over many elements need numba")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS", 4096)


def measure(trainer_count: int, algorithm: Algorithm, **flushes: int) -> bench_received.Received:
    settings = OuterSettings(algorithm=algorithm, **flushes)
    return bench_received.measure(1 << 16, trainer_count, density=0.04, shared=0.0, settings=settings)


def test_whole_contributions_cost_by_the_number_of_trainers_and_slices_hardly() -> None:
    four, sixteen = measure(4, Algorithm.PULSELOCO), measure(16, Algorithm.PULSELOCO)
    assert sixteen.whole / four.whole == pytest.approx(15 / 3, rel=0.02)
    assert sixteen.sliced / four.sliced < 2
    assert sixteen.sliced < sixteen.whole / 2
    # What passes the gate is near an edge of its cell for everybody, so the union stays far below the sum.
    assert sixteen.union_density < 16 * 0.04 / 3


def test_dense_slices_cost_two_copies_whatever_the_number_of_trainers() -> None:
    found = [measure(count, Algorithm.DILOCO) for count in (3, 8)]
    assert found[0].ratio_sliced == pytest.approx(found[1].ratio_sliced, rel=0.02)
    # At least what a ring all-reduce of the same values does.
    assert all(one.ratio_sliced >= 1.0 for one in found)


def test_with_flushes_slices_pay_from_seven_trainers_on() -> None:
    """Sums of cut values are as long as any, so that the run's owner lets slices begin later."""
    few, many = (measure(count, Algorithm.PULSELOCO, flush_interval=4, flush_mantissa_bits=1) for count in (4, 10))
    assert few.whole < few.sliced
    assert many.sliced < many.whole
    assert 0.25 < few.union_density < 0.4
