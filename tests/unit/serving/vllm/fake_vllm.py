"""A stand-in for vLLM around real ranks: its flags, its pause, its label, and the ways it can fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pulsenet.errors import UnavailableError
from pulsenet.serving.vllm.rank import RankWeights
from pulsenet.serving.vllm.servant import RankServant


def make_servant(
    model: torch.nn.Module,
    rank: int,
    world_size: int,
    checkpoint: Path,
    *,
    boot: str = "boot",
    obstacle: str = "",
    monotonic: Callable[[], float] = lambda: 0.0,
) -> RankServant:
    """Return the hands of one rank."""
    return RankServant(
        RankWeights(model),
        rank=rank,
        world_size=world_size,
        boot=f"{boot}-{rank}",
        monotonic=monotonic,
        find_obstacle=lambda: obstacle,
        find_checkpoint=lambda: checkpoint,
        guard=torch.inference_mode,
        synchronize=lambda: None,
    )


class FakeVllm:
    """The control routes of an engine whose workers are ``servants``; keeps vLLM's own rules."""

    url = "http://127.0.0.1:1"

    def __init__(self, servants: list[RankServant]) -> None:
        self.servants = servants
        self.weight_label = "default"
        self.is_open = False
        self.is_paused = False
        self.is_asleep = False
        self.asked: list[str] = []
        self.failing: dict[str, BaseException] = {}
        """What a call raises, by its name; before it does anything."""
        self.silent: dict[str, int] = {}
        """Rank that never hears an order, by the order's name."""
        self.on_call: Callable[[str], None] = lambda name: None

    def _note(self, name: str) -> None:
        self.asked.append(name)
        self.on_call(name)
        if name in self.failing:
            raise self.failing[name]

    def count_ranks(self) -> int:
        self._note("count_ranks")
        return len(self.servants)

    def attach(self, order: Mapping[str, Any]) -> None:
        self._note("attach")
        self._give(order)

    def open(self) -> None:
        self._note("open")
        if self.is_open:
            raise UnavailableError("start_weight_update called while a weight update is already active")
        self.is_open = True
        for servant in self.servants:
            servant.note_open(True)

    def order(self, order: Mapping[str, Any]) -> None:
        self._note(str(order["order"]))
        if not self.is_open:
            raise UnavailableError("start_weight_update must be called before update_weights")
        self._give(order)

    def close(self, label: str | None) -> None:
        self._note("close" if label else "close_unchanged")
        if not self.is_open:
            raise UnavailableError("finish_weight_update called without a matching start_weight_update")
        for servant in self.servants:
            servant.note_open(False)
        self.is_open = False
        if label is not None:
            self.weight_label = label

    def set_label(self, label: str) -> None:
        self._note("set_label")
        self.weight_label = label

    def reload(self, place: Path | None) -> None:
        self._note("reload")
        for servant in self.servants:
            (file,) = (place or servant._find_checkpoint()).glob("*.safetensors")
            servant._weights._model.load_weights(load_file(file).items())  # type: ignore[operator]

    def checksums(self) -> object:
        return [
            {name: tensor.tolist() for name, tensor in servant._weights._model.state_dict().items()}
            for servant in self.servants
        ]

    def label(self) -> str:
        self.asked.append("label")
        if "label" in self.failing:
            raise self.failing["label"]
        return self.weight_label

    def is_sleeping(self) -> bool:
        return self.is_asleep or self.is_paused

    def pause(self) -> None:
        self._note("pause")
        self.is_paused = True

    def resume(self) -> None:
        self._note("resume")
        self.is_paused = False

    def _give(self, order: Mapping[str, Any]) -> None:
        for servant in self.servants:
            if self.silent.get(str(order["order"])) != servant.rank:
                servant.take(order)
