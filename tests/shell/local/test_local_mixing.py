"""Mixing through a daemon on a real socket: real training processes, blobs and means; the machines are the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from servers import RawProcess, ServerThread, hooks_of, refusal, wait_until

from pulsenet.chain.records import SliceName
from pulsenet.errors import ConfigError, RemoteProtocolError, StorageError, UnavailableError
from pulsenet.ids import Digest, PeerId
from pulsenet.local import mixing_protocol as local
from pulsenet.local import rounds_protocol as rounds
from pulsenet.local.client import Client
from pulsenet.local.mixing_client import MixingConnection
from pulsenet.node.mixing.effects import (
    CheckMean,
    CombinePart,
    CombineParts,
    Debt,
    JobPlan,
    MixedSlice,
    MixReady,
    OpenRound,
    StartMixing,
    StoreState,
)
from pulsenet.node.mixing.events import (
    AdoptFailed,
    CombineFailed,
    DebtName,
    MixingAttached,
    MixingLost,
    PartFailed,
    PartsCombined,
    PartSlice,
    PartStored,
    ProbeMade,
    ResultWanted,
    RoundWanted,
    StateStored,
)
from pulsenet.outer.contribution import Entries
from pulsenet.outer.floats import fp32_from_bits
from pulsenet.outer.mixing.probe import read_answer
from pulsenet.outer.mixing.settings import Job, MixingKind, MixingSettings, MixingVariant
from pulsenet.outer.self_test import SELF_TEST_DIGEST
from pulsenet.tensors.params import ParameterTable, TensorSpec, make_table
from pulsenet.training.daemon_exchange import DaemonExchange
from pulsenet.training.daemon_mixer import DaemonMixer
from pulsenet.training.gossip_optimizer import GossipOptimizer
from pulsenet.training.mixing_work import compute_mixed_root
from pulsenet.training.probe import Probe
from pulsenetd.handlers.means import MixingMeans
from pulsenetd.handlers.mixing import MixingDesk
from pulsenetd.local.mixing import MixingHook
from pulsenetd.local.server import LocalServer
from pulsenetd.metrics import Metrics
from pulsenetd.storage.round_blobs import RoundBlobs
from pulsenetd.storage.store import Store

TABLE = make_table([TensorSpec("a", "F32", (70,)), TensorSpec("b", "F32", (3,))])
KEYS = tuple(PeerId(bytes([index]) * 32) for index in range(3))


class Daemon:
    """A server with a desk in a thread of its own; what the machine would order is the test's."""

    def __init__(self, directory: Path, store: Store, settings: MixingSettings, key: PeerId) -> None:
        self.directory, self.store, self.settings, self.key = directory, store, settings, key
        self.heard: list[Any] = []
        self.rounds: list[local.TellRound] = []
        self.on_event: Callable[[Any], None] = lambda event: None
        self.is_leading = False
        self.algorithm = "gossip"
        self.constants: tuple[tuple[str, int], ...] = settings.to_constants()
        self.threads = ThreadPoolExecutor(2)
        self.left: set[Digest] = set()
        self.is_rebuilding = False
        self.start()

    def start(self) -> None:
        """Listen, as a daemon that starts does."""
        self.desk = MixingDesk(post=self._hear, is_leading=lambda: self.is_leading)
        self.means = MixingMeans(self.store, self.settings, self.key, lambda: self.desk.masters, threads=self.threads)
        hook = MixingHook(
            desk=self.desk,
            settings=self._settings,
            check_masters=self._check_masters,
            make_blobs=lambda: RoundBlobs(self.store, self.left),
            on_round=self.rounds.append,
            threads=self.threads,
            metrics=Metrics(),
        )
        self.server = LocalServer(self.directory, hooks_of(rounds=hook), role="trainer")
        self._thread = ServerThread(self.server)
        self.stop = self._thread.stop

    def _hear(self, event: Any) -> None:
        self.heard.append(event)
        self.on_event(event)

    async def _settings(self) -> rounds.RoundSettingsReply:
        return rounds.RoundSettingsReply(self.algorithm, self.constants, self.key)

    async def _check_masters(self, table: ParameterTable, self_test: Digest) -> None:
        if self.is_rebuilding:
            raise UnavailableError("the machines are built anew")
        if self_test != SELF_TEST_DIGEST:
            raise RemoteProtocolError("self-test", self_test.hex())
        self.desk.masters = table

    def order(self, effect: Any) -> None:
        """Let the machine order something of the process."""
        self._thread.execute(self.desk.table()[type(effect)](effect, self.heard.append))

    def said(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.heard if isinstance(event, kind)]


