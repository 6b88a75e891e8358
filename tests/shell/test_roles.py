"""Trainer, inferencer and seed: their machines, handlers and local hooks work together without a network."""

from __future__ import annotations

import asyncio
import http.client
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import wait_until

from pulsenet.chain.records import Catalogue, Have, Head, Manifest
from pulsenet.chain.signing import decode_signed, encode_signed, open_record, record_digest
from pulsenet.errors import UnavailableError
from pulsenet.ids import Digest, PeerId, Version, compute_digest
from pulsenet.local.protocol import PublishDone, PublishStatus, SubmitRollouts, UpdateKind
from pulsenet.node.effects import EXECUTION_ORDER, AnnounceHead, DialPeer, Release, SendRequest, SetTimer
from pulsenet.node.events import (
    BlobLost,
    EngineApplied,
    EngineFailed,
    Event,
    HeadSeen,
    PeerConnected,
    ReplyReceived,
    RequestDone,
    TimerFired,
)
from pulsenet.node.mesh import BOOK_KEY, Holdings
from pulsenet.node.respond import respond
from pulsenet.node.trainer_phase import Phase
from pulsenet.serving.files import FilesEngine
from pulsenet.serving.vllm.engine import UpdateTimes
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.messages import GetChunks
from pulsenetd import roles, startup
from pulsenetd.config import Config
from pulsenetd.engines import own
from pulsenetd.engines.vllm_process import pick_port
from pulsenetd.handlers.reporting import Ledger
from pulsenetd.handlers.store import StoreHandlers
from pulsenetd.identity import verify
from pulsenetd.local.server import EngineConfirmation, LocalHooks, LocalServer, SnapshotOffer
from pulsenetd.membership import Membership
from pulsenetd.metrics import Metrics
from pulsenetd.network.addresses import join_address
from pulsenetd.network.streams import Traffic
from pulsenetd.rollouts import Rollouts
from pulsenetd.storage.store import Store
from pulsenetd.trust_state import open_trust
from pulsenetd.view import NodeView

HERE = "/ip4/10.0.0.1/tcp/1"


async def refuse_rounds() -> bool:
    """No training process asks here."""
    return False


