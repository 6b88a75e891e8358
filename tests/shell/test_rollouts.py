"""Rollout batches: signed and sent until a trainer takes them, judged there, counted once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from pulsenet import limits
from pulsenet.chain.records import RolloutBatch
from pulsenet.chain.signing import decode_signed, encode_signed
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import PeerId, RunId, Version
from pulsenet.local import protocol
from pulsenet.local.protocol import RolloutsTaken, SubmitRollouts
from pulsenet.wire.messages import PushReply, PushRollouts
from pulsenet.wire.schema import decode_value
from pulsenetd import rollouts
from pulsenetd.metrics import Metrics
from pulsenetd.rollouts import ADMITTED_SECONDS, BATCH_BURST, BATCHES_PER_SECOND, RolloutInbox, RolloutOutbox

TRAINER = PeerId(b"t" * 32)


def count(metrics: Metrics, outcome: str) -> float:
    return metrics.registry.get_sample_value("pulsenet_rollouts_total", {"outcome": outcome}) or 0.0


def submission(batch: RolloutBatch, **changes: Any) -> SubmitRollouts:
    fields = {name: getattr(batch, name) for name in SubmitRollouts.__dataclass_fields__}
    return SubmitRollouts(**{**fields, **changes})


# The inferencer's side


class Sender:
    """An outbox, and a trainer that answers by a script; the last answer is repeated."""

    def __init__(self, run: Any, hands: Any) -> None:
        self.run, self.hands = run, hands
        self.metrics = Metrics()
        self._ids = 0
        self.outbox = RolloutOutbox(
            run.run_id, run.inferencer.peer_id, run.inferencer.sign, self._draw_bytes, self.metrics
        )
        self.answers: list[PushReply | Exception | Callable[[], Awaitable[PushReply]]] = [PushReply(True, "")]
        self.sent: list[bytes] = []
        self.sent_at: list[float] = []
        self.targets: list[PeerId | None] = [TRAINER]

    def _draw_bytes(self, size_bytes: int) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(size_bytes, "big")

    def take(self, number: int = 1, **changes: Any) -> RolloutsTaken:
        return asyncio.run(self.outbox.take(submission(self.run.batch(number), **changes)))

    def send_all(self) -> None:
        """Run the outbox until it is empty."""

        async def send(target: PeerId, push: PushRollouts) -> PushReply:
            self.sent.append(push.batch)
            self.sent_at.append(asyncio.get_running_loop().time())
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return await answer() if callable(answer) else answer

        def choose() -> PeerId | None:
            return self.targets.pop(0) if len(self.targets) > 1 else self.targets[0]

        async def until_empty() -> None:
            work = asyncio.create_task(self.outbox.run(choose, send))
            async with asyncio.timeout(3_600):
                while len(self.outbox):  # noqa: ASYNC110 - nothing signals an empty queue, and no time passes
                    await asyncio.sleep(0.1)
            work.cancel()

        self.hands.run_quickly(until_empty)

    def ids(self) -> list[int]:
        payloads = [decode_signed(record).payload for record in self.sent]
        return [decode_value(RolloutBatch, payload).sequence for payload in payloads]


@pytest.fixture
def sender(run: Any, hands: Any) -> Sender:
    return Sender(run, hands)


def test_a_batch_leaves_signed_for_this_run_and_oldest_first(sender: Sender, run: Any) -> None:
    assert sender.take(1) == RolloutsTaken(True, "")
    assert sender.take(2, metadata='{"step": 2}') == RolloutsTaken(True, "")
    sender.send_all()
    assert sender.ids() == [1, 2]
    signed = decode_signed(sender.sent[1])
    batch = run.trust().accept_rollouts(signed)
    assert signed.signers == (run.inferencer.peer_id,)
    assert (batch.run_id, batch.metadata) == (run.run_id, '{"step": 2}')
    assert count(sender.metrics, "sent") == 2


def test_arrays_that_do_not_fit_are_refused_to_the_engine(sender: Sender) -> None:
    for changes in (
        {"body": b"\0\0\0\0"},
        {"sample_count": 3},
        {"version_first": Version(0, 2)},
        {"metadata": "x" * 70_000},
    ):
        taken = sender.take(1, **changes)
        assert not taken.accepted
        assert taken.reason
    assert len(sender.outbox) == 0
    assert count(sender.metrics, "malformed") == 4


def test_a_full_queue_drops_the_oldest(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_BATCHES_MAX", 2)
    assert all(sender.take(number).accepted for number in (1, 2, 3))
    sender.send_all()
    assert sender.ids() == [2, 3]
    assert count(sender.metrics, "dropped") == 1


@pytest.mark.parametrize(
    "passing",
    [
        UnavailableError("closed"),
        RemoteProtocolError("framing", "cut"),
        PushReply(False, "rate"),
        PushReply(False, "queue"),
        PushReply(False, "not_publisher"),
    ],
)
def test_a_batch_is_sent_again_until_it_is_taken(sender: Sender, passing: Any) -> None:
    sender.answers = [passing] * 8 + [PushReply(True, "")]
    sender.take()
    sender.send_all()
    assert sender.ids() == [1] * 9
    pauses = [later - earlier for earlier, later in zip(sender.sent_at, sender.sent_at[1:], strict=False)]
    assert pauses[0] == pytest.approx(limits.RETRY_SECONDS_MIN, abs=0.2)
    assert pauses[-1] == pytest.approx(limits.RETRY_SECONDS_MAX, abs=0.2)
    assert (count(sender.metrics, "sent"), count(sender.metrics, "refused")) == (1, 0)


def test_without_a_publisher_batches_wait(sender: Sender) -> None:
    sender.targets = [None, None, None, TRAINER]
    sender.take()
    sender.send_all()
    assert sender.ids() == [1]


def test_a_batch_the_trainer_will_never_take_makes_way(sender: Sender) -> None:
    sender.answers = [PushReply(False, "untrusted"), PushReply(True, "")]
    sender.take(1)
    sender.take(2)
    sender.send_all()
    assert sender.ids() == [1, 2]
    assert (count(sender.metrics, "sent"), count(sender.metrics, "refused")) == (1, 1)


def test_a_batch_dropped_while_under_way_takes_no_other_with_it(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_BATCHES_MAX", 1)

    async def take_another() -> PushReply:
        await sender.outbox.take(submission(sender.run.batch(2)))
        return PushReply(True, "")

    sender.answers = [take_another, PushReply(True, "")]
    sender.take()
    sender.send_all()
    assert sender.ids() == [1, 2]


# The trainer's side


class Receiver:
    """An inbox with a clock that stands still unless moved."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.now = 1_000.0
        self.metrics = Metrics()
        self.trust = run.trust()
        self.inbox = RolloutInbox(self.trust, self.metrics, lambda: self.now)

    def take(self, number: int, key: Any = None, **changes: Any) -> str:
        return self.take_record(self.run.signed_batch(number, key, **changes))

    def take_record(self, record: bytes) -> str:
        return asyncio.run(self.inbox.take(record))

    def give(self, count_max: int = 100) -> list[int]:
        """Return the ids of what the training process gets now."""
        batches = asyncio.run(self.inbox.give(count_max, 0.0))
        return [decode_value(RolloutBatch, item.batch).sequence for item in batches]

    def rejected(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("pulsenet_rejected_total", {"reason": reason}) or 0.0


@pytest.fixture
def receiver(run: Any) -> Receiver:
    return Receiver(run)


def test_batches_reach_the_training_process_in_order_with_their_signer(receiver: Receiver, run: Any) -> None:
    assert [receiver.take(number) for number in (1, 2, 3)] == ["", "", ""]
    assert receiver.give(2) == [1, 2]
    (last,) = asyncio.run(receiver.inbox.give(2, 0.0))
    assert last.peer_id == run.inferencer.peer_id
    assert decode_value(RolloutBatch, last.batch) == run.batch(3)
    assert receiver.give() == []
    assert receiver.metrics.registry.get_sample_value("pulsenet_rollout_queue_batches") == 0.0


def test_a_training_process_that_waits_is_woken_by_the_first_batch(receiver: Receiver) -> None:
    async def scenario() -> int:
        waiting = asyncio.create_task(receiver.inbox.give(5, 60.0))
        await asyncio.sleep(0)
        await receiver.inbox.take(receiver.run.signed_batch(1))
        return len(await waiting)

    assert asyncio.run(scenario()) == 1


def test_a_batch_sent_twice_counts_once(receiver: Receiver) -> None:
    """The first answer may have been lost, so the second one is friendly too."""
    assert [receiver.take(1), receiver.take(1)] == ["", ""]
    assert receiver.give() == [1]
    assert receiver.take(1) == ""
    assert receiver.give() == []
    assert (count(receiver.metrics, "taken"), count(receiver.metrics, "duplicate")) == (1, 2)


def test_nobody_takes_the_id_of_somebody_elses_batch(make_run: Any) -> None:
    run = make_run(open_inferencers_max=4)
    receiver = Receiver(run)
    assert receiver.take(1, run.stranger) == ""
    assert receiver.take(1) == ""
    assert receiver.give() == [1, 1]


def test_a_stranger_of_a_closed_run_is_refused_and_counted(receiver: Receiver, run: Any) -> None:
    assert receiver.take(1, run.stranger) == "untrusted"
    assert receiver.give() == []
    assert (count(receiver.metrics, "refused"), receiver.rejected("untrusted")) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"body": b"\0\0\0\0"}, "rollouts-shape"),
        ({"version_first": Version(0, 0)}, "rollouts-value"),
        ({"run_id": RunId(b"x" * 32)}, "wrong-run"),
        ({"version_last": Version(4, 9)}, "epoch"),
    ],
)
def test_a_batch_that_is_wrong_is_refused_with_its_code(receiver: Receiver, changes: Any, reason: str) -> None:
    assert receiver.take(1, **changes) == reason
    assert receiver.rejected(reason) == 1
    assert receiver.take(1) == "", "a refused batch uses up no id"


