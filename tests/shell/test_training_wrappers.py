"""The names of real wrappers, as torch makes them today."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pulsenet.training.snapshot import collect_tensors


@pytest.fixture
def process_group() -> Iterator[None]:
    """One process that is a whole group."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_publishes_the_plain_names_and_bytes() -> None:
    """A-NAME-2."""
    model = make_model()
    plain_table, plain = collect_tensors(model)
    compiled = torch.compile(model)
    assert isinstance(compiled, torch.nn.Module)
    table, tensors = collect_tensors(compiled)
    assert table == plain_table
    assert list(tensors) == list(plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP1", "FSDP2"])
def test_a_distributed_model_publishes_the_plain_names_and_bytes(wrapper: str) -> None:
    """A-NAME-2; FSDP2 holds sharded tensors, which are gathered one at a time."""
    model = make_model()
    plain_table, tensors = collect_tensors(model)
    plain = list(tensors)
    if wrapper == "DDP":
        wrapped: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model)
    elif wrapper == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        wrapped = model
        assert hasattr(next(wrapped.parameters()), "full_tensor")
    table, tensors = collect_tensors(wrapped)
    assert table == plain_table
    assert list(tensors) == plain