class Node:
    """One role under a driver without time: when nothing is queued, the clock goes to the machine's timer."""

    def __init__(self, home: Path, now_ms: int, **changes: Any) -> None:
        self.config = Config(**changes)
        self.settled = startup.settle(
            self.config, {"XDG_DATA_HOME": str(home)}, say=print, now_ms=lambda: now_ms, sleep=lambda _: None
        )
        self.start_ms = now_ms
        self.now = 0.0
        self.timer = 0.0
        self.queue: deque[Event] = deque([TimerFired()])
        self.posted: list[Event] = []
        self.heads: list[Any] = []
        self.upstream: Node | None = None
        self.threads = ThreadPoolExecutor(2)
        self.store = Store.open(self.settled.data_directory, lock=self.settled.lock)
        self.trust = open_trust(self.store, self.settled.token, verify)
        Membership(self.settled.run_path, self.store, self.trust).refresh()
        self.metrics = Metrics()
        self.ledger = Ledger(self.metrics, lambda: self.now)
        self.role: Any = None
        self.rollouts: Rollouts | None = None

    @property
    def peer_id(self) -> PeerId:
        return self.settled.identity.peer_id

    async def build(self) -> None:
        parts = roles.Parts(
            config=self.config,
            settled=self.settled,
            store=self.store,
            trust=self.trust,
            ledger=self.ledger,
            metrics=self.metrics,
            work_threads=self.threads,
            block_threads=self.threads,
            monotonic=lambda: self.now,
        )
        self.role = await roles.build_role(parts, (HERE,), Traffic().meters)
        self.role.bind(self.post)
        store = StoreHandlers(self.store, self.threads, lambda: self.now)
        self.handlers: dict[Any, Any] = {**store.table(), **self.ledger.table(), **self.role.handlers}
        self.handlers[SendRequest] = self._request
        self.handlers[AnnounceHead] = self._announce

    def post(self, event: Event) -> None:
        self.posted.append(event)
        self.queue.append(event)

    async def drive(self, until: Callable[[], bool]) -> None:
        """Let the machine work until a condition holds."""
        for _ in range(2_000):
            if until():
                return
            if self.queue:
                event = self.queue.popleft()
            else:
                self.now = max(self.now, self.timer)
                event = TimerFired()
            effects = self.role.machine.handle(event, self.now, self.start_ms + int(self.now * 1000))
            for effect in sorted(effects, key=lambda effect: EXECUTION_ORDER[type(effect)]):
                if isinstance(effect, SetTimer):
                    self.timer = effect.at
                elif type(effect) in self.handlers:
                    await self.handlers[type(effect)](effect, self.queue.append)
        raise AssertionError("the machine does not get there")

    def hooks(self) -> LocalHooks:
        if self.rollouts is None:
            settled = self.settled
            self.rollouts = Rollouts(
                self.config,
                settled.data_directory,
                settled.token.run_id,
                settled.identity,
                self.trust,
                self.metrics,
                lambda: self.now,
            )
        hooks: LocalHooks = self.role.hooks(self.rollouts, lambda: {"role": self.config.role}, refuse_rounds)
        return hooks

    async def publish(self, model: Any, generation: int = 1) -> PublishDone:
        offer = SnapshotOffer(generation, generation, model.parts())
        outcome = await self.hooks().on_snapshot(offer)
        await self.drive(outcome.done)
        if outcome.result().status is PublishStatus.COMMITTED:
            await self.drive(lambda: bool(self.heads))
        return outcome.result()

    async def follow(self, upstream: Node) -> None:
        """Hear of the upstream's newest version, an anchor, and get it."""
        self._connect(upstream)
        version = upstream.role.machine.state.version
        await self.drive(lambda: version.number in self.role.machine.holdings.anchors)

    async def hear(self, upstream: Node) -> None:
        """Hear of the upstream's newest version, and move the mirror to it."""
        self._connect(upstream)
        version = upstream.role.machine.state.version
        await self.drive(lambda: self.role.machine.mirror_version == version)

    def _connect(self, upstream: Node) -> None:
        self.upstream = upstream
        self.queue.append(PeerConnected(upstream.peer_id, (HERE,), outbound=True))
        self.queue.append(HeadSeen(encode_signed(upstream.heads[-1]), upstream.peer_id))

    async def _announce(self, effect: AnnounceHead, post: Any) -> None:
        self.heads.append(effect.record)

    async def _request(self, effect: SendRequest, post: Any) -> None:
        assert self.upstream is not None
        other = self.upstream
        view = NodeView(other.store, other.trust, other.role.mesh, tuple, lambda: other.now)
        for reply in respond(effect.message, view):
            post(ReplyReceived(effect.request_id, effect.peer_id, reply))
        if isinstance(effect.message, GetChunks):
            post(RequestDone(effect.request_id, effect.peer_id))

    def close(self) -> None:
        if self.role is not None:
            self.role.close()
        if self.rollouts is not None:
            self.rollouts.close()
        self.threads.shutdown()
        self.store.close()
        self.settled.lock.release()


class Swarm:
    def __init__(self, home: Path, now_ms: int) -> None:
        self.home, self.now_ms = home, now_ms
        self.nodes: list[Node] = []

    async def start(self, role: str, **changes: Any) -> Node:
        node = Node(self.home, self.now_ms, role=role, **changes)
        self.nodes.append(node)
        await node.build()
        return node

    def stop(self, node: Node) -> None:
        self.nodes.remove(node)
        node.close()


@pytest.fixture
def swarm(tmp_path: Path, run: Any) -> Iterator[Swarm]:
    made = Swarm(tmp_path / "home", run.now_ms)
    yield made
    for node in made.nodes:
        node.close()


def submission(run: Any) -> SubmitRollouts:
    batch = run.batch(1)
    return SubmitRollouts(**{name: getattr(batch, name) for name in SubmitRollouts.__dataclass_fields__})


async def test_machines_hear_of_events_in_the_order_that_the_simulator_has(swarm: Swarm) -> None:
    for role, machines in (("trainer", ["mesh", "role", "mender"]), ("inferencer", ["mesh", "role"])):
        node = await swarm.start(role)
        assert list(node.role.machines) == machines


# Trainer


