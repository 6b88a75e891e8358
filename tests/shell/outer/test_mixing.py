"""A node's part in a run that mixes: which machines it has, what peers and processes are told, what status shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from drivers import make_driver, running

from pulsenet.chain.records import Roster
from pulsenet.chain.signing import encode_signed
from pulsenet.errors import RemoteProtocolError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import mixing_protocol as local
from pulsenet.node.candidacy import BALLOT_KEY
from pulsenet.node.mixing.effects import CompareProbes
from pulsenet.node.mixing.events import ProbesCompared
from pulsenet.node.mixing.journal import MIXING_KEY, Journal
from pulsenet.outer.floats import fp32_to_bits
from pulsenet.outer.mixing.disagreement import encode_probe
from pulsenet.outer.mixing.probe import Answer
from pulsenet.outer.mixing.settings import MixingSettings, MixingVariant
from pulsenet.outer.plan_link import Link
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import TensorSpec, make_table
from pulsenet.wire.messages import (
    GetAggregates,
    GetRoster,
    GetRounds,
    GetShares,
    Message,
    PushProbe,
    PushReply,
    PushShare,
    PushVote,
    Refusal,
    RosterReply,
    RoundsReply,
    SharesReply,
)
from pulsenetd.metrics import Metrics
from pulsenetd.outer.mixing import MixingPart
from pulsenetd.outer.part import MASTERS_KEY, PUSHES_WAITING_MAX
from pulsenetd.storage.orphans import release_orphans
from pulsenetd.storage.store import Store

TABLE = make_table([TensorSpec("embed", "F32", (8,)), TensorSpec("layers.0.w", "F32", (24,))])
SUBSET = MixingSettings(variant=MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET, subset_ratio=0.25)


class Scene:
    """Parts of nodes of one run that mixes, all with the same store."""

    def __init__(self, make_run: Callable[..., Any], store: Store, settings: MixingSettings) -> None:
        self.run = make_run(algorithm="gossip", constants=settings.to_constants())
        self.store, self.metrics, self.threads = store, Metrics(), ThreadPoolExecutor(1)
        self.noted: dict[str, Any] = {}

    def part(self, role: str = "trainer", key: Any = None, **fields: Any) -> MixingPart:
        return MixingPart(
            self.store,
            self.run.trust(),
            key or self.run.publisher,
            role=role,
            metrics=self.metrics,
            threads=self.threads,
            note=lambda **noted: self.noted.update(noted),
            **fields,
        )

    def drive(self, part: MixingPart, work: Callable[[], Any]) -> Any:
        """Do something while the part's machines are under a driver."""

        async def scenario() -> Any:
            driver = make_driver(part.machines, self.run.now_ms)
            part.bind(driver)
            async with running(driver):
                return await work()

        return asyncio.run(scenario())

    def ask(self, part: MixingPart, request: Any) -> Message:
        answer: Message = self.drive(part, lambda: part.answer(self.run.key("peer").peer_id, request))
        return answer


@pytest.fixture
def make_scene(make_run: Callable[..., Any], store: Store) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(settings: MixingSettings | None = None) -> Scene:
        scenes.append(Scene(make_run, store, settings or MixingSettings(inner_steps=4)))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.threads.shutdown()


