"""A node's part in the rounds: which machines it has, what a crash left, what peers and processes are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from drivers import make_driver, running

from pulsenet.chain.ballot import Ballot, Place, Stored
from pulsenet.chain.ledger import LEDGER_KEY
from pulsenet.chain.outcome import outcome_of
from pulsenet.chain.records import Aggregate, Contribution, Member, Receipt, SliceName, StateAnchor
from pulsenet.chain.signing import encode_signed, record_digest
from pulsenet.errors import RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, compute_digest
from pulsenet.node.candidacy import BALLOT_KEY, encode_ballot
from pulsenet.node.effects import Effect
from pulsenet.node.own_work import OWN_KEY
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.wire.messages import GetRounds, Message, PushReply, PushTerm, PushVote, Refusal, RoundsReply
from pulsenet.wire.schema import decode_value
from pulsenetd.metrics import Metrics
from pulsenetd.outer.part import PUSHES_WAITING_MAX, shape_of
from pulsenetd.outer.rounds import RoundsPart
from pulsenetd.storage.orphans import release_orphans
from pulsenetd.storage.store import Store

TABLE = make_table([TensorSpec("a", "F32", (8,))])
OTHER_TABLE = make_table([TensorSpec("b", "F32", (8,))])


class Scene:
    """Parts of nodes of one run with rounds, all with the same store."""

    def __init__(self, make_run: Callable[..., Any], store: Store) -> None:
        self.run = make_run(algorithm="pulseloco", constants=(("inner_steps", 4),))
        self.store = store
        self.metrics = Metrics()
        self.threads = ThreadPoolExecutor(1)
        self.trust = self.run.trust()
        self.taken_up = 0
        self.noted: dict[str, Any] = {}

    def part(self, role: str = "trainer", key: Any = None) -> RoundsPart:
        return RoundsPart(
            self.store,
            self.trust,
            key or self.run.publisher,
            role=role,
            metrics=self.metrics,
            threads=self.threads,
            note=lambda **fields: self.noted.update(fields),
        )

    async def take_up(self) -> bool:
        self.taken_up += 1
        return False

    def let_go(self, part: RoundsPart) -> None:
        release_orphans(self.store, [part.needs], 0.0)

    def hook(self, part: RoundsPart) -> Any:
        return part.hook(self.take_up)

    def ask(self, part: RoundsPart, *requests: Any) -> list[Message]:
        """Have the part answer a peer, its machines under a driver."""

        async def scenario() -> list[Message]:
            driver = make_driver(part.machines, self.run.now_ms)
            part.bind(driver)
            async with running(driver):
                return [await part.answer(self.run.second.peer_id, request) for request in requests]

        return asyncio.run(scenario())

    # Records of rounds

    def contribution(self, round_index: int, key: Any) -> Any:
        with self.store.writing_blob() as writer:
            writer.feed(b"%d of %s" % (round_index, key.peer_id))
            blob_id = writer.finish().blob_id
        record = Contribution(
            run_id=self.run.run_id,
            revision=0,
            peer_id=key.peer_id,
            round_index=round_index,
            base_state_root=compute_digest(b"state"),
            blob_id=blob_id,
            encoded_size_bytes=8,
            entry_count=1,
            element_count=8,
            norm_bits=0,
            codec_id=1,
        )
        return self.run.sign(record, key)

    def receipt(self, contribution: Any, key: Any) -> Any:
        member = Member(key.peer_id, record_digest(contribution), 0x3F80_0000)
        receipt = Receipt(
            self.run.run_id, 0, 1, self.run.publisher.peer_id, 0, compute_digest(b"state"), None, (member,), ()
        )
        return self.run.sign(receipt, self.run.publisher, self.run.second)

    def aggregate(self, round_index: int, final: Any) -> Any:
        with self.store.writing_blob() as writer:
            writer.feed(b"slice of %d" % round_index)
            name = SliceName(writer.finish().blob_id, 10)
        outcome = outcome_of(decode_value(Receipt, final.payload))
        return self.run.sign(Aggregate(self.run.run_id, 0, round_index, outcome, (name,)), self.run.publisher)

    def anchor(self, blob_id: Digest) -> Any:
        record = StateAnchor(self.run.run_id, 0, 0, compute_digest(b"state"), None, blob_id, 8)
        return self.run.sign(record, self.run.publisher)


@pytest.fixture
def scene(make_run: Callable[..., Any], store: Store) -> Iterator[Scene]:
    made = Scene(make_run, store)
    yield made
    made.threads.shutdown()


# Which machines


@pytest.mark.parametrize(
    ("role", "key", "machines"),
    [
        ("trainer", "publisher", {"coordinator", "rounds", "listener"}),
        ("trainer", "stranger", {"rounds"}),
        ("seed", "second", {"coordinator", "onlooker"}),
        ("inferencer", "second", {"coordinator", "onlooker"}),
        ("inferencer", "inferencer", {"onlooker"}),
        ("seed", "stranger", {"onlooker"}),
    ],
)
def test_a_node_has_the_machines_of_its_keys_and_role(scene: Scene, role: str, key: str, machines: set[str]) -> None:
    """Design section 4: authorities vote, trainers contribute, and only who is both may coordinate."""
    part = scene.part(role, getattr(scene.run, key))
    assert set(part.machines) == machines
    assert (part.coordinator is None) == ("coordinator" not in machines)
    assert (part.rounds is None) == ("rounds" not in machines)


def test_a_run_without_rounds_has_none_of_them(make_run: Callable[..., Any], scene: Scene) -> None:
    scene.run = make_run()
    scene.trust = scene.run.trust()
    part = scene.part()
    assert part.machines == {}
    assert part.shape == ()
    (answer,) = scene.ask(part, GetRounds(0))
    assert isinstance(answer, Refusal)
    assert (answer.code, answer.retry_after_ms) == ("unavailable", 60_000)
    with pytest.raises(RemoteProtocolError) as caught:
        asyncio.run(scene.hook(part).settings())
    assert caught.value.code == "no-rounds"
    assert scene.taken_up == 1


def test_only_what_decides_the_machines_builds_them_anew(scene: Scene) -> None:
    run, me = scene.run, scene.run.publisher.peer_id
    before = shape_of(run.descriptor, me)

    def after(**changes: Any) -> tuple[Any, ...]:
        trust = run.trust()
        trust.accept_descriptor(run.revise(run.genesis, run.descriptor, **changes))
        return shape_of(trust.descriptor, me)

    admitted = tuple(sorted((me, run.stranger.peer_id)))
    assert after(trainers=admitted) == before
    assert after(inferencers=()) == before
    assert after(constants=(("inner_steps", 8),)) != before
    assert after(algorithm="diloco") != before
    assert after(authorities=(run.second.peer_id,)) != before
    assert after(algorithm="none") == ()
    assert shape_of(None, me) == ()


# What a crash left


def test_a_damaged_ballot_never_votes_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.store.save_state(BALLOT_KEY, b"rotten")
    part = scene.part()
    assert part.coordinator is None
    assert set(part.machines) == {"rounds"}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "this key must not vote" in record.getMessage()


def test_a_damaged_ledger_is_learnt_anew(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    signed = scene.contribution(0, scene.run.stranger)
    scene.store.put_record(signed)
    scene.store.save_state(LEDGER_KEY, b"rotten")
    scene.store.save_state(OWN_KEY, b"rotten")
    part = scene.part()
    scene.let_go(part)
    assert part.ledger.next_round_index == 0
    assert set(part.machines) == {"coordinator", "rounds", "listener"}
    assert "learnt anew from peers" in caplog.text
    assert "learnt from receipts" in caplog.text
    assert scene.store.record(record_digest(signed)) is not None, "nothing tells what is still needed"


def test_records_that_nobody_names_go_with_their_blobs(scene: Scene) -> None:
    first = scene.part()
    kept, orphan = scene.contribution(0, scene.run.publisher), scene.contribution(0, scene.run.stranger)
    anchor = scene.anchor(first.ledger.accept_listed(kept).contribution.blob_id)
    final = scene.receipt(kept, scene.run.publisher)
    first.ledger.accept_final(final)
    for signed in (kept, final, orphan, anchor):
        scene.store.put_record(signed)
    scene.store.save_state(LEDGER_KEY, first.ledger.save())
    again = scene.part()
    scene.let_go(again)
    assert again.ledger.final(0) is not None
    assert scene.store.record(record_digest(kept)) is not None
    assert scene.store.record(record_digest(final)) is not None
    assert scene.store.record(record_digest(orphan)) is None
    assert scene.store.record(record_digest(anchor)) is None
    assert len(scene.store.blob_ids()) == 1, "the orphaned anchor shares the blob of what is kept"


def test_an_own_contribution_that_was_promised_is_taken_in(scene: Scene) -> None:
    """The crash came between promising it and saving the ledger; a lone trainer would wait for itself for ever."""
    mine, old = scene.contribution(1, scene.run.publisher), scene.contribution(0, scene.run.publisher)
    first = scene.part()
    first.ledger.accept_final(scene.receipt(old, scene.run.publisher))
    for signed in (*first.ledger.records(), mine, old):
        scene.store.put_record(signed)
    scene.store.save_state(LEDGER_KEY, first.ledger.save())
    part = scene.part()
    scene.let_go(part)
    assert part.ledger.contribution(record_digest(mine)) is not None
    assert scene.store.record(record_digest(mine)) is not None
    assert scene.store.record(record_digest(old)) is None
    assert part.ledger.contribution(record_digest(old)) is None
    assert part.ledger.is_changed


def test_the_receipt_an_authority_stored_last_stays(scene: Scene) -> None:
    signed = scene.receipt(scene.contribution(0, scene.run.stranger), scene.run.stranger)
    scene.store.put_record(signed)
    ballot = Ballot(1, None, Stored(Place(0, 1), compute_digest(b"outcome"), record_digest(signed)))
    scene.store.save_state(BALLOT_KEY, encode_ballot(ballot))
    scene.let_go(scene.part())
    assert scene.store.record(record_digest(signed)) is not None


def test_sums_that_nobody_names_go_with_their_slices(scene: Scene) -> None:
    """A-DSK-3: the crash came before the ledger that names them was saved, or after it forgot them."""
    first = scene.part()
    counted = scene.contribution(0, scene.run.publisher)
    final = scene.receipt(counted, scene.run.publisher)
    kept, orphan = (scene.aggregate(index, final) for index in (0, 1))
    first.ledger.accept_listed(counted)
    first.ledger.accept_final(final)
    assert first.ledger.accept_aggregate(kept)
    for signed in (counted, final, kept, orphan):
        scene.store.put_record(signed)
    scene.store.save_state(LEDGER_KEY, first.ledger.save())
    scene.let_go(scene.part())
    assert scene.store.record(record_digest(kept)) is not None
    assert scene.store.record(record_digest(orphan)) is None
    assert len(scene.store.blob_ids()) == 2, "the contribution and the one slice"


# What peers are told


def test_peers_are_told_of_rounds_and_their_pushes_are_judged(scene: Scene) -> None:
    reply, vote, term = scene.ask(scene.part(), GetRounds(0), PushVote(b"no vote"), PushTerm((b"no vote",)))
    assert isinstance(reply, RoundsReply)
    assert (reply.round_index, reply.receipts) == (0, ())
    assert vote == PushReply(False, "schema")
    assert term == PushReply(False, "schema")


def test_a_trainer_that_is_no_authority_takes_no_votes(scene: Scene) -> None:
    part = scene.part(key=scene.run.stranger)
    assert scene.ask(part, PushVote(encode_signed(scene.run.genesis))) == [PushReply(False, "not-authority")]


async def test_who_pushes_too_much_is_told_to_come_back(scene: Scene) -> None:
    part = scene.part()
    driver = make_driver(part.machines)
    part.bind(driver)
    waiting = [
        asyncio.create_task(part.answer(scene.run.second.peer_id, PushVote(b"%d" % number)))
        for number in range(PUSHES_WAITING_MAX)
    ]
    await asyncio.sleep(0)
    refused = await part.answer(scene.run.second.peer_id, PushVote(b"more"))
    asked = await part.answer(scene.run.second.peer_id, GetRounds(0))
    async with running(driver):
        await asyncio.wait(waiting)
        heard = await part.answer(scene.run.second.peer_id, PushVote(b"again"))
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.retry_after_ms) == ("busy", 1_000)
    assert isinstance(asked, RoundsReply), "a question waits for nobody"
    assert heard == PushReply(False, "schema")


# What a training process is told


async def test_a_training_process_is_told_the_constants_and_whose_key_it_has(scene: Scene) -> None:
    reply = await scene.hook(scene.part()).settings()
    assert (reply.algorithm, reply.constants) == ("pulseloco", (("inner_steps", 4),))
    assert reply.peer_id == scene.run.publisher.peer_id
    assert scene.taken_up == 0


def test_what_the_gate_holds_back_is_noted(scene: Scene) -> None:
    scene.hook(scene.part()).on_residual(0.25)
    assert scene.noted == {"residual_norm": 0.25}


async def test_other_masters_are_refused_once_a_round_is_over(scene: Scene) -> None:
    part = scene.part()
    check = scene.hook(part).check_masters
    await check(OTHER_TABLE, SELF_TEST_DIGEST)
    await check(TABLE, SELF_TEST_DIGEST)
    part.ledger.accept_final(scene.receipt(scene.contribution(0, scene.run.publisher), scene.run.publisher))
    await check(TABLE, SELF_TEST_DIGEST)
    with pytest.raises(RemoteProtocolError) as caught:
        await check(OTHER_TABLE, SELF_TEST_DIGEST)
    assert caught.value.code == "table"
    with pytest.raises(RemoteProtocolError) as caught:
        await check(TABLE, Digest(bytes(32)))
    assert caught.value.code == "self-test"


async def test_a_key_that_the_run_does_not_count_is_told_at_once(scene: Scene) -> None:
    check = scene.hook(scene.part(key=scene.run.stranger)).check_masters
    with pytest.raises(RemoteProtocolError, match=r"pulsenet run admit .* --role trainer") as caught:
        await check(TABLE, SELF_TEST_DIGEST)
    assert caught.value.code == "not-listed"
    scene.trust.accept_descriptor(scene.run.revise(scene.run.genesis, scene.run.descriptor, open_trainers_max=1))
    await check(TABLE, SELF_TEST_DIGEST)


async def test_a_full_disk_keeps_no_process_out(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(key: str, value: bytes) -> None:
        raise StorageError("disk full", "enospc")

    monkeypatch.setattr(scene.store, "save_state", refuse)
    await scene.hook(scene.part()).check_masters(TABLE, SELF_TEST_DIGEST)
    assert "disk full" in caplog.text
    assert b'pulsenet_rejected_total{reason="enospc"} 1.0' in scene.metrics.text()


async def test_a_process_comes_back_when_the_machines_are_built_anew(scene: Scene) -> None:
    run, part = scene.run, scene.part()
    scene.trust.accept_descriptor(run.revise(run.genesis, run.descriptor, constants=(("inner_steps", 8),)))
    assert (await scene.hook(part).settings()).constants == (("inner_steps", 8),)
    with pytest.raises(UnavailableError):
        await scene.hook(part).check_masters(TABLE, SELF_TEST_DIGEST)


async def test_chunks_that_rotted_make_the_machines_begin_again(scene: Scene) -> None:
    part = scene.part()
    seen: list[Any] = []

    class Told:
        def handle(self, event: Any, now: float, now_ms: int) -> list[Effect]:
            seen.append(event)
            return []

    machines: Any = {"coordinator": Told(), "rounds": Told(), "listener": Told()}
    driver = make_driver(machines)
    part.bind(driver)
    async with running(driver):
        scene.hook(part).on_damage()
        await driver.settle("rounds")
    assert [type(event).__name__ for event in seen].count("StoreFailed") == 2
