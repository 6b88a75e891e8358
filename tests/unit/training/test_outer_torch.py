"""Eager torch gives the bits of the core; tests/property/test_outer_laws.py holds it to that on all inputs."""

import numpy as np
import pytest
import torch

from pulsenet.errors import LocalProtocolError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.training import outer_torch
from pulsenet.training.outer_torch import (
    clear_sent,
    correct_delta,
    from_entries,
    gate_entries,
    reduce_mean,
    run_device_self_test,
    split_scaled,
    to_entries,
)


def test_the_cpu_passes_the_self_test() -> None:
    assert run_device_self_test("cpu") == SELF_TEST_DIGEST


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(5000, generator=generator)
    local = theta + torch.randn(5000, generator=generator) * 1e-3
    whole = gate_entries(theta, local, torch.zeros(5000))
    monkeypatch.setattr(outer_torch, "BLOCK_ELEMENTS", 999)
    parts = gate_entries(theta, local, torch.zeros(5000))
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    assert 0 < whole[0].numel() < 5000


def test_empty_tensors_send_nothing() -> None:
    empty = torch.zeros(0)
    positions, values = gate_entries(empty, empty, empty)
    assert positions.dtype == torch.int64
    assert positions.numel() == values.numel() == 0
    assert correct_delta(empty, empty, empty).numel() == 0


def test_entries_cross_both_ways() -> None:
    sent = Entries(7, np.array([2, 5], np.uint32), np.array([1.0, -0.0], np.float32))
    positions, values = from_entries(sent, torch.device("cpu"))
    assert to_entries(7, positions, values, 10).same_as(sent)
    dense = Entries(7, None, np.frombuffer(b"\0\0\x80?", np.float32))
    positions, values = from_entries(dense, torch.device("cpu"))
    assert positions is None
    assert to_entries(7, None, values, 1).same_as(dense)


def test_dense_residuals_are_cleared_but_for_what_clipping_held() -> None:
    residual = torch.tensor([1.0, 1.0])
    clear_sent(residual, None, torch.tensor([4.0, 8.0]), scale=0.5)
    assert residual.tolist() == [2.0, 4.0]


def test_misuse_is_refused() -> None:
    with pytest.raises(LocalProtocolError):
        split_scaled(torch.ones(1), 1.5)
    with pytest.raises(LocalProtocolError):
        reduce_mean({}, out=torch.zeros(1))
