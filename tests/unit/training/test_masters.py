import pytest
import torch

from pulsenet.errors import ConfigError, LocalProtocolError
from pulsenet.training.masters import adopt_masters


def make(dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def test_fp32_parameters_are_their_own_masters_under_canonical_names() -> None:
    model, optimizer = make(torch.float32)
    wrapped = torch.nn.ModuleDict({"module": model})
    masters = adopt_masters(wrapped, optimizer)
    assert [spec.name for spec in masters.table.tensors] == ["bias", "weight"]
    assert [spec.dtype for spec in masters.table.tensors] == ["F32", "F32"]
    assert masters.tensors[0] is model.bias
    assert masters.tensors[1] is model.weight
    assert masters.separate == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_follow_fp32_masters(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    start = model.bias.detach().float().clone()
    masters = adopt_masters(model, optimizer)
    assert masters.separate == masters.tensors
    assert optimizer.param_groups[0]["params"][0].dtype == torch.float32
    for _ in range(3):
        model.bias.grad = torch.full((2,), 2.0**-9, dtype=dtype)
        optimizer.step()
        assert model.bias.grad is None
        optimizer.zero_grad()
    assert torch.equal(masters.tensors[0], start - 3 * 0.5 * 2.0**-9)
    assert torch.equal(model.bias, masters.tensors[0].to(dtype))


def test_zero_grad_clears_the_gradients_of_a_step_not_taken() -> None:
    model, optimizer = make(torch.bfloat16)
    adopt_masters(model, optimizer)
    model.bias.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.zero_grad(set_to_none=True)
    assert model.bias.grad is None


def test_a_closure_cannot_reach_the_masters() -> None:
    model, optimizer = make(torch.bfloat16)
    adopt_masters(model, optimizer)
    with pytest.raises(LocalProtocolError, match="autocast"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(LocalProtocolError, match="autocast"):
        optimizer.step(closure=lambda: 0.0)


def test_frozen_parameters_take_no_part() -> None:
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    assert [spec.name for spec in adopt_masters(model, optimizer).table.tensors] == ["weight"]


def test_bf16_that_was_stepped_already_is_refused() -> None:
    model, _ = make(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model.bias.grad = torch.ones(2, dtype=torch.bfloat16)
    optimizer.step()
    with pytest.raises(ConfigError, match=r"before the first optimizer\.step"):
        adopt_masters(model, optimizer)


def test_what_cannot_have_a_master_is_refused_with_a_hint() -> None:
    model, optimizer = make(torch.float64)
    with pytest.raises(ConfigError, match="float64"):
        adopt_masters(model, optimizer)
    with pytest.raises(ConfigError, match="no parameter of the model"):
        adopt_masters(torch.nn.Linear(3, 2), make(torch.float32)[1])
    with torch.device("meta"):
        model, optimizer = make(torch.float32)
    with pytest.raises(ConfigError, match="meta device"):
        adopt_masters(model, optimizer)
    model, optimizer = make(torch.float32)
    optimizer.param_groups[0]["params"] = []
    with pytest.raises(ConfigError, match="steps no parameters"):
        adopt_masters(model, optimizer)


def test_two_parameters_of_one_name_are_refused() -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "_orig_mod": torch.nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="both called"):
        adopt_masters(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_sharded_parameters_are_refused_with_a_hint() -> None:
    model, optimizer = make(torch.float32)
    model.weight.full_tensor = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="FSDP2"):
        adopt_masters(model, optimizer)


def test_flat_shards_are_refused_with_a_hint() -> None:
    """FSDP1: other ranks step other pieces, of other sizes, than rank 0 would send them."""

    class FullyShardedDataParallel(torch.nn.Linear):
        world_size = 2

    model = torch.nn.Sequential(FullyShardedDataParallel(3, 2))
    with pytest.raises(ConfigError, match="sharded by FullyShardedDataParallel"):
        adopt_masters(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_changed_later_are_refused_with_a_hint(dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    masters = adopt_masters(model, optimizer)
    masters.check_model(model)
    masters.check_model(torch.nn.ModuleDict({"module": model}))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ConfigError, match="parameters were changed after"):
        masters.check_model(model)
    del optimizer.param_groups[1]
    model.weight = torch.nn.Parameter(torch.zeros_like(model.weight))
    with pytest.raises(ConfigError, match="weight was replaced"):
        masters.check_model(model)
