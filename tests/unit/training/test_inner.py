from types import SimpleNamespace

import pytest
import torch

from pulsenet.errors import ConfigError, LocalProtocolError
from pulsenet.training.inner import InnerOptimizer, check_no_pending, unwrap_optimizer


def make() -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
    parameter = torch.nn.Parameter(torch.ones(1))
    return parameter, torch.optim.AdamW([parameter], lr=1.0)


def test_a_reset_forgets_momenta_and_warms_up() -> None:
    parameter, optimizer = make()
    inner = InnerOptimizer(optimizer, warmup_steps=3)
    factors = []
    for step in range(6):
        if step == 1:
            assert optimizer.state
            inner.reset()
            assert not optimizer.state
        parameter.grad = torch.ones(1)
        factors.append(inner.compute_factor())
        optimizer.step()
    assert factors == [1.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert inner.reset_count == 1
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_step_that_raised_leaves_no_scaled_rate() -> None:
    parameter, optimizer = make()
    inner = InnerOptimizer(optimizer, schedule=lambda index: 0.5)
    inner._scale_rates(optimizer, (), {})
    assert optimizer.param_groups[0]["lr"] == 0.5
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_wrappers_are_seen_through() -> None:
    _, optimizer = make()
    assert unwrap_optimizer(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))) is optimizer
    with pytest.raises(ConfigError, match="no torch"):
        unwrap_optimizer(SimpleNamespace(step=None))


def test_a_waiting_contribution_forbids_inner_steps() -> None:
    check_no_pending(False)
    with pytest.raises(LocalProtocolError):
        check_no_pending(True)