@dataclass(eq=False)
class SmallRun:
    """Does what the machines of some nodes do while nothing fails: one store for all, and no network between them."""

    daemons: list[Daemon]
    settings: MixingSettings
    plans: dict[tuple[int, Job], tuple[Debt, ...]] = field(default_factory=dict)
    """Debts by daemon and job."""
    deaf: set[int] = field(default_factory=set)
    """Daemons whose jobs nobody answers."""
    parts: dict[tuple[int, Job], dict[int, PartStored]] = field(default_factory=dict)
    results: dict[tuple[int, Job], tuple[MixedSlice, ...]] = field(default_factory=dict)
    wanted: set[tuple[int, int, Job]] = field(default_factory=set)
    offered: StartMixing | None = None
    subset: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.mutex = threading.RLock()
        for index, daemon in enumerate(self.daemons):
            daemon.on_event = lambda event, index=index: self.hear(index, event)

    def hear(self, index: int, event: Any) -> None:
        with self.mutex:
            daemon = self.daemons[index]
            match event:
                case MixingAttached(round_index):
                    daemon.order(self.offered or StartMixing(round_index or 0))
                case RoundWanted(round_index):
                    plans = []
                    for job in Job:
                        kind = self.settings.variant.kind(job)
                        counts = {MixingKind.NONE: 0, MixingKind.PAIR: 1, MixingKind.GLOBAL: len(self.daemons)}
                        plans.append(JobPlan(job, counts[kind], self.plans.pop((index, job), ())))
                    daemon.order(OpenRound(round_index, True, len(self.daemons), self.subset, *plans, is_probed=True))
                case PartStored(round_index, job):
                    self.parts.setdefault((round_index, job), {})[index] = event
                    self.combine(round_index, job)
                case ResultWanted(round_index, job) if index not in self.deaf:
                    self.wanted.add((index, round_index, job))
                    self.answer()

    def combine(self, round_index: int, job: Job) -> None:
        parts = self.parts[round_index, job]
        if len(parts) < len(self.daemons) - len(self.deaf):
            return
        slices = []
        for place in range(len(next(iter(parts.values())).slices)):
            inputs = tuple(CombinePart(KEYS[i], part.slices[place]) for i, part in sorted(parts.items()))
            count = len(parts[min(parts)].slices)
            roots = {part.mixed_root for part in parts.values()}
            assert len(roots) == 1, "all hold the same mean"
            root = roots.pop()
            order = CombineParts(place, round_index, job, place, count, self.subset, inputs, root)
            owner = self.daemons[min(parts)]
            answer = owner.means.combine(order)
            assert isinstance(answer, PartsCombined), answer
            name = SliceName(answer.blob_id, answer.encoded_size_bytes)
            mean = PartSlice(*_name_of(name), inputs[0].part.element_count, answer.norm_bits)
            check = CheckMean(9, round_index, job, place, count, self.subset, len(inputs), mean, root)
            assert owner.means.check(check).reason == ""
            slices.append(MixedSlice(name, len(inputs)))
        self.results[round_index, job] = tuple(slices)
        self.answer()

    def answer(self) -> None:
        for index, round_index, job in sorted(self.wanted):
            if (round_index, job) in self.results:
                self.wanted.discard((index, round_index, job))
                self.daemons[index].order(MixReady(round_index, job, self.results[round_index, job]))


