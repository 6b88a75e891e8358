"""What a node's link was seen to carry."""

from __future__ import annotations

import pytest

from pulsenetd.network.link_meter import STRETCH_SECONDS_MAX, STRETCH_SIZE_BYTES_MIN, STRETCHES_REMEMBERED, LinkMeter

MIB = 1 << 20


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.meter = LinkMeter(lambda: self.now)

    def move(self, size_bytes: int, seconds: float) -> None:
        with self.meter.moving():
            self.now += seconds
            self.meter.note(size_bytes)


def test_nothing_is_known_before_anything_that_tells_was_moved() -> None:
    scene = Scene()
    assert scene.meter.mbps is None
    scene.move(STRETCH_SIZE_BYTES_MIN - 1, 0.001)
    scene.move(MIB, 0.0)
    assert scene.meter.mbps is None


def test_the_fastest_stretch_counts_and_time_between_stretches_does_not() -> None:
    scene = Scene()
    scene.move(MIB, 8.0)
    scene.now += 1000.0
    scene.move(4 * MIB, 4.0)
    scene.now += 1000.0
    assert scene.meter.mbps == pytest.approx(8e-6 * MIB)


def test_transfers_at_one_time_share_a_stretch() -> None:
    scene = Scene()
    with scene.meter.moving():
        scene.move(2 * MIB, 1.0)
        scene.move(2 * MIB, 1.0)
        scene.now += 2.0
        assert scene.meter.mbps is None, "it is not over"
    assert scene.meter.mbps == pytest.approx(8e-6 * MIB)


def test_a_transfer_that_fails_is_over() -> None:
    scene = Scene()

    def fail() -> None:
        with scene.meter.moving():
            scene.meter.note(MIB)
            scene.now += 1.0
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    scene.now += 1000.0
    scene.move(2 * MIB, 1.0)
    assert scene.meter.mbps == pytest.approx(2 * 8e-6 * MIB)


def test_a_long_stretch_is_measured_in_pieces() -> None:
    scene = Scene()
    with scene.meter.moving():
        for speed in (1, 3, 2):
            scene.now += STRETCH_SECONDS_MAX
            scene.meter.note(int(speed * MIB * STRETCH_SECONDS_MAX))
    assert scene.meter.mbps == pytest.approx(3 * 8e-6 * MIB)


def test_what_was_long_ago_is_forgotten() -> None:
    scene = Scene()
    scene.move(64 * MIB, 1.0)
    for _ in range(STRETCHES_REMEMBERED):
        scene.move(MIB, 1.0)
    assert scene.meter.mbps == pytest.approx(8e-6 * MIB)
