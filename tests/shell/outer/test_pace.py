"""Work and waiting take turns, and the plan for a link is the one `pulsenet plan` makes."""

from __future__ import annotations

import pytest

from pulsenet.outer.plan import Variant, Workload, predict_utilization
from pulsenet.outer.plan_link import Link
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenetd.network.link_meter import LinkMeter
from pulsenetd.outer.pace import STRETCHES_REMEMBERED, Measured, Pace, find_link, predict


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.measured: list[Measured] = []
        self.pace = Pace(self.measured.append, lambda: self.now)

    def turn(self, work: float, wait: float) -> None:
        self.now += work
        self.pace.end()
        self.now += wait
        self.pace.begin()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_the_means_of_work_and_waiting_are_told_from_the_second_stretch_on(scene: Scene) -> None:
    scene.pace.begin()
    scene.turn(30.0, 10.0)
    assert scene.measured == []
    scene.turn(10.0, 10.0)
    assert scene.measured == [Measured(work_seconds=20.0, wait_seconds=10.0)]
    assert scene.measured[0].utilization == pytest.approx(2 / 3)


def test_only_the_last_stretches_count(scene: Scene) -> None:
    scene.pace.begin()
    scene.turn(1_000.0, 1_000.0)
    for _ in range(STRETCHES_REMEMBERED):
        scene.turn(9.0, 1.0)
    assert scene.measured[-1] == Measured(work_seconds=9.0, wait_seconds=1.0)


def test_catching_up_is_no_work(scene: Scene) -> None:
    scene.pace.begin()
    scene.now += 50.0
    scene.pace.begin()
    scene.turn(2.0, 2.0)
    scene.turn(2.0, 2.0)
    assert scene.measured == [Measured(work_seconds=2.0, wait_seconds=2.0)]


def test_what_a_process_was_at_when_it_went_away_is_not_counted(scene: Scene) -> None:
    scene.pace.end()
    scene.pace.begin()
    scene.turn(1.0, 1.0)
    scene.now += 1.0
    scene.pace.end()
    scene.pace.forget()
    scene.now += 500.0
    scene.pace.begin()
    assert scene.measured == []
    scene.turn(3.0, 1.0)
    assert scene.measured == [Measured(work_seconds=2.0, wait_seconds=1.0)]


def test_without_any_time_nothing_was_waited_for() -> None:
    assert Measured(0.0, 0.0).utilization == 1.0


def test_a_link_is_what_caps_say_and_else_what_it_carried() -> None:
    now = [0.0]
    meters = {direction: LinkMeter(lambda: now[0]) for direction in ("sent", "received")}
    assert find_link(0, 1 << 20, meters) is None
    assert find_link(1 << 20, 0, meters) is None
    assert find_link(1_250_000, 12_500_000, meters) == Link(down_mbps=100.0, up_mbps=10.0)
    for direction, seconds in (("sent", 4.0), ("received", 1.0)):
        with meters[direction].moving():
            meters[direction].note(1_250_000)
            now[0] += seconds
    assert find_link(0, 0, meters) == Link(down_mbps=10.0, up_mbps=2.5)
    assert find_link(1_250_000, 0, meters) == Link(down_mbps=10.0, up_mbps=10.0)


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_the_prediction_is_that_of_the_plan(algorithm: Algorithm) -> None:
    settings = OuterSettings(algorithm=algorithm, inner_steps=4, state_anchor_interval=7)
    link = Link(100.0, 20.0)
    workload = Workload(1e6, 3, 0.5, inner_steps=4, flush_interval=settings.flush_interval, state_anchor_interval=7)
    expected = predict_utilization(Variant(algorithm), workload, link)
    assert predict(settings, link, params=1_000_000, peer_count=3, work_seconds=2.0) == expected
    assert 0.0 < expected < 1.0


def test_nothing_is_predicted_from_nothing() -> None:
    link = Link(100.0, 20.0)
    assert predict(OuterSettings(), link, params=0, peer_count=3, work_seconds=2.0) is None
    assert predict(OuterSettings(), link, params=5, peer_count=3, work_seconds=0.0) is None