def _name_of(name: SliceName) -> tuple[Digest, int]:
    return name.blob_id, name.encoded_size_bytes


@pytest.fixture
def make_daemon(tmp_path: Path, store: Store) -> Iterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def make(settings: MixingSettings | None = None) -> Daemon:
        chosen = settings or MixingSettings(mix1_wait_seconds=1, mix2_wait_seconds=1)
        daemons.append(Daemon(tmp_path / f"node{len(daemons)}", store, chosen, KEYS[len(daemons)]))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.stop()
        daemon.threads.shutdown()


@pytest.fixture
def connect() -> Iterator[Callable[..., DaemonMixer]]:
    mixers: list[DaemonMixer] = []

    def make(daemon: Daemon, **fields: Any) -> DaemonMixer:
        chosen = {"locate_seconds": 20.0, "reconnect_seconds": 0.3, **fields}
        mixers.append(DaemonMixer(Client.connect(daemon.directory), **chosen))
        return mixers[-1]

    yield make
    for mixer in mixers:
        mixer.close()


def vectors(value: float) -> list[Entries]:
    return [
        Entries(index, None, np.full(spec.element_count, value + index, np.float32))
        for index, spec in enumerate(TABLE.tensors)
    ]


def begin(mixer: DaemonMixer, value: float = 1.0, round_index: int = 0) -> Any:
    mixer.open(TABLE, SELF_TEST_DIGEST)
    mixer.locate(round_index)
    return mixer.begin_round(round_index, lambda: vectors(value))


# A training process and its daemon


@pytest.mark.parametrize("variant", list(MixingVariant))
@pytest.mark.parametrize("is_gated", [False, True])
def test_two_trainers_mix_through_their_daemons(
    variant: MixingVariant, is_gated: bool, make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    settings = MixingSettings(
        variant=variant,
        inner_steps=2,
        mixes_momentum=variant is not MixingVariant.DILOCO,
        mixing_gate=is_gated,
        roster_rounds=8,
    )
    daemons = [make_daemon(settings) for _ in range(2)]
    run = SmallRun(daemons, settings, subset=(1, 2) if variant.mixes_subset else ())
    trainers = []
    for index, daemon in enumerate(daemons):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = Probe(torch.eye(12), lambda model, batch: model(batch))
        sync = GossipOptimizer(model, optimizer, mixer=connect(daemon), probe=probe)
        trainers.append((index, model, optimizer, sync))
    reports: dict[int, list[Any]] = {0: [], 1: []}
    errors: list[BaseException] = []

    def train(index: int, model: Any, optimizer: Any, sync: GossipOptimizer) -> None:
        try:
            for step in range(6):
                batch = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * index + step))
                torch.nn.functional.mse_loss(model(batch), batch[:, :5].sin()).backward()
                optimizer.step()
                report = sync.step()
                optimizer.zero_grad()
                if report is not None:
                    reports[index].append(report)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=one) for one in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    for index in range(2):
        expected = (2 if variant.mix1 is not MixingKind.NONE else 0, 2 if variant.mix2 is not MixingKind.NONE else 0)
        assert [(one.mix1_count, one.mix2_count) for one in reports[index]] == [expected] * 3, reports[index]
        wait_until(lambda index=index: len(daemons[index].rounds) == 3)
        answers = [event for event in daemons[index].heard if isinstance(event, ProbeMade)]
        assert [event.round_index for event in answers] == [0, 1, 2], "told before the next round is asked for"
        assert all(read_answer(event.answer, event.round_index).shape == (12, 6) for event in answers)
    if variant is MixingVariant.DILOCO:
        first, second = (trainer[3].state.z for trainer in trainers)
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    roots = [{event.mixed_root for event in daemon.said(PartStored)} for daemon in daemons]
    assert roots[0] == roots[1], "survivors hold the same mean"
    assert (len(roots[0]) > 1) == (variant.mix1 is MixingKind.GLOBAL)
    assert not run.wanted