async def test_a_trainer_publishes_and_goes_on_after_a_restart(swarm: Swarm, hands: Any) -> None:
    model = hands.Model()

    node = await swarm.start("trainer")
    assert node.role.machine.holdings == Holdings()
    first = await node.publish(model)
    assert (first.status, first.version) == (PublishStatus.COMMITTED, Version(0, 1))
    assert node.role.machine.holdings == Holdings(0, 1, 1, (1,))
    swarm.stop(node)
    again = await swarm.start("trainer")
    assert again.role.machine.holdings == Holdings(0, 1, 1, (1,))
    model.step()
    second = await again.publish(model)
    assert (second.status, second.version) == (PublishStatus.COMMITTED, Version(0, 2))
    assert second.changed_count < second.element_count // 10, "the baseline was rebuilt: no second anchor"


async def test_a_trainer_that_may_not_publish_says_so(swarm: Swarm, hands: Any) -> None:
    await swarm.start("trainer")
    second = await swarm.start("trainer")
    outcome = await second.hooks().on_snapshot(SnapshotOffer(1, 1, hands.Model().parts()))
    assert outcome.done(), "before any part is asked for"
    assert (outcome.result().status, outcome.result().version) == (PublishStatus.NOT_PUBLISHER, None)


async def test_a_trainer_has_nothing_for_engines(swarm: Swarm, run: Any) -> None:
    node = await swarm.start("trainer")
    hooks = node.hooks()
    assert await hooks.on_engine_request(None, None, 0.0) is None
    await hooks.on_confirm(EngineConfirmation(Version(0, 1), True, Version(0, 1), ""))
    taken = await hooks.on_rollouts(submission(run))
    assert not taken.accepted
    assert "submitted at an inferencer" in taken.reason
    assert await hooks.on_take_rollouts(10, 0.0) == ()
    assert await hooks.on_status() == {"role": "trainer"}
    assert node.posted == []
    node.role.start_engine()
    node.role.stop_engine()


# Inferencer and seed


async def test_an_inferencer_follows_a_trainer_and_serves_its_engine(swarm: Swarm, hands: Any) -> None:
    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    node = await swarm.start("inferencer", engine="none")
    assert await node.hooks().on_engine_request(None, None, 0.0) is None
    await node.follow(trainer)
    await node.drive(lambda: node.role._following._due is not None)
    staged = await node.hooks().on_engine_request(None, None, 0.0)
    assert staged is not None
    assert (staged.kind, staged.version) == (UpdateKind.FULL, Version(0, 1))
    staged.close()
    assert staged.finish()
    await node.hooks().on_confirm(EngineConfirmation(Version(0, 1), True, Version(0, 1), ""))
    assert EngineApplied(Version(0, 1)) in node.posted
    assert node.role.machine.holdings.anchors == (1,)


async def test_a_restarted_inferencer_has_its_version_at_once(swarm: Swarm, hands: Any) -> None:
    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    node = await swarm.start("inferencer", engine="none")
    await node.follow(trainer)
    await node.drive(lambda: node.role._mirror.held is not None)
    swarm.stop(node)
    again = await swarm.start("inferencer", engine="none")
    assert again.role.machine.holdings.anchors == (1,)
    staged = await again.hooks().on_engine_request(None, None, 0.0)
    assert staged is not None
    assert staged.version == Version(0, 1)
    staged.finish()


async def test_a_seed_stores_and_serves_without_a_mirror(swarm: Swarm, hands: Any) -> None:
    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    seed = await swarm.start("seed", store_limit_bytes=10 << 20)
    await seed.follow(trainer)
    assert seed.role._mirror.held is None
    assert not (seed.settled.data_directory / "weights").exists()
    node = await swarm.start("inferencer", engine="none")
    seed.heads = trainer.heads
    node.upstream = seed
    node.queue.append(PeerConnected(seed.peer_id, (HERE,), outbound=True))
    node.queue.append(HeadSeen(encode_signed(trainer.heads[-1]), seed.peer_id))
    await node.drive(lambda: node.role._mirror.held is not None)
    seed.role.start_engine()
    assert seed.role.engine is None


