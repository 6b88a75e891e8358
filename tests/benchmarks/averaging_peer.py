"""One trainer's process of ``bench_averager.py``: it averages the same vector by pulsenet or by hivemind.

It begins a round once a file of that name appears, and prints a line of JSON when it is ready and after each round.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

TENSOR_COUNT = 8
GO_PAUSE_SECONDS = 0.01


def make_vector(params: int, index: int) -> list[torch.Tensor]:
    """Return what one trainer has to average: the same for both systems."""
    generator = torch.Generator().manual_seed(1000 + index)
    return [torch.randn(params // TENSOR_COUNT, generator=generator) for _ in range(TENSOR_COUNT)]


def digest(tensor: torch.Tensor) -> str:
    """Return a short name of a tensor's bits."""
    return hashlib.blake2b(tensor.detach().numpy().tobytes(), digest_size=8).hexdigest()


def tell(**fields: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(fields), flush=True)


def wait_for(directory: Path, round_number: int) -> None:
    """Wait until a round may begin."""
    while not (directory / f"go-{round_number}").exists():
        time.sleep(GO_PAUSE_SECONDS)


def average_with_pulsenet(arguments: argparse.Namespace) -> None:
    """One inner step from zero makes the vector a pseudo-gradient; ``diloco`` takes the mean of all."""
    import pulsenet
    from pulsenet.training import GossipOptimizer, MixingReport

    model = torch.nn.Module()
    vector = make_vector(arguments.params, arguments.index)
    model.layers = torch.nn.ParameterList([torch.zeros_like(tensor) for tensor in vector])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    mixer = pulsenet.join_mixing(data_dir=arguments.data_dir, publish=False)
    reports: list[MixingReport] = []
    sync = GossipOptimizer(model, optimizer, mixer=mixer, on_round=reports.append)
    tell(event="ready")
    for round_number in range(arguments.rounds):
        wait_for(arguments.directory, round_number)
        for parameter, tensor in zip(model.parameters(), vector, strict=True):
            parameter.grad = tensor.clone()
        optimizer.step()
        began_at = time.monotonic()
        sync.step()
        tell(
            event="end",
            round=round_number,
            seconds=time.monotonic() - began_at,
            digests=[digest(parameter) for parameter in model.parameters()],
            outcome=reports[-1].mix2_reason or "mixed",
            counted=reports[-1].mix2_count,
        )


def average_with_hivemind(arguments: argparse.Namespace) -> None:
    """A group of all peers, nothing compressed."""
    import hivemind
    from hivemind.averaging import DecentralizedAverager

    dht = hivemind.DHT(
        start=True,
        initial_peers=arguments.peer,
        host_maddrs=[f"/ip4/{arguments.address}/tcp/4300"],
        use_relay=False,
        use_auto_relay=False,
        nat_port_map=False,
    )
    vector = make_vector(arguments.params, arguments.index)
    everybody = [make_vector(arguments.params, index) for index in range(arguments.count)]
    averager = DecentralizedAverager(
        [tensor.clone() for tensor in vector],
        dht,
        start=True,
        prefix="bench",
        target_group_size=arguments.count,
        min_matchmaking_time=5.0,
    )
    tell(event="ready", address=[str(address) for address in dht.get_visible_maddrs()])
    for round_number in range(arguments.rounds):
        wait_for(arguments.directory, round_number)
        with averager.get_tensors() as tensors:
            for tensor, own in zip(tensors, vector, strict=True):
                tensor.copy_(own)
        began_at, outcome, counted = time.monotonic(), "mixed", 0
        try:
            gathered = averager.step(timeout=arguments.timeout, allow_retries=False)
            counted = 0 if gathered is None else len(gathered)
            outcome = "none" if gathered is None else outcome
        except Exception as error:  # whatever it is, it is what is asked about
            outcome = type(error).__name__
        seconds = time.monotonic() - began_at
        with averager.get_tensors() as tensors:
            means = [torch.stack(parts).mean(0) for parts in zip(*everybody, strict=True)]
            near = [torch.isclose(ours, mean, atol=1e-5) for ours, mean in zip(tensors, means, strict=True)]
            own_share = [(ours == own).float().mean() for ours, own in zip(tensors, vector, strict=True)]
            tell(
                event="end",
                round=round_number,
                seconds=seconds,
                digests=[digest(tensor) for tensor in tensors],
                outcome=outcome,
                counted=counted,
                mean_share=float(torch.cat(near).float().mean()),
                own_share=float(torch.stack(own_share).mean()),
            )


def main() -> None:
    """Average for so many rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("pulsenet", "hivemind"))
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--address", default=None)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--timeout", type=float, default=120.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (average_with_pulsenet if arguments.system == "pulsenet" else average_with_hivemind)(arguments)


if __name__ == "__main__":
    main()
