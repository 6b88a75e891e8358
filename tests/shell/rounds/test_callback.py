"""Hugging Face's Trainer in rounds through a daemon: it waits for a daemon that is away, and follows the others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pulsenet.outer.settings import OuterSettings
from pulsenet.training.local_exchange import LocalExchange

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
transformers = pytest.importorskip("transformers")

from pulsenet.training import callback as callbacks  # noqa: E402 (only with transformers)
from pulsenet.training.callback import PulsenetCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = OuterSettings(inner_steps=4)


def make_trainer(folder: Path, callback: PulsenetCallback, *, steps: int = 12) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    data = [{"input_ids": torch.arange(8) % 7 + i % 5, "labels": torch.arange(8) % 7 + i % 5} for i in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        seed=1,
    )
    return transformers.Trainer(
        transformers.LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[callback]
    )


def test_a_trainer_waits_for_its_daemon_and_resumes_in_the_run(
    tmp_path: Path,
    make_daemon: Callable[..., Any],
    connect: Callable[..., Any],
    small_run: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(callbacks, "RETRY_SECONDS", 0.05)
    daemon = make_daemon(SETTINGS)
    run = small_run([daemon])
    cut = threading.Event()
    hear = run.hear

    def cut_once(message: Any) -> None:
        if len(run.receipts) == 1 and not cut.is_set():
            cut.set()
            daemon.stop()
            threading.Timer(0.5, daemon.start).start()
            raise ConnectionError("died")
        hear(0, message)

    daemon.on_said = cut_once
    first = PulsenetCallback(connect(daemon, reconnect_seconds=0.1))
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, first)
        trainer.train()
    assert cut.is_set()
    assert "training waits for the other trainers" in caplog.text
    assert first.sync is not None
    assert first.sync.counters.counted == 3

    alone = PulsenetCallback(LocalExchange(SETTINGS, 1).member(0))
    make_trainer(tmp_path / "alone", alone).train()
    assert alone.sync is not None
    assert first.sync.state_root == alone.sync.state_root

    # From a checkpoint in the middle of round 1, into a run that is at round 3.
    first.sync._exchange.close()
    again = PulsenetCallback(connect(daemon))
    make_trainer(tmp_path, again, steps=14).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.sync is not None
    assert again.sync.round_index == 5
    assert again.sync.counters.wasted_inner_steps == 2