async def test_an_inferencer_takes_rollouts_and_no_snapshots(swarm: Swarm, run: Any, hands: Any) -> None:
    await swarm.start("trainer")
    node = await swarm.start("inferencer", engine="none")
    hooks = node.hooks()
    parts = hands.Model().parts()
    done = await (await hooks.on_snapshot(SnapshotOffer(1, 1, parts)))
    assert parts.waiting_count == 0
    assert (done.status, done.reason) == (PublishStatus.NOT_PUBLISHER, "this node is not a trainer")
    assert (await hooks.on_rollouts(submission(run))).accepted
    assert node.rollouts is not None
    assert len(node.rollouts.outbox) == 1
    assert await hooks.on_take_rollouts(10, 0.0) == ()
    await hooks.on_rollouts_settled((), True)
    hooks.on_checks(node.peer_id, 1, 1)
    assert await hooks.on_status() == {"role": "inferencer"}
    node.role.start_engine()
    assert node.role.engine is None, "--engine none"


# What an earlier life left


def digests_of(node: Node, *kinds: Any) -> set[Digest]:
    return {record_digest(decode_signed(data)) for kind in kinds for data in node.store.records_of_type(kind.TYPE)}


async def test_what_a_publisher_was_killed_before_it_let_go_goes_at_its_next_start(swarm: Swarm, hands: Any) -> None:
    """A-DSK-3: old anchors, whole models each, of which no later life knew that they were to go."""
    model = hands.Model()
    node = await swarm.start("trainer")

    async def let_nothing_go(effect: Release, post: Any) -> None:
        """The process is killed between the commit and this."""

    node.handlers[Release] = let_nothing_go
    for generation in range(1, 6):
        model.step()
        await node.publish(model, generation)
        # The loss of a blob is what brings an anchor before its time.
        state = node.role.machine.state
        node.queue.append(BlobLost(state.retained[-1].blob_id))
        await node.drive(lambda: not node.queue and node.role.machine.phase is Phase.IDLE)
    state = node.role.machine.state
    assert len(digests_of(node, Manifest)) > len(state.retained)
    assert set(node.store.blob_ids()) > state.blob_ids
    swarm.stop(node)
    again = await swarm.start("trainer")
    kept = again.role.machine.state
    assert digests_of(again, Manifest) == {item.entry.manifest_digest for item in kept.retained}
    assert digests_of(again, Catalogue) == set(kept.catalogue_digests)
    assert set(again.store.blob_ids()) == kept.blob_ids
    assert all(again.store.is_complete(blob_id) for blob_id in kept.blob_ids)
    model.step()
    assert (await again.publish(model)).version == Version(0, 6)


async def test_heads_and_catalogues_of_earlier_lives_go_at_the_next_start(swarm: Swarm, hands: Any) -> None:
    """A-DSK-3: each life let go of what it had heard itself, and what others had heard stayed."""
    model = hands.Model()
    trainer = await swarm.start("trainer")
    await trainer.publish(model)
    for life in range(3):
        node = await swarm.start("inferencer", engine="none")
        for generation in range(2):
            model.step()
            await trainer.publish(model, 2 * life + generation + 2)
            await node.hear(trainer)
        swarm.stop(node)
    again = await swarm.start("inferencer", engine="none")
    newest = (again.trust.head_record, again.trust.catalogue_record)
    assert digests_of(again, Head, Catalogue) == {record_digest(record) for record in newest}


async def test_a_fetch_that_nothing_leads_back_to_goes_at_the_next_start(swarm: Swarm, hands: Any, run: Any) -> None:
    """A-DSK-3: a newer anchor overtook it, and half of the older one stayed; what is still offered is resumed."""
    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    node = await swarm.start("seed", store_limit_bytes=10 << 20)
    await node.follow(trainer)
    offered = node.trust.catalogue.entries[0].manifest_digest
    ((_, whole),) = node.store.manifests()
    (chunk, *_) = node.store.read_list(whole.blob_id).digests
    node.store.disk.remove(node.settled.data_directory / "chunks" / chunk.hex()[:2] / chunk.hex())
    half = ChunkList(((7, compute_digest(b"arrived")), (7, compute_digest(b"missing"))))
    node.store.put_record(run.sign(run.manifest(9, blob_id=half.blob_id), run.publisher))
    node.store.put_chunk_list(half.blob_id, half.encode())
    node.store.put_chunks({compute_digest(b"arrived"): b"arrived"})
    unnamed = ChunkList(((7, compute_digest(b"unnamed")),))
    node.store.put_chunk_list(unnamed.blob_id, unnamed.encode())
    node.store.put_chunks({compute_digest(b"unnamed"): b"unnamed"})
    swarm.stop(node)
    again = await swarm.start("seed", store_limit_bytes=10 << 20)
    assert digests_of(again, Manifest) == {offered}
    assert again.store.blob_ids() == [whole.blob_id]
    assert not again.store.is_complete(whole.blob_id), "the rest of it is fetched"
    assert not again.store.has_chunk(compute_digest(b"arrived"))
    assert not again.store.has_chunk(compute_digest(b"unnamed"))


