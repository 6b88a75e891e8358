"""Outer rounds of one trainer with several ranks, as torch makes them today."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pulsenet.errors import ConfigError
from pulsenet.outer.settings import OuterSettings
from pulsenet.training import LocalExchange, OuterOptimizer

BEGIN = """
import json, os, sys
import torch

rank, store, dtype = int(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
torch.manual_seed(0)
plain = torch.nn.Linear(6, 3).to(dtype)
model = torch.nn.parallel.DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def run_inner_step(step):
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 2 + rank)).to(dtype)
    model(data).float().square().mean().backward()
    optimizer.step()

def load_states(sync):
    states = [None, None]
    torch.distributed.all_gather_object(states, sync.state_dict())
    sync.load_state_dict(states[rank if sys.argv[4] == "own" else 0])

def leave(sync, **told):
    weights = [parameter.detach().contiguous().view(torch.uint8).tolist() for parameter in plain.parameters()]
    print(json.dumps({"rank": rank, "round": sync.round_index, "weights": weights, **told}), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which aborts the process
"""

RANK = (
    BEGIN
    + """
from pulsenet.errors import ConfigError, UnavailableError
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training import LocalExchange, OuterOptimizer

exchange = LocalExchange(OuterSettings(inner_steps=2), 1).member(0) if rank == 0 else None
sync = OuterOptimizer(model, optimizer, exchange=exchange)
if rank == 0:
    submit, failures = exchange.submit, [UnavailableError("coordinator away")]
    def once_away(contribution):
        if contribution.round_index == 1 and failures:
            raise failures.pop()
        return submit(contribution)
    exchange.submit = once_away
errors = 0
for step in range(6):
    run_inner_step(step)
    try:
        sync.step()
    except UnavailableError:
        errors += 1
        sync.step()
    optimizer.zero_grad()
assert sync.catch_up() == 0
leave(sync, errors=errors)
"""
)

TROUBLED_RANK = (
    BEGIN
    + """
from dataclasses import replace
from pulsenet.errors import UnavailableError
from pulsenet.outer.settings import OuterSettings
from pulsenet.training import LocalExchange, Outcome, OuterOptimizer, RoundResult

exchange = LocalExchange(OuterSettings(inner_steps=2), 1).member(0) if rank == 0 else None
sync = OuterOptimizer(model, optimizer, exchange=exchange)
if rank == 0:
    submit = exchange.submit
    def defer(contribution):
        return RoundResult(Outcome.DEFERRED, reason="silent", inner_steps=2)
    def cut(moves):
        yield from moves
        raise UnavailableError("away after a move")
    def break_off(contribution):
        result = submit(contribution)
        return replace(result, rounds=cut(result.rounds))
    def fail(contribution):
        raise UnavailableError("coordinator away")
    troubles = [defer, break_off, fail]
    exchange.submit = lambda contribution: (troubles.pop(0) if troubles else submit)(contribution)
errors = 0
for step in range(8):
    run_inner_step(step)
    try:
        sync.step()
    except UnavailableError:
        errors += 1
        load_states(sync)
        sync.step()
    optimizer.zero_grad()
leave(sync, errors=errors)
"""
)

MIXING_RANK = (
    BEGIN
    + """
from pulsenet.errors import UnavailableError
from pulsenet.outer.mixing.settings import MixingSettings
from pulsenet.training import GossipOptimizer
from pulsenet.training.local_mixer import LocalMixing

mixer = LocalMixing(MixingSettings(inner_steps=2), 1).member(0) if rank == 0 else None
sync = GossipOptimizer(model, optimizer, mixer=mixer)
if rank == 0:
    def fail_once(name):
        work, failures = getattr(mixer, name), [UnavailableError("a bug of a mixer")]
        def failing(*args, **options):
            if failures:
                raise failures.pop()
            return work(*args, **options)
        setattr(mixer, name, failing)
    fail_once("begin_round")
    fail_once("start")
    fail_once("result")
errors = 0
for step in range(9):
    run_inner_step(step)
    try:
        sync.step()
    except UnavailableError:
        errors += 1
    optimizer.zero_grad()
leave(sync, errors=errors)
"""
)


RESUMED_MIXING_RANK = (
    BEGIN
    + """
from pulsenet.outer.mixing.settings import MixingSettings
from pulsenet.training import GossipOptimizer
from pulsenet.training.local_mixer import LocalMixing

mixer = LocalMixing(MixingSettings(inner_steps=2), 1).member(0) if rank == 0 else None
sync = GossipOptimizer(model, optimizer, mixer=mixer)
for step in range(9):
    if step == 4:
        load_states(sync)
        assert sync.catch_up() == 0
    run_inner_step(step)
    sync.step()
    optimizer.zero_grad()
leave(sync)
"""
)


SHARDED_RANK = """
import json, os, sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from pulsenet.training.snapshot import collect_tensors

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(3, 1, bias=False) for _ in range(3)))
model[1].weight = model[0].weight
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
table, tensors = collect_tensors(model)
print(json.dumps({"aliases": table.aliases, "values": {name: data.hex() for name, data in tensors}}), flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's threads may outlive the interpreter's teardown, which aborts the process
"""


def at_night(value: str) -> Any:
    """Leave one of two like cases to the night: each starts two processes with torch."""
    return pytest.param(value, marks=pytest.mark.nightly)


def run_ranks(program: str, store: Path, dtype: str, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(store), dtype, *arguments], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    first, second = (json.loads(output) for output in outputs)
    return first, second


@pytest.mark.parametrize("dtype", ["float32", at_night("bfloat16")])
def test_rank_0_exchanges_and_all_ranks_follow(tmp_path: Path, dtype: str) -> None:
    """Also when a round fails on rank 0: the others hear of it, and both try again."""
    first, second = run_ranks(RANK, tmp_path / "store", dtype)
    assert first["weights"] == second["weights"]
    assert (first["round"], second["round"]) == (3, 3)
    assert (first["errors"], second["errors"]) == (1, 1)


@pytest.mark.parametrize("whose", ["own", at_night("first")])
def test_all_ranks_run_as_many_inner_steps_whatever_the_exchange_answers(tmp_path: Path, whose: str) -> None:
    """A round is put off, an exchange goes away between two moves, and a checkpoint is taken up while its
    contribution waits: from each rank's own file or from that of rank 0."""
    first, second = run_ranks(TROUBLED_RANK, tmp_path / "store", "bfloat16", whose)
    assert first["weights"] == second["weights"]
    assert (first["round"], second["round"]) == (3, 3)
    assert (first["errors"], second["errors"]) == (1, 1)


@pytest.mark.parametrize("dtype", [at_night("float32"), "bfloat16"])
def test_rank_0_mixes_and_all_ranks_follow(tmp_path: Path, dtype: str) -> None:
    """Also when opening a round or ending one fails on rank 0: nobody waits for its news."""
    first, second = run_ranks(MIXING_RANK, tmp_path / "store", dtype)
    assert first["weights"] == second["weights"]
    assert first["round"] == second["round"] > 0
    assert (first["errors"], second["errors"]) == (3, 3)


@pytest.mark.parametrize("whose", [at_night("own"), "first"])
def test_all_ranks_of_a_trainer_that_mixes_go_on_from_a_checkpoint(tmp_path: Path, whose: str) -> None:
    """From each rank's own, or all from that of rank 0, as Hugging Face's Trainer does."""
    first, second = run_ranks(RESUMED_MIXING_RANK, tmp_path / "store", "bfloat16", whose)
    assert first["weights"] == second["weights"]
    assert first["round"] == second["round"] == 4


def test_a_rank_that_holds_nothing_of_a_tied_tensor_gathers_it_as_often(tmp_path: Path) -> None:
    """A weight of one row lies on rank 0 alone; a gather that not all ranks take part in never ends."""
    first, second = run_ranks(SHARDED_RANK, tmp_path / "store", "bfloat16")
    assert first == second
    assert first["aliases"] == [["1.weight", "0.weight"]]
    assert len(set(first["values"].values())) == len(first["values"]) == 2


@pytest.fixture
def process_group() -> Iterator[None]:
    """One process that is a whole group."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("process_group")
def test_fsdp2_shards_are_refused_with_a_hint() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(6, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="sharded over ranks"):
        OuterOptimizer(model, optimizer, exchange=LocalExchange(OuterSettings(), 1).member(0))
