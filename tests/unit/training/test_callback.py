"""Rounds under transformers.Trainer, which TRL's trainers are built on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pulsenet.training
from pulsenet.errors import ConfigError
from pulsenet.outer.mixing.settings import MixingSettings
from pulsenet.outer.settings import Algorithm, OuterSettings
from pulsenet.training.gossip_optimizer import GossipOptimizer
from pulsenet.training.local_exchange import LocalExchange
from pulsenet.training.local_mixer import LocalMixing

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
transformers = pytest.importorskip("transformers")

from small_hf_trainer import make_trainer  # noqa: E402 (only with transformers)

from pulsenet.training.callback import (  # noqa: E402 (only with transformers)
    STATE_FILE,
    OuterCallback,
    load_outer_state,
    save_outer_state,
)

pytestmark = pytest.mark.filterwarnings("ignore")


def test_rounds_run_under_the_trainer_and_resume_bit_by_bit(tmp_path: Path) -> None:
    """A-LOC-3 through the Trainer's own checkpoint, taken in the middle of a round."""
    swarm = LocalExchange(OuterSettings(inner_steps=4), 1)
    whole = make_trainer(tmp_path, OuterCallback(swarm.member(0)), save_steps=5)
    whole.train()
    (callback,) = [one for one in whole.callback_handler.callbacks if isinstance(one, OuterCallback)]
    assert callback.sync is not None
    assert callback.sync.round_index == 3
    assert callback.sync.counters.counted == 3

    rest = LocalExchange(OuterSettings(inner_steps=4), 1)
    rest.rounds = swarm.rounds[:1]
    resumed_callback = OuterCallback(rest.member(0))
    resumed = make_trainer(tmp_path, resumed_callback, save_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed_callback.sync is not None
    assert resumed_callback.sync.round_index == 3
    assert resumed_callback.sync.state_root == callback.sync.state_root
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_baseline_ddp_runs_under_the_trainer_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    """A lone trainer under ddp steps as the Trainer alone does; its clipping is the local one in both."""
    settings = OuterSettings(algorithm=Algorithm.DDP, inner_steps=4)
    swarm = LocalExchange(settings, 1)
    callback = OuterCallback(swarm.member(0))
    whole = make_trainer(tmp_path, callback, save_steps=5)
    whole.train()
    assert callback.sync is not None
    assert (callback.sync.round_index, callback.sync.counters.counted) == (12, 12)
    plain = make_trainer(tmp_path / "plain", transformers.TrainerCallback(), save_steps=5)
    plain.train()
    rest = LocalExchange(settings, 1)
    rest.rounds = swarm.rounds[:10]
    resumed_callback = OuterCallback(rest.member(0))
    resumed = make_trainer(tmp_path, resumed_callback, save_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert resumed_callback.sync is not None
    assert resumed_callback.sync.state_root == callback.sync.state_root
    for one, other, third in zip(
        whole.model.parameters(), plain.model.parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_a_mixer_makes_the_trainer_mix_and_resume_bit_by_bit(tmp_path: Path) -> None:
    settings = MixingSettings(inner_steps=4)
    callback = OuterCallback(LocalMixing(settings, 1).member(0))
    whole = make_trainer(tmp_path, callback, save_steps=5)
    whole.train()
    assert isinstance(callback.sync, GossipOptimizer)
    assert callback.sync.counters.rounds == 3
    resumed_callback = OuterCallback(LocalMixing(settings, 1).member(0))
    resumed = make_trainer(tmp_path, resumed_callback, save_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert isinstance(resumed_callback.sync, GossipOptimizer)
    assert resumed_callback.sync.round_index == callback.sync.round_index == 3
    for mine, theirs in zip(resumed_callback.sync.state.z, callback.sync.state.z, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_without_the_rounds_is_refused(tmp_path: Path) -> None:
    swarm = LocalExchange(OuterSettings(inner_steps=4), 1)
    make_trainer(tmp_path, OuterCallback(swarm.member(0)), steps=5, save_steps=5).train()
    (tmp_path / "checkpoint-5" / STATE_FILE).unlink()
    again = make_trainer(
        tmp_path, OuterCallback(LocalExchange(OuterSettings(inner_steps=4), 1).member(0)), save_steps=5
    )
    with pytest.raises(ConfigError, match=STATE_FILE):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_a_state_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    shared = torch.arange(3.0)
    saved = {"a": {"x.y": shared, "z": 1}, "pending": None, "b": {"x.y": shared}, "text": "ü", "empty": {}}
    save_outer_state(saved, tmp_path / STATE_FILE)
    loaded = load_outer_state(tmp_path / STATE_FILE)
    assert torch.equal(loaded["a"].pop("x.y"), shared)
    assert torch.equal(loaded["b"].pop("x.y"), shared)
    assert loaded == {"a": {"z": 1}, "pending": None, "b": {}, "text": "ü", "empty": {}}


def test_another_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / STATE_FILE)
    with pytest.raises(ConfigError, match="no state"):
        load_outer_state(tmp_path / STATE_FILE)


def test_the_callback_is_found_where_the_rest_is() -> None:
    assert pulsenet.training.OuterCallback is OuterCallback
    with pytest.raises(AttributeError):
        _ = pulsenet.training.Nothing