# The files engine


async def serve_files_engine(node: Node, until: Callable[[], bool]) -> None:
    """Run the node's local socket and its files engine until a condition holds."""
    local = LocalServer(node.settled.data_directory, node.hooks(), role="inferencer")
    local.listen()
    serving = asyncio.create_task(local.serve())
    node.role.start_engine()
    async with asyncio.timeout(20):
        while not until():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await asyncio.to_thread(node.role.stop_engine)


async def test_the_files_engine_keeps_weights_current_in_the_node_directory(
    swarm: Swarm, hands: Any, tmp_path: Path
) -> None:
    companions = tmp_path / "model"
    companions.mkdir()
    (companions / "config.json").write_text("{}")

    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    node = await swarm.start("inferencer", companions=str(companions))
    await node.follow(trainer)
    await node.drive(lambda: node.role._following._due is not None)
    await serve_files_engine(node, lambda: EngineApplied(Version(0, 1)) in node.posted)
    current = node.settled.data_directory / "weights" / "current"
    assert list(current.glob("*.safetensors"))
    assert (current / "config.json").exists()


async def test_an_sglang_server_is_given_each_version_from_the_node_directory(
    swarm: Swarm, hands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself is tested on a stand-in of SGLang's routes; here only that the node runs it."""
    made: list[Any] = []

    def make(url: str, directory: Path, **options: Any) -> FilesEngine:
        made.append((url, directory, options))
        return FilesEngine(directory, **options)

    monkeypatch.setattr(own, "SglangEngine", make)

    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    options = {"engine": "sglang", "engine_url": "http://127.0.0.1:30000", "companions": str(tmp_path)}
    node = await swarm.start("inferencer", **options)
    await node.follow(trainer)
    await node.drive(lambda: node.role._following._due is not None)
    await serve_files_engine(node, lambda: EngineApplied(Version(0, 1)) in node.posted)
    assert made == [
        ("http://127.0.0.1:30000", node.settled.data_directory / "weights", {"companions": tmp_path}),
    ]


async def test_a_files_engine_that_cannot_start_is_said_once_and_starts_when_it_can(
    swarm: Swarm, hands: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A-DSK-1: what the disk refuses now it may grant in a minute."""
    monkeypatch.setattr(own, "RETRY_SECONDS", 0.01)
    place = tmp_path / "file"
    place.write_text("in the way")
    tries = []

    def open_engine(directory: Path, **options: Any) -> FilesEngine:
        tries.append(directory)
        if len(tries) == 3:
            place.unlink()
        return FilesEngine(directory, **options)

    monkeypatch.setattr(own, "FilesEngine", open_engine)

    trainer = await swarm.start("trainer")
    await trainer.publish(hands.Model())
    node = await swarm.start("inferencer", engine_dir=str(place))
    await node.follow(trainer)
    await node.drive(lambda: node.role._following._due is not None)
    await serve_files_engine(node, lambda: EngineApplied(Version(0, 1)) in node.posted)
    assert tries == [place] * 3
    assert caplog.text.count("the files engine cannot start") == 1


async def test_a_files_engine_that_never_starts_keeps_no_node_from_stopping(swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    await swarm.start("trainer")
    node = await swarm.start("inferencer", engine_dir=str(tmp_path / "file"))
    node.role.start_engine()
    await asyncio.to_thread(node.role.stop_engine)
    assert not node.role.engine._thread.is_alive()


async def test_an_engine_that_breaks_down_ends_the_role(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(own, "FilesEngine", break_down)
    trainer = await swarm.start("trainer")
    await trainer.role.watch_engine()  # it runs none
    node = await swarm.start("inferencer")
    node.role.start_engine()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(node.role.watch_engine(), 60)
    await asyncio.to_thread(node.role.stop_engine)


async def test_a_files_engine_that_never_reached_its_node_can_be_stopped(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    await swarm.start("trainer")
    node = await swarm.start("inferencer")
    node.role.start_engine()
    await asyncio.to_thread(wait_until, lambda: "the files engine cannot follow" in caplog.text)
    await asyncio.to_thread(node.role.stop_engine)
    assert not node.role.engine._thread.is_alive()


# vLLM


async def test_a_vllm_beside_the_node_is_followed_until_the_node_stops(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Runner:
        """Says what a runner may say."""

        def __init__(self, directory: Path, server: Any, **hooks: Any) -> None:
            self.directory, self.server, self.hooks, self.is_stopped = directory, server, hooks, False
            made.append(self)

        def start(self) -> None:
            self.hooks["on_times"](UpdateTimes(0.1, 0.02, 0.01, 5))
            self.hooks["on_times"](UpdateTimes(0.1, 0.0, 0.01, 0))
            self.hooks["on_ready"](True)
            self.hooks["on_lost"]("it was started again")

        def stop(self) -> None:
            self.is_stopped = True

        def find_upstream(self) -> Any:
            raise UnavailableError("vLLM is started again in 4 s")

    monkeypatch.setattr(own, "VllmRunner", Runner)
    port = pick_port()

    def ask() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/models")
        with connection.getresponse() as response:
            assert b"started again in 4 s" in response.read()
        connection.close()
        return response.status

    await swarm.start("trainer")
    options: dict[str, Any] = {"engine": "vllm", "engine_url": "http://127.0.0.1:8000", "openai_port": port}
    node = await swarm.start("inferencer", **options)
    node.role.start_engine()
    await asyncio.sleep(0)
    assert await asyncio.to_thread(ask) == 503
    assert node.ledger.fields["engine_ready"] is True
    assert node.posted == [EngineFailed(None, "it was started again")]
    text = node.metrics.text().decode()
    assert 'pulsenet_update_seconds_count{stage="stage"} 2.0' in text
    assert 'pulsenet_update_seconds_count{stage="pause"} 1.0' in text
    await asyncio.to_thread(node.role.stop_engine)
    assert made[0].is_stopped
    with pytest.raises(ConnectionRefusedError):
        await asyncio.to_thread(ask)
    assert made[0].directory == node.settled.data_directory
    assert made[0].server.url() == "http://127.0.0.1:8000"


# The mesh of every role


async def test_the_mesh_starts_from_options_and_token_and_tells_the_role(swarm: Swarm, run: Any) -> None:
    one, two = run.owner.peer_id, run.second.peer_id
    first, second = "/ip4/10.0.0.7/tcp/7", "/ip4/10.0.0.8/tcp/8"

    await swarm.start("trainer")
    node = Node(swarm.home, swarm.now_ms, role="inferencer", engine="none", bootstrap=(join_address(first, one),))
    swarm.nodes.append(node)
    token = replace(node.settled.token, bootstraps=(join_address(second, one), join_address(second, two)))
    node.settled = replace(node.settled, token=token)
    await node.build()
    effects = node.role.mesh.handle(TimerFired(), 0.0, swarm.now_ms)
    dials = {effect.peer_id: set(effect.addresses) for effect in effects if isinstance(effect, DialPeer)}
    assert dials == {one: {first, second}, two: {second}}
    have = open_record(Have, decode_signed(node.role.mesh.own_have), verify, run_id=token.run_id)
    assert (have.role, have.addresses) == ("inferencer", (HERE,))


async def test_a_damaged_address_book_is_said_and_costs_only_itself(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    node = await swarm.start("trainer")
    node.store.save_state(BOOK_KEY, b"\xc1 damaged")
    swarm.stop(node)
    await swarm.start("trainer")
    assert "the remembered peers cannot be used" in caplog.text
