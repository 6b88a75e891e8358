"""What both processes share: waiting for their node, and writing weights without pulsenet's own code."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pulsenet.errors import UnavailableError
from pulsenet.local.sockets import socket_path
from pulsenetd.demo import attaching
from pulsenetd.demo.attaching import wait_for_node, write_weights
from pulsenetd.demo.models import copy_module, load_masters


def test_waiting_ends_once_the_socket_is_there(tmp_path: Path) -> None:
    path = socket_path(tmp_path)
    path.parent.mkdir()
    path.touch()
    wait_for_node(tmp_path)


def test_waiting_for_a_node_that_never_comes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "NODE_SECONDS_MAX", -1.0)
    with pytest.raises(UnavailableError, match="no node listens"):
        wait_for_node(tmp_path)


def test_weights_are_written_bit_by_bit_and_tied_ones_once(tmp_path: Path) -> None:
    masters, _ = load_masters("tiny")
    model = copy_module(masters, torch.bfloat16)
    write_weights(model, tmp_path / "weights.safetensors")
    written = load_file(tmp_path / "weights.safetensors")
    assert "lm_head.weight" not in written
    assert set(written) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(written[name].view(torch.int16), parameter.view(torch.int16))
