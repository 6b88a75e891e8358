"""The table of plans."""

from __future__ import annotations

import io

import pytest

from pulsenet.outer.plan import Workload, make_plans
from pulsenet.outer.plan_link import Congestion, Link
from pulsenetd.planning.report import print_report


def table(workload: Workload, link: Link) -> list[str]:
    stream = io.StringIO()
    print_report(make_plans(workload, link), workload, link, stream)
    return stream.getvalue().splitlines()


def test_the_table_names_what_it_is_for_and_marks_what_cannot_run() -> None:
    lines = table(Workload(1.5e9, 8, 2.36, inner_steps=100, bytes_per_param=2.0), Link(100, 50))
    assert lines[0] == "1.5e+09 parameters, 8 trainers, 100 inner steps in 236 s, 100 Mbit/s down and 50 up"
    names = [line.split()[0] for line in lines[3:10]]
    assert names[:3] == ["ddp", "diloco", "pulseloco"]
    assert all(name.endswith("*") for name in names[3:])
    assert lines[-1].startswith("* variant of gossip")
    assert len({len(line) for line in lines[2:10]}) == 1


def test_loss_delay_and_what_no_speed_reaches_are_said() -> None:
    lines = table(Workload(1.5e9, 8, 2.36), Link(100, 50, 0.05, 0.1, Congestion.CUBIC))
    assert lines[0].endswith("5 % loss, 100 ms, cubic")
    (diloco,) = (line for line in lines if line.startswith("diloco"))
    assert "never" in diloco


def test_authorities_are_named() -> None:
    assert "8 trainers, all of them authorities, 8" in table(Workload(1, 8, 1.0, are_authorities=True), Link(1, 1))[0]


@pytest.mark.parametrize(
    ("params", "mbps", "said"),
    [
        (1, 1000, " 4 B"),
        (1e6, 1000, " 4 MB"),
        (1e15, 1000, " 4 PB"),
        (1e15, 0.001, " d "),
        (1e12, 1000, "Tbit/s"),
        (7e9, 100, " h "),
    ],
)
def test_units_suit_the_figures(params: float, mbps: float, said: str) -> None:
    assert said in "\n".join(table(Workload(params, 8, 1.0, inner_steps=1), Link(mbps, mbps))[2:10])