def test_bytes_and_signatures_that_do_not_hold_are_refused(receiver: Receiver, run: Any) -> None:
    assert receiver.take_record(b"\xc1") == "decode"
    signed = run.sign(run.batch(1), run.inferencer)
    forged = replace(signed, signatures=(bytes(64),))
    assert receiver.take_record(encode_signed(forged)) == "signature"
    assert receiver.take_record(encode_signed(run.news(1).manifest)) == "untrusted"


def test_a_key_may_send_a_burst_and_then_a_steady_rate(receiver: Receiver) -> None:
    numbers = iter(range(1, 10_000))
    assert [receiver.take(next(numbers)) for _ in range(int(BATCH_BURST))] == [""] * int(BATCH_BURST)
    late = next(numbers)
    assert receiver.take(late) == "rate"
    receiver.now += 1.5 / BATCHES_PER_SECOND
    assert receiver.take(late) == ""
    assert receiver.take(next(numbers)) == "rate"
    assert receiver.rejected("rate") == 2


def test_keys_that_fell_silent_are_forgotten(make_run: Any) -> None:
    run = make_run(open_inferencers_max=1)
    receiver = Receiver(run)
    for index in range(5):
        assert receiver.take(index, run.key(f"passing-{index}")) == ""
        receiver.now += ADMITTED_SECONDS + 1
    assert len(receiver.inbox._budgets) == 1


