"""Where the three copies lie, and the path of an accelerator, taken on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pulsenet.errors import ConfigError
from pulsenet.outer.contribution import Entries
from pulsenet.outer.flush import NO_FLUSH, TensorFlush
from pulsenet.outer.settings import OuterSettings
from pulsenet.tensors.params import ParameterTable, TensorSpec
from pulsenet.training import outer_state
from pulsenet.training.outer_state import OuterState

TABLE = ParameterTable((TensorSpec("a", "F32", (50, 40)), TensorSpec("b", "F32", ()), TensorSpec("c", "F32", (0, 3))))


def make_locals(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(spec.shape, generator=generator) for spec in TABLE.tensors]


def walk(state: OuterState, *, is_dense: bool, flush: TensorFlush = NO_FLUSH) -> bytes:
    """A counted round, a missed one and the root after both."""
    for seed in (1, 2):
        locals_ = [
            theta.view(local.shape) + 1e-3 * local for theta, local in zip(state.theta, make_locals(seed), strict=True)
        ]
        for index, local in enumerate(locals_):
            sent = state.gate(index, local, is_dense=is_dense, flush=flush if index == 0 else NO_FLUSH)
            state.fold(index, local)
            if seed == 1:
                state.clear_sent(sent, scale=0.3, keeps_rest=flush is not NO_FLUSH)
                state.step(sent, OuterSettings(), local.device)
            state.restart(index, local)
            assert torch.equal(local.reshape(-1), state.theta[index])
    return state.compute_root(2) + b"".join(residual.numpy().tobytes() for residual in state.residual)


FLUSH = TensorFlush((slice(100, 900), slice(1900, 2000)), 1)


@pytest.mark.parametrize(("is_dense", "flush"), [(False, NO_FLUSH), (True, NO_FLUSH), (False, FLUSH)])
def test_the_accelerators_path_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, is_dense: bool, flush: TensorFlush
) -> None:
    known = walk(OuterState(TABLE, make_locals(0)), is_dense=is_dense, flush=flush)
    monkeypatch.setattr(outer_state, "_is_host", lambda *tensors: False)
    monkeypatch.setattr(outer_state.outer_torch, "BLOCK_ELEMENTS", 700)
    assert walk(OuterState(TABLE, make_locals(0)), is_dense=is_dense, flush=flush) == known
    assert flush is NO_FLUSH or known != walk(OuterState(TABLE, make_locals(0)), is_dense=is_dense)


def test_a_strided_parameter_is_gated_in_row_major_order() -> None:
    state = OuterState(TABLE, make_locals(0))
    local = (make_locals(0)[0] + 1.0).t().contiguous().t()
    assert not local.is_contiguous()
    dense = state.gate(0, local, is_dense=True)
    assert np.allclose(dense.values, -1.0)
    state.restart(0, local)
    assert torch.equal(local, make_locals(0)[0])


def test_copies_in_files_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "momentum"
    path.write_bytes(b"\xff" * 64)
    state = OuterState(TABLE, make_locals(0), momentum=path)
    assert not state.momentum[0].any()
    assert path.stat().st_size == TABLE.layout_size_bytes
    empty = OuterState(ParameterTable(()), [], theta=path)
    assert empty.theta == []
    assert empty.residual_norm() == 0.0


def test_copies_in_one_file_are_of_whoever_made_them(tmp_path: Path) -> None:
    """Two copies given one path, or a trainer started beside one that still runs: nobody's memory is cut off."""
    path = tmp_path / "copy"
    first = OuterState(TABLE, make_locals(0), theta=path, momentum=path)
    first.momentum[0].fill_(3.0)
    assert torch.equal(first.theta[0], make_locals(0)[0].reshape(-1))
    second = OuterState(TABLE, make_locals(1), momentum=path)
    assert not second.momentum[0].any()
    assert first.momentum[0].eq(3.0).all()


def test_a_file_takes_its_room_on_the_disk_at_once(tmp_path: Path) -> None:
    """Pages of a file with holes that find no room end the process, and no exception says so."""
    OuterState(TABLE, make_locals(0), momentum=tmp_path / "momentum")
    assert (tmp_path / "momentum").stat().st_blocks * 512 >= TABLE.layout_size_bytes


@pytest.mark.parametrize("kind", ["theta", "residual", "momentum"])
def test_a_file_that_cannot_be_made_is_named_with_a_way_out(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path / "no" / "copy", "No such file"), (tmp_path / "file" / "copy", "Not a directory")):
        with pytest.raises(ConfigError, match=rf'{path} for {kind} cannot be made \({reason}.*{kind}="host"'):
            OuterState(TABLE, make_locals(0), **{kind: path})  # type: ignore[arg-type]


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="placed on"):
        OuterState(TABLE, make_locals(0), theta="cuda")  # type: ignore[arg-type]


def test_a_state_is_read_and_written_whole() -> None:
    state = OuterState(TABLE, make_locals(0))
    theta, momentum = np.full(2000, 2.0, np.float32), np.full(2000, 3.0, np.float32)
    state.write(0, theta, momentum)
    assert [one.tolist() for one in (state.read_theta(0), state.read_momentum(0))] == [
        theta.tolist(),
        momentum.tolist(),
    ]
    with pytest.raises(ConfigError, match="elements"):
        state.write(0, theta[:-1], momentum)


def test_the_residuals_norm_is_over_all_tensors() -> None:
    state = OuterState(TABLE, make_locals(0))
    state.residual[0][5] = 3.0
    state.residual[1][0] = -4.0
    assert state.residual_norm() == 5.0
    state.clear_residual()
    assert state.residual_norm() == 0.0
    state.clear_sent(Entries(1, np.array([0], np.uint32), np.array([2.0], np.float32)), scale=0.5)
    assert state.residual[1].item() == 1.0
