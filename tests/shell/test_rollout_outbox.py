"""Rollout batches at an inferencer: signed, stored, sent until a trainer has them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.signing import decode_signed
from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.local.protocol import RolloutsTaken, SubmitRollouts
from pulsenet.wire.messages import PushReply, PushRollouts
from pulsenet.wire.schema import decode_value
from pulsenetd.metrics import Metrics
from pulsenetd.rollout_outbox import BUSY_RETRY_MS, UNANSWERED_COUNT_MAX, RolloutOutbox, rank_trainers
from pulsenetd.storage.shelf import RolloutShelf

TRAINER, OTHER = PeerId(b"t" * 32), PeerId(b"o" * 32)
START_MS = 1_000_000
FIRST = 1_000 * START_MS
"""Number of the first batch on a new shelf."""

Answer = PushReply | Exception | Callable[[], Awaitable[PushReply]]


def count(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("pulsenet_rollouts_total", {"outcome": outcome}) or 0.0


def submission(batch: RolloutBatch, **changes: Any) -> SubmitRollouts:
    fields = {name: getattr(batch, name) for name in SubmitRollouts.__dataclass_fields__}
    return SubmitRollouts(**{**fields, **changes})


class Sender:
    """An outbox, and trainers that answer by a script; the last answer is repeated."""

    def __init__(self, run: Any, hands: Any, path: Path) -> None:
        self.run, self.hands, self.path = run, hands, path
        self.wall_ms = START_MS
        self.metrics = Metrics()
        self.answers: list[Answer] = [PushReply(True, "")]
        self.sent: list[bytes] = []
        self.sent_at: list[float] = []
        self.asked: list[PeerId] = []
        self.targets: list[Sequence[PeerId]] = [(TRAINER,)]
        self.open()

    def open(self) -> None:
        self.shelf = RolloutShelf.open(self.path)
        self.outbox = RolloutOutbox(
            self.run.run_id,
            self.run.inferencer.peer_id,
            self.run.inferencer.sign,
            self.shelf,
            self.metrics,
            threads=self.hands.InlineExecutor(),
            wall_ms=lambda: self.wall_ms,
        )

    def restart(self) -> None:
        self.shelf.close()
        self.open()

    def take(self, number: int = 1, **changes: Any) -> RolloutsTaken:
        return asyncio.run(self.outbox.take(submission(self.run.batch(number), **changes)))

    def send_all(self) -> None:
        """Run the outbox until it is empty."""

        async def send(target: PeerId, push: PushRollouts) -> PushReply:
            self.asked.append(target)
            self.sent.append(push.batch)
            self.sent_at.append(asyncio.get_running_loop().time())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return await answer() if callable(answer) else answer

        def rank(digest: Digest) -> Sequence[PeerId]:
            return self.targets.pop(0) if len(self.targets) > 1 else self.targets[0]

        async def until_empty() -> None:
            work = asyncio.create_task(self.outbox.run(rank, send))
            async with asyncio.timeout(3_600):
                while len(self.outbox):  # noqa: ASYNC110 - nothing signals an empty queue, and no time passes
                    await asyncio.sleep(0.1)
            work.cancel()

        self.hands.run_quickly(until_empty)

    def numbers(self) -> list[int]:
        payloads = [decode_signed(record).payload for record in self.sent]
        return [decode_value(RolloutBatch, payload).sequence - FIRST for payload in payloads]


@pytest.fixture
def sender(run: Any, hands: Any, tmp_path: Path) -> Iterator[Sender]:
    made = Sender(run, hands, tmp_path / "out.sqlite")
    yield made
    made.shelf.close()


def test_a_batch_leaves_signed_for_this_run_and_oldest_first(sender: Sender, run: Any) -> None:
    assert sender.take(1) == RolloutsTaken(True, "")
    assert sender.take(2, metadata='{"step": 2}') == RolloutsTaken(True, "")
    sender.send_all()
    assert sender.numbers() == [0, 1]
    signed = decode_signed(sender.sent[1])
    batch = run.trust().accept_rollouts(signed)
    assert signed.signers == (run.inferencer.peer_id,)
    assert (batch.run_id, batch.metadata) == (run.run_id, '{"step": 2}')
    assert (count(sender.metrics, "queued"), count(sender.metrics, "sent")) == (2, 2)


def test_arrays_that_do_not_fit_are_refused_to_the_engine(sender: Sender) -> None:
    for changes in (
        {"body": b"\0\0\0\0"},
        {"sample_count": 3},
        {"version_first": Version(0, 2)},
        {"logprob_bits": 8},
        {"metadata": "x" * 70_000},
    ):
        taken = sender.take(1, **changes)
        assert not taken.accepted
        assert taken.reason
        assert taken.retry_after_ms == 0
    assert len(sender.outbox) == 0
    assert count(sender.metrics, "malformed") == 5


def test_a_full_outbox_says_when_to_ask_again_and_loses_nothing(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_BATCHES_MAX", 2)
    assert [sender.take().accepted for _ in range(3)] == [True, True, False]
    refusal = sender.take()
    assert (refusal.reason[:5], refusal.retry_after_ms) == ("busy:", BUSY_RETRY_MS)
    sender.send_all()
    assert sender.take().accepted
    sender.send_all()
    assert sender.numbers() == [0, 1, 2]
    assert count(sender.metrics, "busy") == 2


def test_an_outbox_is_full_by_bytes_too(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    sender.take()
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_SIZE_BYTES_MAX", 2 * sender.outbox.size_bytes - 1)
    assert sender.take().reason.startswith("busy")
    sender.send_all()
    assert sender.outbox.size_bytes == 0
    assert sender.take().accepted


def test_what_was_accepted_survives_a_restart_and_numbers_go_on(sender: Sender) -> None:
    sender.take()
    sender.take()
    sender.wall_ms = 0
    sender.restart()
    assert len(sender.outbox) == 2
    assert sender.metrics.registry.get_sample_value("pulsenet_rollout_queue_batches") == 2
    sender.take()
    sender.send_all()
    assert sender.numbers() == [0, 1, 2]
    sender.restart()
    assert (len(sender.outbox), sender.outbox.size_bytes) == (0, 0)
    sender.take()
    sender.send_all()
    assert sender.numbers() == [0, 1, 2, 3]


def test_a_shelf_that_was_lost_begins_above_the_numbers_it_had(sender: Sender, tmp_path: Path) -> None:
    sender.take()
    sender.shelf.close()
    sender.path, sender.wall_ms = tmp_path / "new.sqlite", START_MS + 1
    sender.open()
    sender.take()
    sender.send_all()
    assert sender.numbers() == [1_000]


def test_a_disk_that_refuses_accepts_nothing(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no space left", "enospc")

    with monkeypatch.context() as patched:
        patched.setattr(sender.shelf, "add", refuse)
        taken = sender.take()
    assert (taken.accepted, taken.reason, taken.retry_after_ms) == (False, "storage: no space left", BUSY_RETRY_MS)
    assert sender.take().accepted
    with monkeypatch.context() as patched:
        patched.setattr(sender.shelf, "remove", refuse)
        sender.send_all()
    sender.restart()
    sender.send_all()
    assert sender.numbers() == [0, 0], "it stayed stored, so it is sent again under its number"


def test_a_batch_that_cannot_be_read_any_more_makes_way(sender: Sender) -> None:
    sender.take()
    sender.take()
    sender.shelf.remove([(sender.run.inferencer.peer_id, FIRST)])
    sender.send_all()
    assert sender.numbers() == [1]
    assert count(sender.metrics, "lost") == 1


@pytest.mark.parametrize(
    "passing",
    [
        UnavailableError("closed"),
        RemoteProtocolError("framing", "cut"),
        PushReply(False, "rate"),
        PushReply(False, "queue"),
        PushReply(False, "storage"),
        PushReply(False, "not_publisher"),
    ],
)
def test_a_batch_is_sent_again_until_it_is_taken(sender: Sender, passing: Any) -> None:
    sender.answers = [passing] * 8 + [PushReply(True, "")]
    sender.take()
    sender.send_all()
    assert sender.numbers() == [0] * 9
    pauses = [later - earlier for earlier, later in zip(sender.sent_at, sender.sent_at[1:], strict=False)]
    assert pauses[0] == pytest.approx(limits.RETRY_SECONDS_MIN, abs=0.2)
    assert pauses[-1] == pytest.approx(limits.RETRY_SECONDS_MAX, abs=0.2)
    assert (count(sender.metrics, "sent"), count(sender.metrics, "refused")) == (1, 0)


def test_without_a_trainer_batches_wait(sender: Sender) -> None:
    sender.targets = [(), (), (), (TRAINER,)]
    sender.take()
    sender.send_all()
    assert sender.numbers() == [0]


def test_a_trainer_that_is_full_has_the_next_one_asked_at_once(sender: Sender) -> None:
    sender.targets = [(TRAINER, OTHER)]
    sender.answers = [PushReply(False, "queue"), PushReply(True, "")]
    sender.take()
    sender.send_all()
    assert sender.asked == [TRAINER, OTHER]
    assert sender.sent_at[1] - sender.sent_at[0] < 0.2


def test_a_trainer_whose_answer_is_lost_is_asked_again_before_another(sender: Sender) -> None:
    """It may have the batch, and knows it by its number; another would count it a second time."""
    sender.targets = [(TRAINER, OTHER)]
    sender.answers = [UnavailableError("cut"), PushReply(True, "")]
    sender.take()
    sender.send_all()
    assert sender.asked == [TRAINER, TRAINER]
    sender.answers = [UnavailableError("gone")] * UNANSWERED_COUNT_MAX + [PushReply(True, "")]
    sender.take()
    sender.send_all()
    assert sender.asked[2:] == [TRAINER] * UNANSWERED_COUNT_MAX + [OTHER]


def test_an_answer_goes_to_the_trainer_whose_task_it_is_first(sender: Sender) -> None:
    sender.targets = [(TRAINER, OTHER)]
    sender.take(trainer=OTHER, task_ids=(bytes(16),))
    sender.restart()
    sender.take()
    sender.send_all()
    assert sender.asked == [OTHER, TRAINER]


def test_a_batch_the_trainer_will_never_take_makes_way(sender: Sender) -> None:
    sender.answers = [PushReply(False, "untrusted"), PushReply(True, "")]
    sender.take(1)
    sender.take(2)
    sender.send_all()
    assert sender.numbers() == [0, 1]
    assert (count(sender.metrics, "sent"), count(sender.metrics, "refused")) == (1, 1)


# Who takes which batch


def everybody(_: PeerId) -> bool:
    return True


def batch_digest(number: int) -> Digest:
    return compute_digest(b"batch %d" % number)


def test_a_lone_publisher_takes_all_and_nobody_in_its_place(run: Any) -> None:
    descriptor = run.descriptor
    publisher = run.publisher.peer_id
    assert rank_trainers(descriptor, publisher, {publisher, TRAINER}, batch_digest(1), everybody) == (publisher,)
    assert rank_trainers(descriptor, publisher, {TRAINER}, batch_digest(1), everybody) == ()
    assert rank_trainers(descriptor, None, {publisher, TRAINER}, batch_digest(1), everybody) == (publisher,)
    assert rank_trainers(None, publisher, {publisher}, batch_digest(1), everybody) == ()


def test_in_rounds_each_trainer_is_first_for_its_share_of_the_batches(make_run: Any) -> None:
    keys = tuple(sorted(compute_digest(b"trainer %d" % index) for index in range(4)))
    run = make_run(algorithm="pulseloco", trainers=keys)
    ranks = [
        rank_trainers(run.descriptor, run.publisher.peer_id, set(keys), batch_digest(number), everybody)
        for number in range(400)
    ]
    assert all(sorted(rank) == list(keys) for rank in ranks)
    firsts = [rank[0] for rank in ranks]
    assert all(70 < firsts.count(PeerId(key)) < 130 for key in keys)
    assert len(set(ranks)) == 24, "a trainer that is away leaves its share to all others"
    again = rank_trainers(run.descriptor, None, reversed(keys), batch_digest(0), everybody)
    assert again == ranks[0]


def test_authorities_that_say_they_are_seeds_are_not_asked(make_run: Any) -> None:
    run = make_run(algorithm="pulseloco", trainers=(TRAINER,))
    connected = {TRAINER, run.publisher.peer_id}
    rank = rank_trainers(run.descriptor, None, connected, batch_digest(0), lambda peer_id: peer_id == TRAINER)
    assert rank == (TRAINER,)