def test_an_open_run_admits_so_many_strangers_at_one_time(make_run: Any) -> None:
    run = make_run(open_inferencers_max=1)
    receiver = Receiver(run)
    other = run.key("other")
    assert receiver.take(1, run.stranger) == ""
    assert receiver.take(2, other) == "untrusted"
    assert receiver.take(3, run.stranger) == ""
    assert receiver.take(4) == "", "a listed key needs no place"
    receiver.now += ADMITTED_SECONDS
    assert receiver.take(5, other) == "", "the place of a key that fell silent is free"
    assert receiver.take(6, run.stranger) == "untrusted"


def test_the_queue_is_bounded_and_drops_the_oldest(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROLLOUT_QUEUE_BATCHES_MAX", 3)
    for number in range(1, 6):
        assert receiver.take(number) == ""
    assert receiver.give() == [3, 4, 5]
    assert count(receiver.metrics, "dropped") == 2


def test_the_memory_of_batch_ids_is_bounded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "BATCH_IDS_MAX", 2)
    for number in (1, 2, 3):
        receiver.take(number)
    assert len(receiver.inbox._seen) == 2
    receiver.take(3)
    assert receiver.give() == [1, 2, 3]


def test_one_reply_holds_no_more_than_a_frame_and_at_least_one_batch(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_size_bytes = len(decode_signed(receiver.run.signed_batch(1)).payload)
    for number in (1, 2, 3):
        receiver.take(number)
    monkeypatch.setattr(protocol, "ROLLOUTS_REPLY_SIZE_BYTES_MAX", 2 * batch_size_bytes)
    assert receiver.give() == [1, 2]
    assert receiver.give() == [3]
    receiver.take(4)
    monkeypatch.setattr(protocol, "ROLLOUTS_REPLY_SIZE_BYTES_MAX", 1)
    assert receiver.give() == [4]
