"""Rollouts from one node's engine to another's training process, through restarts of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pulsenet.chain.records import Have, RolloutBatch
from pulsenet.ids import PeerId
from pulsenet.local.protocol import SubmitRollouts
from pulsenet.wire.messages import GetTasks, Message, PushReply, PushRollouts
from pulsenet.wire.schema import decode_value
from pulsenetd.config import Config
from pulsenetd.metrics import Metrics
from pulsenetd.rollouts import Rollouts


def open_rollouts(run: Any, role: str, directory: Path, identity: Any, **changes: Any) -> Rollouts:
    directory.mkdir(exist_ok=True)
    config = Config(role=role, **changes)
    return Rollouts(config, directory, run.run_id, identity, run.trust(), Metrics(), time.monotonic)


def submission(run: Any, number: int, **changes: Any) -> SubmitRollouts:
    batch = run.batch(number, **changes)
    return SubmitRollouts(**{name: getattr(batch, name) for name in SubmitRollouts.__dataclass_fields__})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a thread of the rollouts works meanwhile
            await asyncio.sleep(0.01)


def connect(trainer: Rollouts, asker: PeerId) -> Callable[[PeerId, Message], Awaitable[Message]]:
    async def request(_: PeerId, message: Message) -> Message:
        if isinstance(message, GetTasks):
            assert trainer.give_tasks is not None
            return await trainer.give_tasks(asker, message)
        assert isinstance(message, PushRollouts)
        assert trainer.take is not None
        reason = await trainer.take(message.batch)
        return PushReply(accepted=not reason, reason=reason)

    return request


async def test_batches_reach_the_trainer_once_through_restarts_of_both(run: Any, tmp_path: Path) -> None:
    publisher = run.publisher.peer_id

    async def send_from(inferencer: Rollouts, trainer: Rollouts) -> None:
        sending = asyncio.create_task(
            inferencer.send(lambda: {publisher}, lambda _: None, connect(trainer, run.inferencer.peer_id))
        )
        await until(lambda: not len(inferencer.outbox))
        sending.cancel()

    inferencer = open_rollouts(run, "inferencer", tmp_path / "i", run.inferencer)
    for number in range(3):
        assert (await inferencer.outbox.take(submission(run, number))).accepted
    assert inferencer.status()["queue_batches"] == 3
    inferencer.close()
    inferencer = open_rollouts(run, "inferencer", tmp_path / "i", run.inferencer)
    trainer = open_rollouts(run, "trainer", tmp_path / "t", run.publisher)
    await send_from(inferencer, trainer)
    assert inferencer.status() == {"queue_batches": 0, "queue_bytes": 0}
    inferencer.close()
    trainer.close()
    trainer = open_rollouts(run, "trainer", tmp_path / "t", run.publisher, max_staleness=4)
    assert trainer.status()["staleness_max"] == 4
    batches = await trainer.inbox.give(10, 0.0)
    await trainer.inbox.settle(batches, True)
    assert trainer.status()["queue_batches"] == 0
    trainer.close()
    first, *rest = [batch.sequence for batch in batches]
    assert rest == [first + 1, first + 2]


async def test_only_peers_that_train_are_asked_and_only_trainers_take(make_run: Any, tmp_path: Path) -> None:
    run = make_run(algorithm="pulseloco", trainers=tuple(sorted((b"t" * 32, b"u" * 32))))
    trainer, unheard, seed = PeerId(b"t" * 32), PeerId(b"u" * 32), run.publisher.peer_id
    asked: list[PeerId] = []

    def have_of(peer_id: PeerId) -> Have | None:
        roles = {trainer: "trainer", seed: "seed"}
        return SimpleNamespace(role=roles[peer_id]) if peer_id in roles else None  # type: ignore[return-value]

    async def push(peer_id: PeerId, _: Message) -> Message:
        asked.append(peer_id)
        return PushReply(len(asked) == 2, "queue")

    inferencer = open_rollouts(run, "inferencer", tmp_path / "i", run.inferencer)
    assert inferencer.take is None
    await inferencer.outbox.take(submission(run, 1))
    sending = asyncio.create_task(inferencer.send(lambda: {trainer, unheard, seed}, have_of, push))
    await until(lambda: not len(inferencer.outbox))
    sending.cancel()
    inferencer.close()
    assert set(asked) == {trainer, unheard}


async def test_a_task_comes_to_an_engine_and_its_answer_takes_it_off_the_board(run: Any, tmp_path: Path) -> None:
    publisher = run.publisher.peer_id

    inferencer = open_rollouts(run, "inferencer", tmp_path / "i", run.inferencer)
    trainer = open_rollouts(run, "trainer", tmp_path / "t", run.publisher)
    assert trainer.tasks is not None
    assert inferencer.tasks is not None
    assert inferencer.give_tasks is None
    asked = asyncio.create_task(inferencer.tasks.take(4, 20.0))
    connected = connect(trainer, run.inferencer.peer_id)
    sending = asyncio.create_task(inferencer.send(lambda: {publisher}, lambda _: None, connected))
    queued = await trainer.tasks.send(['{"prompt": 1}'], 60_000)
    (task,) = await asked
    assert (task.trainer, task.task_id, task.content) == (publisher, queued.task_ids[0], '{"prompt": 1}')
    assert trainer.status()["tasks"]["leased"] == 1
    answer = submission(run, 1, trainer=publisher, task_ids=queued.task_ids)
    assert (await inferencer.outbox.take(answer)).accepted
    await until(lambda: not len(inferencer.outbox))
    assert trainer.status()["tasks"] == {"waiting": 0, "leased": 0, "done": 1, "expired": 0, "given_up": 0}
    (batch,) = await trainer.inbox.give(1, 0.0)
    assert decode_value(RolloutBatch, batch.batch).task_ids == queued.task_ids
    sending.cancel()
    inferencer.close()
    trainer.close()


async def test_a_trainer_that_is_killed_keeps_its_tasks_and_the_answer_that_comes_later_counts(
    run: Any, tmp_path: Path
) -> None:
    publisher = run.publisher.peer_id

    inferencer = open_rollouts(run, "inferencer", tmp_path / "i", run.inferencer)
    trainer = open_rollouts(run, "trainer", tmp_path / "t", run.publisher)
    assert trainer.tasks is not None
    assert inferencer.tasks is not None
    queued = await trainer.tasks.send(['{"prompt": 1}', '{"prompt": 2}'], 60_000)
    inferencer.tasks.bind(lambda: (publisher,), connect(trainer, run.inferencer.peer_id))  # type: ignore[union-attr]
    (task,) = await inferencer.tasks.take(1, 20.0)
    reborn = open_rollouts(run, "trainer", tmp_path / "t", run.publisher)
    assert reborn.status()["tasks"] == {"waiting": 1, "leased": 1, "done": 0, "expired": 0, "given_up": 0}
    answer = submission(run, 1, trainer=publisher, task_ids=(task.task_id,))
    assert (await inferencer.outbox.take(answer)).accepted
    sending = asyncio.create_task(
        inferencer.send(lambda: {publisher}, lambda _: None, connect(reborn, run.inferencer.peer_id))
    )
    await until(lambda: not len(inferencer.outbox))
    (second,) = await inferencer.tasks.take(4, 20.0)
    assert {task.task_id, second.task_id} == set(queued.task_ids)
    assert reborn.status()["tasks"] == {"waiting": 0, "leased": 1, "done": 1, "expired": 0, "given_up": 0}
    sending.cancel()
    for rollouts in (inferencer, trainer, reborn):
        rollouts.close()


async def test_a_seed_has_no_tasks(run: Any, tmp_path: Path) -> None:
    seed = open_rollouts(run, "seed", tmp_path / "s", run.stranger)
    assert (seed.tasks, seed.give_tasks, seed.take) == (None, None, None)
    seed.close()