def test_which_machines_a_node_has_follows_from_its_role_and_key(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    assert set(scene.part().machines) == {"mixing", "coordinator", "listener"}
    assert set(scene.part("seed").machines) == {"coordinator"}
    assert set(scene.part(key=scene.run.key("other")).machines) == {"mixing"}
    assert set(scene.part("inferencer", key=scene.run.key("other")).machines) == set()


def test_a_damaged_ballot_keeps_the_node_from_voting(make_scene: Callable[..., Scene], store: Store) -> None:
    store.save_state(BALLOT_KEY, b"nonsense")
    store.save_state(MIXING_KEY, b"nonsense")
    part = make_scene().part()
    assert set(part.machines) == {"mixing"}
    assert part.mixing is not None
    assert part.mixing.round_index is None, "what was agreed to is forgotten"


def test_blobs_that_the_journal_does_not_name_go_with_the_process(
    make_scene: Callable[..., Scene], store: Store
) -> None:
    """A-DSK-3: killed between keeping a vector and noting it, or between forgetting a round and letting it go."""
    scene = make_scene()
    blob_ids = []
    for data in (b"noted", b"forgotten"):
        with store.writing_blob() as writer:
            writer.feed(data)
            blob_ids.append(writer.finish().blob_id)
        store.keep_blob(blob_ids[-1])
    journal = Journal(None)
    journal.track(3, blob_ids[0])
    store.save_state(MIXING_KEY, journal.save(()).value)
    for role in ("seed", "trainer"):
        release_orphans(store, [scene.part(role).needs], 0.0)
        assert store.blob_ids() == blob_ids[:1], role
    store.save_state(MIXING_KEY, b"rotten")
    release_orphans(store, [scene.part().needs], 0.0)
    assert store.blob_ids() == [], "nothing is left that could want it"


def test_peers_are_answered(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    assert isinstance(scene.ask(scene.part(), GetRoster(0)), RosterReply)
    assert isinstance(scene.ask(scene.part(), GetRoster(None)), RosterReply)
    assert isinstance(scene.ask(scene.part(), GetRounds(0)), RoundsReply)
    assert isinstance(scene.ask(scene.part(), GetShares(None, 0, 0)), SharesReply)
    assert not isinstance(scene.ask(scene.part(), GetAggregates(0)), Refusal)
    answer = scene.ask(scene.part(key=scene.run.key("other")), PushVote(b"no vote"))
    assert answer == PushReply(False, "not-authority")
    answer = scene.ask(scene.part("seed"), PushShare(b"no share"))
    assert answer == PushReply(False, "unexpected"), "a node that trains nothing takes none"
    assert scene.ask(scene.part(), PushProbe(b"no probe")) == PushReply(False, "schema")
    answer = scene.ask(scene.part(key=scene.run.key("other")), PushProbe(b"no probe"))
    assert answer == PushReply(False, "unexpected"), "only a coordinator takes answers"


def test_too_many_pushes_at_once_are_told_to_come_back(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    part = scene.part()
    part._waiting_count = PUSHES_WAITING_MAX
    for request in (GetRoster(0), PushVote(b"")):
        answer = scene.ask(part, request)
        assert isinstance(answer, Refusal)
        assert answer.code == "busy"
    assert isinstance(scene.ask(part, GetShares(None, 0, 0)), SharesReply), "nothing is shown for it"


async def take_up() -> bool:
    raise AssertionError("the run has an algorithm")


async def test_a_training_process_is_told_the_constants(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    part = scene.part()
    reply = await part.hook(take_up).settings()
    assert MixingSettings.from_constants(reply.algorithm, reply.constants) == MixingSettings(inner_steps=4)
    assert reply.peer_id == scene.run.publisher.peer_id


def test_masters_are_checked_and_remembered(make_scene: Callable[..., Scene], store: Store) -> None:
    scene = make_scene()
    part = scene.part()
    check = part.hook(take_up).check_masters
    scene.drive(part, lambda: check(TABLE, SELF_TEST_DIGEST))
    assert store.state(MASTERS_KEY) == bytes(TABLE.digest)
    with pytest.raises(RemoteProtocolError, match="self-test"):
        scene.drive(part, lambda: check(TABLE, Digest(bytes(32))))
    part.shape = ()
    with pytest.raises(UnavailableError, match="built anew"):
        scene.drive(part, lambda: check(TABLE, SELF_TEST_DIGEST))
    stranger = scene.part(key=scene.run.key("stranger"))
    with pytest.raises(RemoteProtocolError, match="not-listed"):
        scene.drive(stranger, lambda: stranger.hook(take_up).check_masters(TABLE, SELF_TEST_DIGEST))


def test_an_authority_that_trains_chooses_the_first_subset(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(SUBSET)
    part = scene.part()

    async def work() -> None:
        await part.hook(take_up).check_masters(TABLE, SELF_TEST_DIGEST)
        await part._require_driver().settle("coordinator")

    scene.drive(part, work)
    assert part.coordinator is not None
    assert part.coordinator.measuring.find_subset() == (0,), "a quarter of the elements: the embeddings"


def tell(**changes: Any) -> local.TellRound:
    fields: dict[str, Any] = {
        "round_index": 3,
        "mix1_count": 4,
        "mix2_count": 2,
        "mix1_reason": "",
        "mix2_reason": "",
        "inner_seconds_bits": fp32_to_bits(3.0),
        "blocked_seconds_bits": fp32_to_bits(1.0),
        "utilization_bits": fp32_to_bits(0.75),
        "delta_norm_bits": fp32_to_bits(2.0),
        "distance_bits": None,
        "start_square_bits": None,
        "end_square_bits": None,
        "noise_square_bits": None,
        "is_consensus": None,
    }
    return local.TellRound(**{**fields, **changes})


def test_status_shows_what_rounds_did_and_what_was_to_be_expected(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    part = scene.part(find_link=lambda: Link(down_mbps=0.0001, up_mbps=0.0001))
    assert scene.noted == {"mixing_variant": "global_m1_local_m2", "consensus": True}
    hook = part.hook(take_up)
    hook.on_round(tell())
    assert scene.noted["utilization_ratio"] == 0.75
    assert scene.noted["utilization_predicted_ratio"] is None, "no process said what it trains"
    hook.desk.masters = TABLE
    hook.on_round(tell(inner_seconds_bits=fp32_to_bits(1.0), distance_bits=fp32_to_bits(0.5)))
    assert scene.noted["utilization_ratio"] == pytest.approx(4 / 6), "the mean over the last rounds"
    assert scene.noted["mixing_distance"] == 0.5
    assert (scene.noted["mix1_contributors"], scene.noted["mix2_contributors"]) == (4, 2)
    assert scene.noted["utilization_predicted_ratio"] == 1.0, "alone as far as anybody told"


def test_what_has_no_consensus_says_so(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene(MixingSettings(variant=MixingVariant.LOCAL_M1_M2))
    scene.part()
    assert scene.noted["consensus"] is False


def convene(scene: Scene, part: MixingPart, members: int = 4, **changes: Any) -> None:
    """Let a roster of so many trainers be known, whoever they are."""
    fields: dict[str, Any] = {
        "run_id": scene.run.run_id,
        "revision": 0,
        "term": 1,
        "number": 1,
        "first_round": 0,
        "round_count": 8,
        "members": tuple(sorted(PeerId(bytes([place]) * 32) for place in range(members))),
        "subset": (0,),
    }
    signed = scene.run.sign(Roster(**{**fields, **changes}), scene.run.publisher)
    part.rosters.restore([encode_signed(signed)])


@pytest.mark.parametrize(
    ("variant", "bound"),
    [
        (MixingVariant.GLOBAL_M1_LOCAL_M2_SUBSET, (16.0 * (1 + 0.7**2 / 3)) ** 0.5),
        (MixingVariant.DILOCO, 4.0),
        (MixingVariant.LOCAL_M1_M2, (16.0 * (1 + 0.7**2 * (1 / 3) / (2 / 3))) ** 0.5),
    ],
)
def test_status_shows_how_far_apart_weights_are_beside_what_theory_bounds(
    make_scene: Callable[..., Scene], variant: MixingVariant, bound: float
) -> None:
    scene = make_scene(MixingSettings(variant=variant, learning_rate=0.7))
    part = scene.part()
    hook = part.hook(take_up)
    hook.desk.masters = TABLE
    squares = {"start_square_bits": fp32_to_bits(9.0), "end_square_bits": fp32_to_bits(25.0)}
    hook.on_round(tell(**squares, noise_square_bits=fp32_to_bits(16.0)))
    assert scene.noted["disagreement_l2_bound"] is None, "no roster is known"
    convene(scene, part)
    hook.on_round(tell(**squares, noise_square_bits=fp32_to_bits(16.0)))
    assert (scene.noted["disagreement_l2_start"], scene.noted["disagreement_l2_end"]) == (3.0, 5.0)
    assert scene.noted["disagreement_l2_bound"] == pytest.approx(bound, rel=1e-6)
    assert scene.noted["mixing_subset_ratio"] == 0.25
    hook.on_round(tell())
    assert scene.noted["disagreement_l2_end"] is None, "a mean was not whole"
    assert scene.noted["disagreement_l2_bound"] is None


def test_a_round_whose_mean_was_not_whole_published_no_consensus(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    hook = scene.part().hook(take_up)
    for published, shown in ((None, True), (False, False), (None, False), (True, True)):
        hook.on_round(tell(is_consensus=published))
        assert scene.noted["consensus"] is shown


async def test_answers_are_compared_beside_the_event_loop(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene()
    part = scene.part()
    rows = [[1.0, 0.0], [0.0, 1.0]]
    answers = tuple(
        Answer(Digest(bytes(32)), Digest(bytes(32)), encode_probe(np.array([row]), round_index=8)) for row in rows
    )
    told: list[Any] = []
    handler = part.handlers[CompareProbes]
    await handler(CompareProbes(5, 8, answers), told.append)  # type: ignore[arg-type]
    assert told == [ProbesCompared(5, 1.0)]
