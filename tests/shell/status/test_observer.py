"""What the looks at a node remember, with time as an argument."""

from __future__ import annotations

from pulsenetd.status.observer import ROUNDS_MAX, Observer, RoundLog


def test_rates_are_known_from_the_second_look_on() -> None:
    observer = Observer()
    observer.look(10.0, 1_000, {"version_lag": 2}, {("received", "chunk"): 100, ("sent", "have"): 10})
    assert observer.status()["received_bytes_per_second"] is None
    observer.look(15.0, 6_000, {"version_lag": 1}, {("received", "chunk"): 500, ("received", "head"): 100})
    status = observer.status()
    assert status["received_bytes_per_second"] == 100.0
    columns = observer.history.columns()
    assert columns["times_ms"] == [1_000, 6_000]
    assert columns["series"]["version_lag"] == [2.0, 1.0]
    assert columns["series"]["received_bytes_per_second"] == [None, 100.0]


def test_rounds_with_receipts_are_remembered_with_the_time_between_them() -> None:
    log = RoundLog()
    log.look(0, {"round_index": 0, "round_contributors": 0})
    assert log.newest_first() == []
    log.look(5_000, {"round_index": 4, "round_contributors": 3})
    log.look(9_000, {"round_index": 4, "round_contributors": 3})
    log.look(65_000, {"round_index": 5, "round_contributors": 2})
    log.look(90_000, {"round_index": 8, "round_contributors": 3})
    newest, middle, oldest = log.newest_first()
    assert (oldest["round"], oldest["seconds"], oldest["contributors"]) == (3, None, 3)
    assert (middle["round"], middle["seconds"], middle["contributors"]) == (4, 60.0, 2)
    assert (newest["round"], newest["seconds"]) == (7, None)  # two were not seen, so nobody knows how long it took


def test_mixing_rounds_are_remembered_with_their_last_outcome() -> None:
    log = RoundLog()
    fields = {"mixing_phase": "training", "mixing_round": 7, "mixing_members": 4, "mixing_mix1": "open"}
    log.look(0, fields)
    log.look(5_000, fields | {"mixing_mix1": "mixed", "mixing_mix2": "none"})
    log.look(40_000, fields | {"mixing_round": 8})
    newest, before = log.newest_first()
    assert (before["kind"], before["mix1"], before["mix2"], before["contributors"]) == ("mixing", "mixed", "none", 4)
    assert (newest["round"], newest["seconds"]) == (8, 40.0)


def test_few_rounds_are_remembered() -> None:
    log = RoundLog()
    for number in range(1, 200):
        log.look(number, {"round_index": number, "round_contributors": 1})
    assert len(log.newest_first()) == ROUNDS_MAX
