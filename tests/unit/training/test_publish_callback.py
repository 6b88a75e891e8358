"""The weights that training starts from are published, and those after every step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import pulsenet.training
from pulsenet.local.client import PublishResult
from pulsenet.local.protocol import PublishStatus

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    """As little as the Trainer can train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * data).sum()}


class Recorder:
    """Remembers what is published."""

    def __init__(self, status: PublishStatus = PublishStatus.COMMITTED) -> None:
        self.status = status
        self.published: list[tuple[int, bool, float | None, list[float]]] = []

    def publish(self, model: Any, *, step: int, wait: bool, timeout_seconds: float | None) -> PublishResult:
        self.published.append((step, wait, timeout_seconds, model.weight.tolist()))
        return PublishResult(self.status, reason="why")


def train(folder: Path, recorder: Recorder, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    callback = pulsenet.training.PublishCallback(recorder, **options)  # type: ignore[arg-type]
    trainer = transformers.Trainer(
        Model(), arguments, train_dataset=[{"data": torch.ones(3)}] * 8, callbacks=[callback]
    )
    trainer.train()


def test_each_step_is_published_after_the_weights_moved(tmp_path: Path) -> None:
    recorder = Recorder()
    train(tmp_path, recorder)
    assert recorder.published == [
        (0, True, 600.0, [1.0] * 3),
        (1, False, None, [0.5] * 3),
        (2, False, None, [0.0] * 3),
    ]


def test_training_may_wait_for_the_commit(tmp_path: Path) -> None:
    recorder = Recorder()
    train(tmp_path, recorder, wait=True, timeout_seconds=9.0)
    assert [published[:3] for published in recorder.published] == [(0, True, 9.0), (1, True, 9.0), (2, True, 9.0)]


@pytest.mark.parametrize(
    ("status", "count"),
    [
        (PublishStatus.FAILED, 3),
        (PublishStatus.NOT_PUBLISHER, 3),
        (PublishStatus.REPLACED, 0),
        (PublishStatus.QUEUED, 0),
    ],
)
def test_what_is_not_published_is_a_warning(
    status: PublishStatus, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="pulsenet")
    train(tmp_path, Recorder(status))
    warned = [record.getMessage() for record in caplog.records if "are not published" in record.getMessage()]
    assert len(warned) == count
