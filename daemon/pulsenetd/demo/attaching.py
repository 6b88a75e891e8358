"""What the training process and the engines of the demonstration have in common."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pulsenet.errors import UnavailableError
from pulsenet.local.sockets import socket_path

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NODE_SECONDS_MAX: Final = 120.0
POLL_SECONDS: Final = 0.1


def wait_for_node(data_directory: Path) -> None:
    """Wait until the node beside this process listens.

    Raises:
        UnavailableError: It did not within ``NODE_SECONDS_MAX``.
    """
    give_up_at = time.monotonic() + NODE_SECONDS_MAX
    while not socket_path(data_directory).exists():
        if time.monotonic() > give_up_at:
            raise UnavailableError(f"no node listens in {data_directory} after {NODE_SECONDS_MAX:.0f} s")
        time.sleep(POLL_SECONDS)


def write_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Write a BF16 model as one safetensors file, without a line of pulsenet's own code on the way.

    Tied weights are written once, under the name of the embedding.
    """
    from safetensors.torch import save_file

    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    save_file(tensors, path)