def test_vectors_are_handed_over_beside_the_inner_steps(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    """A-GOS-2: start returns before anything of the vector was read, however long that takes."""
    daemon = make_daemon()
    SmallRun([daemon], daemon.settings)
    mixer = connect(daemon)
    begin(mixer)
    may_go_on, was_read = threading.Event(), threading.Event()

    def slowly() -> Iterator[Entries]:
        may_go_on.wait(20)
        was_read.set()
        yield from vectors(1.0)

    mixer.start(Job.MIX1, [slowly()])
    assert not was_read.is_set()
    may_go_on.set()
    assert mixer.result(Job.MIX1).sections is not None
    assert was_read.is_set()


def test_a_result_that_does_not_come_leaves_the_own_values(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    run = SmallRun([daemon], daemon.settings, deaf={0})
    run.results[0, Job.MIX1] = (MixedSlice(None, 1),)
    mixer = connect(daemon)
    begin(mixer)
    mixer.start(Job.MIX1, [vectors(1.0)])
    mixed = mixer.result(Job.MIX1)
    assert (mixed.contributor_count, mixed.reason) == (1, "late")
    assert mixed.sections is not None
    assert [float(values[0]) for values in mixed.sections[0]] == [1.0, 2.0]


def test_values_that_nobody_would_take_are_not_handed_over(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    SmallRun([daemon], daemon.settings)
    mixer = connect(daemon)
    begin(mixer)
    mixer.start(Job.MIX1, [vectors(float("nan"))])
    mixed = mixer.result(Job.MIX1)
    assert (mixed.sections, mixed.reason) == (None, "finite")
    assert daemon.said(PartFailed) == [PartFailed(0, Job.MIX1, "finite")]


def test_a_daemon_that_dies_costs_a_round_and_no_more(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    SmallRun([daemon], daemon.settings)
    mixer = connect(daemon)
    begin(mixer)
    mixer.start(Job.MIX1, [vectors(1.0)])
    wait_until(lambda: daemon.said(PartStored))
    daemon.stop()
    mixed = mixer.result(Job.MIX1)
    assert mixed.reason == "away"
    assert mixed.sections is not None
    assert float(mixed.sections[0][0][0]) == 1.0
    plan = mixer.begin_round(1, lambda: vectors(1.0))
    assert not plan.is_listed
    mixer.start(Job.MIX1, [vectors(1.0)])
    assert mixer.result(Job.MIX1).reason == "away"
    daemon.start()
    plan = mixer.begin_round(2, lambda: vectors(1.0))
    assert (plan.round_index, plan.is_listed) == (2, True)
    assert daemon.said(MixingAttached)[-1] == MixingAttached(2, TABLE.element_count)


def test_a_daemon_that_answers_nonsense_costs_a_round_and_not_the_training(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon()
    SmallRun([daemon], daemon.settings)
    mixer = connect(daemon)
    begin(mixer)

    def answer_nonsense(*_: object) -> None:
        raise RemoteProtocolError("schema", "a round without a number")

    with monkeypatch.context() as patch:
        patch.setattr(MixingConnection, "want_round", answer_nonsense)
        assert not mixer.begin_round(1, lambda: vectors(1.0)).is_listed
    assert mixer.begin_round(2, lambda: vectors(1.0)).is_listed


def begin_with_debt(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> tuple[SmallRun, list[DaemonMixer], Debt]:
    """Return two that mixed a round, and what the first one owes: the mean was 5 and 6, it kept 1 and 2."""
    settings = MixingSettings(variant=MixingVariant.LOCAL_M1_M2, mix1_wait_seconds=1, mix2_wait_seconds=1)
    daemons = [make_daemon(settings) for _ in range(2)]
    run = SmallRun(daemons, settings)
    mixers = [connect(daemon) for daemon in daemons]
    for mixer, value in zip(mixers, (1.0, 9.0), strict=True):
        begin(mixer, value)
        mixer.start(Job.MIX1, [vectors(value)])
    assert [mixer.result(Job.MIX1).contributor_count for mixer in mixers] == [2, 2]
    own, mean = run.parts[0, Job.MIX1][0].slices[0], run.results[0, Job.MIX1][0].mean
    assert mean is not None
    run.deaf = {1}
    return run, mixers, Debt(DebtName(0, Job.MIX1), SliceName(own.blob_id, own.encoded_size_bytes), mean, ())


def mix_alone(run: SmallRun, mixer: DaemonMixer, round_index: int, debt: Debt, value: float) -> list[float]:
    """Go through Mix1 of a round whose plan has a debt; return what the vector became."""
    run.plans[0, Job.MIX1] = (debt,)
    mixer.begin_round(round_index, lambda: vectors(value))
    mixer.start(Job.MIX1, [vectors(value)])
    mixed = mixer.result(Job.MIX1)
    return [] if mixed.sections is None else [float(values[0]) for values in mixed.sections[0]]


def test_a_debt_is_added_to_the_next_vector_and_settled(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    run, (mixer, _), debt = begin_with_debt(make_daemon, connect)
    assert mix_alone(run, mixer, 1, debt, 1.0) == [5.0, 6.0]
    assert run.daemons[0].said(PartStored)[-1].debts == (debt.name,)


def test_a_debt_that_the_daemon_could_not_note_is_settled_again_and_not_added_twice(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    run, (mixer, _), debt = begin_with_debt(make_daemon, connect)
    assert mix_alone(run, mixer, 1, debt, 1.0) == [5.0, 6.0]
    assert mix_alone(run, mixer, 2, debt, 5.0) == [5.0, 6.0]
    assert [stored.debts for stored in run.daemons[0].said(PartStored)[-2:]] == [(debt.name,)] * 2
    # Another life of the process begins at an older state.
    mixer.abandon()
    mixer.locate(3)
    assert mix_alone(run, mixer, 3, debt, 1.0) == [5.0, 6.0]


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_debt_stays_in_a_vector_that_the_daemon_may_not_have_heard_of(
    is_heard: bool,
    make_daemon: Callable[..., Daemon],
    connect: Callable[..., DaemonMixer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have settled the debt before it went away, and if not, it names the debt again."""
    run, (mixer, _), debt = begin_with_debt(make_daemon, connect)
    tell = MixingConnection.tell

    def fail(connection: MixingConnection, message: Any) -> None:
        if is_heard:
            tell(connection, message)
        raise UnavailableError("the daemon is gone")

    with monkeypatch.context() as patch:
        patch.setattr(MixingConnection, "tell", fail)
        assert mix_alone(run, mixer, 1, debt, 1.0) == [5.0, 6.0]
    assert mix_alone(run, mixer, 2, debt, 5.0) == [5.0, 6.0]


def test_a_joiner_reads_a_state_that_another_one_stored(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemons = [make_daemon() for _ in range(2)]
    run = SmallRun([daemons[0]], daemons[0].settings)
    mixer = connect(daemons[0])
    begin(mixer)
    daemons[0].order(StoreState())
    mixer.begin_round(1, lambda: vectors(3.0))
    mixer.start(Job.MIX1, [vectors(3.0)])
    mixer.result(Job.MIX1)
    (stored,) = daemons[0].said(StateStored)
    assert (stored.round_index, stored.state.element_count) == (1, 73)
    late = connect(daemons[1])
    other = SmallRun([daemons[1]], run.settings)
    other.offered = StartMixing(7, (SliceName(stored.state.blob_id, stored.state.encoded_size_bytes),), False)
    late.open(TABLE, SELF_TEST_DIGEST)
    start = late.locate(None)
    assert start.round_index == 7
    assert start.adoption is not None
    assert [float(values[0]) for values in start.adoption.values] == [3.0, 4.0]
    assert not start.adoption.is_consensus


def test_a_state_that_cannot_be_read_is_refused_and_another_one_is_looked_for(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    run = SmallRun([daemon], daemon.settings)
    writer = daemon.store.begin_blob()
    writer.feed(b"PLSM" + bytes(200))
    chunk_list = writer.finish()
    run.offered = StartMixing(7, (SliceName(chunk_list.blob_id, chunk_list.size_bytes),), True)

    def hear(event: Any) -> None:
        if isinstance(event, AdoptFailed):
            daemon.order(StartMixing(8))
        else:
            run.hear(0, event)

    daemon.on_event = hear
    mixer = connect(daemon)
    mixer.open(TABLE, SELF_TEST_DIGEST)
    start = mixer.locate(None)
    assert (start.round_index, start.adoption) == (8, None)
    assert [event.reason for event in daemon.said(AdoptFailed)] == ["mixing-header"]


def test_a_trainer_that_is_too_far_behind_asks_for_a_state(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    run = SmallRun([daemon], daemon.settings)
    run.offered = StartMixing(100)
    mixer = connect(daemon)
    mixer.open(TABLE, SELF_TEST_DIGEST)
    assert mixer.locate(3).round_index == 100
    assert [event.round_index for event in daemon.said(MixingAttached)] == [3, None]


def test_only_a_coordinator_publishes(make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]) -> None:
    daemon = make_daemon()
    SmallRun([daemon], daemon.settings)
    mixer = connect(daemon)
    begin(mixer)
    assert not mixer.publishes, "there is no publisher"
    published: list[Any] = []

    class Publisher:
        def publish(self, *arguments: Any, **options: Any) -> None:
            published.append((arguments, options))

        def close(self) -> None:
            pass

    mixer._publisher = Publisher()  # type: ignore[assignment]
    assert not mixer.publishes
    daemon.is_leading = True
    mixer.begin_round(1, lambda: vectors(1.0))
    assert mixer.publishes
    model = torch.nn.Linear(1, 1)
    mixer.publish(model, 2, is_consensus=False)
    assert published == [((model,), {"step": 2, "consensus": False})], "its manifest will say so"


def test_runs_with_rounds_and_runs_that_mix_are_told_apart(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    with pytest.raises(ConfigError, match=r"GossipOptimizer\(mixer=join_mixing\(\)\)"):
        DaemonExchange(Client.connect(daemon.directory), reconnect_seconds=1.0)
    daemon.algorithm, daemon.constants = "pulseloco", ()
    with pytest.raises(ConfigError, match=r"join_rounds\(\) and OuterOptimizer"):
        connect(daemon)


def test_a_run_whose_constants_changed_asks_for_a_new_process(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]
) -> None:
    daemon = make_daemon()
    mixer = connect(daemon)
    daemon.constants = MixingSettings(inner_steps=77).to_constants()
    with pytest.raises(ConfigError, match="changed the constants"):
        mixer.open(TABLE, SELF_TEST_DIGEST)


def test_one_process_a_daemon(make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer]) -> None:
    daemon = make_daemon()
    first = connect(daemon)
    first.open(TABLE, SELF_TEST_DIGEST)
    with Client.connect(daemon.directory) as client:
        second = MixingConnection.connect(client, 5.0)
    with closing(second), pytest.raises(RemoteProtocolError, match="busy"):
        second.open_mixing(TABLE, SELF_TEST_DIGEST)
    first.close()
    wait_until(lambda: daemon.desk._owner is None)
    assert daemon.said(MixingLost) == [], "it never said where it was"


# What is refused


class Process(RawProcess):
    def open(self) -> None:
        assert self.ask(local.OpenMixing(TABLE.encode(), SELF_TEST_DIGEST)) == local.MixingOpened()


BLOB = local.PartBlob(Digest(b"b" * 32), 9, 73, 0)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (local.WantRound(0, 10), "message-unexpected"),
        (local.RefuseState("x", 10), "message-unexpected"),
        (local.StorePart(0, 1, (BLOB,), (), None), "not-found"),
        (local.StorePart(0, 3, (), (), None), "schema"),
        (local.FailPart(0, 0, "x"), "schema"),
        (local.AwaitMix(0, 7, 10), "schema"),
        (local.StoreIterate(0, BLOB), "not-found"),
        (local.TellRound(0, 1, 1, "", "", 0x7F80_0000, 0, 0, 0, None, None, None, None, None), "schema"),
        (local.TellRound(0, 1, 1, "", "", 0, 0, 0, 0, None, None, 0x7FC0_0000, None, None), "schema"),
        (local.MixingOpened(), "message-unexpected"),
        (rounds.OpenRounds(b"", SELF_TEST_DIGEST), "no-rounds"),
        (rounds.GoOn(0), "message-unexpected"),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else one,
)
def test_what_does_not_belong_there_is_refused(message: Any, code: str, make_daemon: Callable[..., Daemon]) -> None:
    with closing(Process(make_daemon().directory)) as process:
        process.open()
        assert refusal(process.ask(message)) == code


def test_nothing_is_answered_before_mixing_is_open(make_daemon: Callable[..., Daemon]) -> None:
    with closing(Process(make_daemon().directory)) as process:
        assert refusal(process.ask(local.Locate(0, 10))) == "message-unexpected"


def test_a_question_asked_again_waits_on(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    with closing(Process(daemon.directory)) as process:
        process.open()
        assert process.ask(local.Locate(3, 10)) == rounds.NoOrder()
        assert process.ask(local.Locate(3, 10)) == rounds.NoOrder()
        daemon.order(StartMixing(4))
        assert process.ask(local.Locate(3, 10)) == local.Begin(4, (), False)
        assert process.ask(local.WantRound(4, 10)) == rounds.NoOrder()
        plan = JobPlan(Job.MIX1, 0)
        daemon.order(OpenRound(5, False, 1, (), plan, plan))
        opened = process.ask(local.WantRound(4, 10))
        assert (opened.round_index, opened.is_listed) == (5, False)
        assert process.ask(local.AwaitMix(5, 1, 10)) == rounds.NoOrder()
        assert process.ask(local.AwaitMix(5, 1, 10)) == rounds.NoOrder()
        daemon.order(MixReady(5, Job.MIX1, (), "late"))
        assert process.ask(local.AwaitMix(5, 1, 10)) == local.MixDone(5, 1, (), "late")
    assert len(daemon.said(MixingAttached)) == len(daemon.said(RoundWanted)) == len(daemon.said(ResultWanted)) == 1
    wait_until(lambda: daemon.said(MixingLost))


def test_blobs_that_were_never_named_go_and_those_of_vectors_stay(
    make_daemon: Callable[..., Daemon], store: Store
) -> None:
    daemon = make_daemon()
    with closing(Process(daemon.directory)) as process:
        process.open()
        kept, forgotten = process.put(b"kept"), process.put(b"forgotten")
        assert kept.blob_id is not None
        part = local.PartBlob(kept.blob_id, 4, 73, 0)
        assert process.ask(local.StorePart(0, 1, (part, part), (), None)) == rounds.Waiting()
        process.ask(local.Locate(0, 10))
        for round_index in range(3):
            process.ask(local.WantRound(round_index, 10))
    assert store.is_complete(kept.blob_id)
    assert forgotten.blob_id is not None
    assert store.read_list(forgotten.blob_id) is None


# Means


def put_part(daemon: Daemon, connect: Callable[..., DaemonMixer], value: float) -> PartSlice:
    mixer = connect(daemon)
    begin(mixer, value)
    mixer.start(Job.MIX1, [vectors(value)])
    mixer.result(Job.MIX1)
    mixer.close()
    wait_until(lambda: daemon.desk._owner is None)
    part: PartSlice = daemon.said(PartStored)[-1].slices[0]
    return part


def test_parts_that_break_the_rules_are_named_with_their_senders(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer], store: Store
) -> None:
    settings = MixingSettings(variant=MixingVariant.LOCAL_M1_M2, mix1_wait_seconds=1)
    daemon = make_daemon(settings)
    SmallRun([daemon], settings, deaf={0})
    first, second = put_part(daemon, connect, 1.0), put_part(daemon, connect, 3.0)
    liar = PartSlice(second.blob_id, second.encoded_size_bytes, second.element_count, first.norm_bits)

    def order(*parts: PartSlice, round_index: int = 0) -> CombineParts:
        inputs = tuple(CombinePart(KEYS[place], part) for place, part in enumerate(parts))
        return CombineParts(1, round_index, Job.MIX1, 0, 1, (), inputs)

    answer = daemon.means.combine(order(first, liar))
    assert answer == CombineFailed(1, "refused", ((KEYS[1], "norm"),))
    answer = daemon.means.combine(order(first, second, round_index=4))
    assert isinstance(answer, CombineFailed)
    assert answer.bad == ((KEYS[1], "mixing-header"),)
    gone = PartSlice(Digest(b"?" * 32), 9, 73, 0)
    assert daemon.means.combine(order(first, gone)) == CombineFailed(1, "damaged")
    good = daemon.means.combine(order(first, second))
    assert isinstance(good, PartsCombined)
    assert good == daemon.means.combine(order(first, second)), "ordered again it comes to the same end"
    mean = [np.full(spec.element_count, 2.0 + i, np.float32) for i, spec in enumerate(TABLE.tensors)]
    norm = float(np.sqrt(sum(float(np.square(v.astype(np.float64)).sum()) for v in mean)))
    assert float(fp32_from_bits(good.norm_bits)) == pytest.approx(norm)
    as_slice = PartSlice(good.blob_id, good.encoded_size_bytes, 73, good.norm_bits)
    check = CheckMean(2, 0, Job.MIX1, 0, 1, (), 2, as_slice)
    assert daemon.means.check(check).reason == ""
    assert daemon.means.check(CheckMean(2, 0, Job.MIX1, 0, 1, (), 3, as_slice)).reason == "mixing-header"
    assert daemon.means.check(CheckMean(2, 0, Job.MIX1, 0, 1, (), 2, gone)).reason == "damaged"
    store.release([good.blob_id], (), 0.0)
    assert store.read_list(good.blob_id) is None, "kept blobs go when they are released"


def test_without_masters_nothing_is_combined(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    part = PartSlice(Digest(b"?" * 32), 9, 73, 0)
    order = CombineParts(1, 0, Job.MIX1, 0, 1, (), (CombinePart(KEYS[0], part),))
    assert daemon.means.combine(order) == CombineFailed(1, "table")
    assert daemon.means.check(CheckMean(1, 0, Job.MIX1, 0, 1, (), 2, part)).reason == "table"


def test_a_full_disk_makes_no_mean(
    make_daemon: Callable[..., Daemon], connect: Callable[..., DaemonMixer], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MixingSettings(variant=MixingVariant.LOCAL_M1_M2, mix1_wait_seconds=1)
    daemon = make_daemon(settings)
    SmallRun([daemon], settings, deaf={0})
    part = put_part(daemon, connect, 1.0)

    def refuse(size_bytes: int) -> None:
        raise StorageError("no room", "enospc")

    monkeypatch.setattr(daemon.store, "require_space", refuse)
    order = CombineParts(1, 0, Job.MIX1, 0, 1, (), (CombinePart(KEYS[0], part),))
    assert daemon.means.combine(order) == CombineFailed(1, "enospc")


def test_a_common_root_names_round_and_values() -> None:
    values = [entries.values for entries in vectors(1.0)]
    root = compute_mixed_root(TABLE, 3, values)
    assert root == compute_mixed_root(TABLE, 3, [one.copy() for one in values])
    assert root != compute_mixed_root(TABLE, 4, values)
    values[1][0] += 1.0
    assert root != compute_mixed_root(TABLE, 3, values)
