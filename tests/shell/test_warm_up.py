"""The warm-up runs the real codec."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from numba import config as numba_config
from numba.core.registry import CPUDispatcher

from pulsenet.codec.blocks import Codec
from pulsenet.codec.patch import decode_patch, encode_patch, list_records
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenetd import warm_up as warming
from pulsenetd.warm_up import CHANGED, ELEMENTS, warm_up, warm_up_aloud


def test_every_kind_of_tensor_is_encoded_and_decoded() -> None:
    assert warm_up() == 3 * CHANGED.size
    assert 0 < CHANGED.size < ELEMENTS


def test_the_changes_are_such_that_each_codec_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[tuple[str, str]] = set()

    def note(*arguments: Any, codec: str) -> list[bytes]:
        blob = list(encode_patch(*arguments, codec=codec))
        used.update((codec, Codec(record.codec_id).name.lower()) for record in list_records(blob, arguments[0]))
        return blob

    monkeypatch.setattr(warming, "encode_patch", note)
    warm_up()
    assert {("tight", "tight"), ("plain", "plain"), ("absolute", "absolute"), ("dense", "dense")} <= used


def count_signatures() -> dict[str, int]:
    return {
        f"{name}.{attribute}": len(loop.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith("pulsenet.codec")
        for attribute, loop in vars(module).items()
        if isinstance(loop, CPUDispatcher)
    }


@pytest.mark.skipif(bool(numba_config.DISABLE_JIT), reason="nothing is compiled")
def test_the_first_patch_between_a_baseline_and_a_snapshot_finds_every_loop_ready() -> None:
    warm_up()
    ready = count_signatures()
    table = make_table([TensorSpec("w", "BF16", (50_000,))])
    baseline = np.zeros(table.layout_size_bytes, np.uint8)
    snapshot = baseline.copy()
    table.view(snapshot, 0)[::90] += 1
    snapshot.setflags(write=False)
    blob = list(encode_patch(table, baseline, snapshot))
    assert sum(len(changes) for changes in decode_patch(blob, table, baseline)) == len(range(0, 50_000, 90))
    assert count_signatures() == ready


def test_compiling_for_the_first_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    said = threading.Event()

    def note(text: str, *values: object) -> None:
        messages.append(text % values)
        said.set()

    monkeypatch.setattr(warming.logger, "info", note)
    warm_up_aloud(lambda: None, say_seconds=60.0)
    assert messages == []
    warm_up_aloud(lambda: said.wait(30), say_seconds=0.01)
    assert messages[0].startswith("compiling loops, once")
    assert messages[1].startswith("loops are compiled, after")
