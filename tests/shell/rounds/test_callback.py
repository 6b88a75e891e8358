"""Hugging Face's Trainer in rounds through a daemon: it waits for a daemon that is away, and follows the others."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsenet.local import rounds_protocol as local
from pulsenet.outer.blob import decode_blob
from pulsenet.outer.settings import OuterSettings
from pulsenet.training.local_exchange import LocalExchange

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
transformers = pytest.importorskip("transformers")

from small_hf_trainer import make_trainer  # noqa: E402 (only with transformers)

from pulsenet.training import callback as callbacks  # noqa: E402
from pulsenet.training.callback import STATE_FILE, OuterCallback, load_outer_state  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = OuterSettings(inner_steps=4)


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
    first = OuterCallback(connect(daemon, reconnect_seconds=0.1))
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, first)
        trainer.train()
    assert cut.is_set()
    assert "training waits for the other trainers" in caplog.text
    assert first.sync is not None
    assert first.sync.counters.counted == 3

    alone = OuterCallback(LocalExchange(SETTINGS, 1).member(0))
    make_trainer(tmp_path / "alone", alone).train()
    assert alone.sync is not None
    assert first.sync.state_root == alone.sync.state_root

    # From a checkpoint in the middle of round 1, into a run that is at round 3.
    first.sync._exchange.close()
    again = OuterCallback(connect(daemon))
    make_trainer(tmp_path, again, steps=14).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.sync is not None
    assert again.sync.round_index == 5
    assert again.sync.counters.wasted_inner_steps == 2


@pytest.mark.parametrize("moment", ["its contribution waits", "its round was stepped"])
def test_a_trainer_that_is_killed_in_a_round_counts_nothing_twice(
    tmp_path: Path, make_daemon: Callable[..., Any], connect: Callable[..., Any], small_run: Any, moment: str
) -> None:
    """Kill -9 in round 1, after its checkpoint of the sixth step, which lies in the middle of that round."""
    daemon = make_daemon(SETTINGS)
    run = small_run([daemon])
    dead, sent = threading.Event(), []

    def kill(message: Any) -> None:
        run.hear(0, message)
        if isinstance(message, local.OfferContribution) and message.round_index == 1:
            sent.append(message)
        offered = isinstance(message, local.OfferContribution) and message.round_index == 1
        stepped = isinstance(message, local.Stepped) and message.round_index == 2
        if not dead.is_set() and (offered if moment == "its contribution waits" else stepped):
            dead.set()
            process.kill()

    daemon.on_said = kill
    script = Path(__file__).with_name("small_hf_trainer.py")
    log_path = tmp_path / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([sys.executable, script, daemon.directory, tmp_path], stdout=log, stderr=log)
    process.wait(200)
    assert dead.is_set(), log_path.read_text()[-3000:]
    folder = tmp_path / "checkpoint-6"
    saved = load_outer_state(folder / STATE_FILE)
    assert (saved["numbers"]["round_index"], saved["numbers"]["inner_step"]) == (1, 2)

    # The Trainer has nothing left to do, so what remains is what catching up made of the checkpoint.
    back = OuterCallback(connect(daemon))
    make_trainer(tmp_path, back, steps=6).train(resume_from_checkpoint=str(folder))
    assert back.sync is not None
    assert back.sync.round_index == 2
    assert run.receipts[1].members == {daemon.peer_id: sent[0]}, "what the first life sent, once"
    table = back.sync.state.table
    theta = [saved["theta"][spec.name].numpy() for spec in table.tensors]
    counted = decode_blob(daemon.blobs[sent[0].blob_id], table, theta, is_dense=False)
    assert counted.sent_count > 0
    for spec, entries, residual in zip(table.tensors, counted.entries, back.sync.state.residual, strict=True):
        expected = saved["residual"][spec.name].numpy().copy()
        expected[entries.indices] = 0.0
        assert np.array_equal(residual.numpy(), expected), spec.name

    back.sync._exchange.close()  # type: ignore[attr-defined]
    again = OuterCallback(connect(daemon))
    make_trainer(tmp_path, again, steps=14).train(resume_from_checkpoint=str(folder))
    assert again.sync is not None
    assert (again.sync.round_index, len(run.receipts)) == (4, 4)
    assert again.sync.counters.counted == 3, "in its own life: the first round before the checkpoint, and two after"
