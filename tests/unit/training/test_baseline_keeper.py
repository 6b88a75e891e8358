"""Who keeps a device baseline, and who gets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.training import baseline_keeper
from pulsenet.training.baseline_keeper import BaselineKeeper
from pulsenet.training.device_baseline import DeviceBaseline
from pulsenet.training.snapshot import Snapshot, take_snapshot

MODEL = {"w": torch.zeros(100, 10), "v": torch.zeros(3)}


def on_device(snapshot: Snapshot, device: str = "cuda:0") -> Any:
    """Return a plan whose tensors say that they are on a device this machine need not have."""
    sources = tuple(
        SimpleNamespace(device=torch.device(device), dtype=source.dtype, stride=source.stride)
        for source in snapshot.sources
    )
    return SimpleNamespace(table=snapshot.table, sources=sources)


def lend(keeper: BaselineKeeper, snapshot: Any) -> DeviceBaseline | None:
    with keeper.lend(snapshot) as baseline:
        return baseline


def test_the_same_model_gets_the_same_baseline_and_another_model_another() -> None:
    keeper = BaselineKeeper(True)
    first = lend(keeper, take_snapshot(MODEL))
    assert first is not None
    assert lend(keeper, take_snapshot(MODEL)) is first
    other = lend(keeper, take_snapshot({"w": MODEL["w"]}))
    assert other is not None
    assert other is not first
    assert lend(keeper, take_snapshot(MODEL)) is not first


@pytest.mark.parametrize("choice", [False, "auto"])
def test_a_model_on_the_cpu_has_none_unless_it_is_asked_for(choice: Any) -> None:
    assert lend(BaselineKeeper(choice), take_snapshot(MODEL)) is None


def test_another_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'True, False or "auto", not .cuda.'):
        BaselineKeeper("cuda")  # type: ignore[arg-type]


def test_one_publish_at_a_time_has_it() -> None:
    keeper = BaselineKeeper(True)
    with keeper.lend(take_snapshot(MODEL)) as baseline:
        assert baseline is not None
        assert lend(keeper, take_snapshot(MODEL)) is None
    assert lend(keeper, take_snapshot(MODEL)) is baseline


class Sharded(torch.Tensor):
    """As a sharded tensor shows itself."""

    def full_tensor(self) -> torch.Tensor:
        return torch.zeros(self.shape)

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_sharded_models_have_none() -> None:
    state = {"a": torch.zeros(3).as_subclass(Sharded), "b": torch.zeros(2)}
    assert lend(BaselineKeeper(True), take_snapshot(state)) is None


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note for which plans a baseline is made, on whatever device."""
    plans: list[Any] = []

    def make(snapshot: Any) -> Any:
        plans.append(snapshot)
        return SimpleNamespace(fits=lambda other: other is snapshot)

    monkeypatch.setattr(baseline_keeper, "DeviceBaseline", make)
    return plans


@pytest.mark.parametrize(("free_size_bytes", "is_kept"), [(2 * 2 * 1003, True), (2 * 2 * 1003 - 1, False)])
def test_auto_keeps_one_where_twice_its_size_is_free(
    made: list[Any], free_size_bytes: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baseline_keeper, "read_free_size_bytes", lambda _: free_size_bytes)
    plan, keeper = on_device(take_snapshot(MODEL)), BaselineKeeper("auto")
    if is_kept:
        assert lend(keeper, plan) is not None
        return
    with pytest.warns(UserWarning, match="cuda:0 has 4011 bytes free, 2 x 2006 are wanted"):
        assert lend(keeper, plan) is None
    monkeypatch.setattr(baseline_keeper, "read_free_size_bytes", lambda _: 1 << 40)
    assert lend(keeper, plan) is None
    assert made == []


@pytest.mark.parametrize("choice", [True, "auto"])
def test_a_device_that_is_full_after_all(choice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(baseline_keeper, "DeviceBaseline", refuse)
    monkeypatch.setattr(baseline_keeper, "read_free_size_bytes", lambda _: 1 << 40)
    keeper, plan = BaselineKeeper(choice), on_device(take_snapshot(MODEL))
    if choice == "auto":
        with pytest.warns(UserWarning, match="CUDA out of memory"):
            assert lend(keeper, plan) is None
        assert lend(keeper, plan) is None
    else:
        with pytest.raises(ConfigError, match="pass device_baseline=False"):
            lend(keeper, plan)


def test_only_what_lies_on_a_cuda_device_has_to_fit_there(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_keeper, "read_free_size_bytes", lambda _: 2 * 2 * 3)
    plan = on_device(take_snapshot(MODEL))
    plan.sources[1].device = torch.device("cpu")
    assert [spec.name for spec in plan.table.tensors] == ["v", "w"]
    assert lend(BaselineKeeper("auto"), plan) is not None
    assert made == [plan]


def test_what_the_allocator_holds_unused_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 400)
    assert baseline_keeper.read_free_size_bytes(torch.device("cuda:0")) == 1300
