"""Named scenarios of mixing, each on real machines with a toy training process."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pulsenet.chain.records import Share, ShareKind
from pulsenet.node.mixing.convener import PRESENT_SECONDS
from pulsenet.node.mixing.debts import Debts
from pulsenet.node.mixing.effects import MixedSlice
from pulsenet.node.mixing.everybody import EverybodyWork
from pulsenet.node.mixing.journal import Exchange, Journal, Stand
from pulsenet.node.mixing.pair import PairWork
from pulsenet.node.mixing.reach import Reach
from pulsenet.node.mixing.work import name_of
from pulsenet.outer.mixing.pairing import count_slices
from pulsenet.outer.mixing.settings import Job, MixingSettings, MixingVariant
from pulsenet.testing import mixing_node
from pulsenet.testing.checkers import SimulationError
from pulsenet.testing.mixing_node import RECONNECT_SECONDS, MixingNode
from pulsenet.testing.mixing_world import MixingWorld
from pulsenet.testing.network import Faults
from pulsenet.testing.toy_mixing import Doing, ToyMixing, Values

LONG = [pytest.mark.nightly, pytest.mark.timeout(3600)]
ROUND_SECONDS_MAX = 60.0
"""Virtual time in which a round ends, whatever fails."""

INNER_SECONDS = 236.0
"""Of the published utilisation figures (docs/planning.md)."""


def make_settings(variant: MixingVariant = MixingVariant.LOCAL_M1_M2, **changes: int) -> MixingSettings:
    return MixingSettings(variant=variant, **changes)


def make_world(seed: int, variant: MixingVariant = MixingVariant.LOCAL_M1_M2, **changes: object) -> MixingWorld:
    counts = {"authority_count": 1, "trainer_count": 3, "inner_seconds": (1.0, 1.0), **changes}
    return MixingWorld(seed, make_settings(variant), **counts)  # type: ignore[arg-type]


def pair_of(member: MixingNode, job: Job) -> PairWork | None:
    work = None if member.mixing is None else member.mixing.works.get(job)
    return work if isinstance(work, PairWork) else None


def has_answered(work: PairWork) -> bool:
    return work.bench.peer_id > work.partner and (ShareKind.PART, 0) in work.shown


def foresees(world: MixingWorld, work: PairWork) -> bool:
    """Say whether the lower side combines on a hint, and the other has not answered."""
    upper = next(member for member in world.members if member.peer_id == work.partner)
    theirs = pair_of(upper, work.job)
    is_answered = theirs is None or theirs.bench.round_index != work.bench.round_index or has_answered(theirs)
    return bool(work.order_again()) and not is_answered


def wait_for_mix2(world: MixingWorld, is_there: Callable[[PairWork], bool]) -> tuple[MixingNode, MixingNode]:
    """Run until a pair's Mix2 is so far; return its lower and its upper key's member."""
    found: list[PairWork] = []

    def look() -> bool:
        works = [pair_of(member, Job.MIX2) for member in world.members]
        found[:] = [work for work in works if work is not None and work.result is None and is_there(work)]
        return bool(found)

    world.run_until(look, 20 * ROUND_SECONDS_MAX)
    keys = sorted((found[0].bench.peer_id, found[0].partner))
    lower, upper = (next(member for member in world.members if member.peer_id == key) for key in keys)
    return lower, upper


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_every_variant_mixes_in_every_round_of_a_calm_swarm(variant: MixingVariant) -> None:
    world = make_world(1, variant)
    world.run_rounds(4, 4 * ROUND_SECONDS_MAX)
    results = [ready for _, ready, _ in world.waits]
    assert results
    assert all(ready.reason == "" and not ready.is_alone for ready in results)
    assert all(seconds < 5.0 for _, _, seconds in world.waits)


def test_a_member_alone_goes_on_by_itself() -> None:
    world = make_world(1, MixingVariant.GLOBAL_M1_LOCAL_M2, trainer_count=0)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    assert world.waits == []
    assert world.members[0].round_count == 5


def test_of_an_odd_number_one_mixes_alone() -> None:
    world = make_world(2, trainer_count=2, step=0.5)
    world.run_rounds(6, 6 * ROUND_SECONDS_MAX)
    assert world.mixing_checker.exchange_count >= 10
    assert all(ready.reason == "" for _, ready, _ in world.waits)


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("stage", ["offered", "hinted", "foreseen", "combined", "answered"])
@pytest.mark.parametrize("kills_lower", [True, False])
def test_a_partner_that_dies_in_mix2_costs_the_other_its_wait_and_nobody_else_any(
    stage: str, kills_lower: bool, is_noticed: bool
) -> None:
    """A-GOS-1: one side of an exchange dies in the middle; the other ends the round within the limit, with its own.

    Unless it is the lower key and has heard the answer: it fetched on the hint, so it takes, and the dead one owes.
    """
    # In this world the answer gets through before its sender dies.
    world = make_world(4, MixingVariant.GLOBAL_M1_LOCAL_M2, step=0.5, trainer_count=3)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    stages: dict[str, Callable[[PairWork], bool]] = {
        "offered": lambda work: work.bench.peer_id < work.partner and bool(work.shown),
        "hinted": lambda work: (ShareKind.HINT, 0) in work.shown,
        "foreseen": lambda work: work.bench.peer_id < work.partner and foresees(world, work),
        "combined": lambda work: work.bench.peer_id > work.partner and bool(work.order_again()),
        "answered": has_answered,
    }
    lower, upper = wait_for_mix2(world, stages[stage])
    dying, staying = (lower, upper) if kills_lower else (upper, lower)
    if is_noticed:
        world.crash(dying)
    else:
        dying.crash()
    done = {member.name: member.round_count for member in world.members}
    count = len(world.waits)
    limit_seconds = world.settings.mix2_wait_seconds + 1.0
    world.run_until(lambda: staying.round_count > done[staying.name], limit_seconds)
    waits = [(name, ready, seconds) for name, ready, seconds in world.waits[count:] if ready.job is Job.MIX2]
    mine = [ready for name, ready, _ in waits if name == staying.name]
    has_heard_all = stage == "answered" and not kills_lower
    assert [ready.is_alone for ready in mine] == [not has_heard_all]
    assert mine[0].reason in ([""] if has_heard_all else ["lost", "late"])
    others = [seconds for name, ready, seconds in waits if name != staying.name]
    assert all(seconds < 2.0 for seconds in others)
    if has_heard_all and is_noticed:
        world.start(dying)
        world.run_until(lambda: world.mixing_checker.settled_count == 1, 10 * ROUND_SECONDS_MAX)


@pytest.mark.parametrize("round_count", [70, pytest.param(200, marks=pytest.mark.nightly)])
def test_eight_that_start_apart_agree_by_pairs_alone(round_count: int) -> None:
    """A-GOS-3: random start, zero gradients, 200 rounds of pairs: all agree to 2 ulp, and the mean is kept."""
    world = make_world(3, trainer_count=7, dtype=np.float32)
    before = world.mean_of()
    world.run_rounds(round_count, round_count * ROUND_SECONDS_MAX)
    values = np.array([member.z for member in world.members])
    ulp = np.spacing(np.abs(values).max(axis=0))
    assert ((values.max(axis=0) - values.min(axis=0)) / ulp).max() <= 2.0
    assert (np.abs(world.mean_of() - before) / np.abs(before)).max() <= 1e-6


@pytest.mark.parametrize(
    ("variant", "round_count"),
    [
        (MixingVariant.LOCAL_M1_M2, 12),
        pytest.param(MixingVariant.LOCAL_M1_M2, 200, marks=LONG),
        pytest.param(MixingVariant.GLOBAL_M1_LOCAL_M2, 200, marks=LONG),
        pytest.param(MixingVariant.DILOCO, 200, marks=LONG),
    ],
)
def test_one_failed_exchange_in_twenty_costs_a_twentieth_of_the_steps_at_most(
    variant: MixingVariant, round_count: int
) -> None:
    """A-GOS-4: in each round 5 % of the pairs cannot reach each other; DiLoCo is gossip's variant of it."""
    utilization = {}
    for failures_per_mille in (0, 50):
        world = make_world(
            4,
            variant,
            step=0.25,
            inner_seconds=(0.99 * INNER_SECONDS, 1.01 * INNER_SECONDS),
            failures_per_mille=failures_per_mille,
        )
        world.run_rounds(round_count, round_count * (INNER_SECONDS + ROUND_SECONDS_MAX))
        # No round is aborted: every one that was opened led to a step.
        assert all(member.round_count >= round_count for member in world.members)
        utilization[failures_per_mille] = world.utilization
        print(f"{variant}: {failures_per_mille} per mille fail, utilization {world.utilization:.4f}")
    assert utilization[50] >= 0.95 * utilization[0]


def cut_after_answer(world: MixingWorld) -> tuple[MixingNode, MixingNode]:
    """Part a pair at the moment its upper key answered: what the lower one says of it is lost."""
    lower, upper = wait_for_mix2(world, has_answered)
    # The answer is on its way, and the lower side has what it takes on it; what is said afterwards gets nowhere.
    world.run_until(
        lambda: (work := pair_of(lower, Job.MIX2)) is not None and (bool(work.order_again()) or work._mean is not None),
        ROUND_SECONDS_MAX,
    )
    world.part(lower, upper)
    return lower, upper


def test_a_mean_that_only_one_side_took_is_made_up_for_when_they_next_speak() -> None:
    """The third message of an exchange is lost: the side that did not hear owes the difference, and pays it."""
    world = make_world(5, step=0.5, trainer_count=1)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    lower, upper = cut_after_answer(world)
    place = next(iter(place for place, stand in upper.durable_stands.items() if stand is Stand.ANSWERED))
    world.run_for(60.0)
    assert lower.durable_stands[place] is Stand.TAKEN
    assert upper.durable_stands[place] is Stand.ANSWERED
    world.heal()
    world.run_until(lambda: world.mixing_checker.settled_count == 1, 5 * ROUND_SECONDS_MAX)
    world.run_for(1.0)
    assert place not in upper.durable_stands


def test_an_answer_that_came_to_nothing_leaves_no_debt() -> None:
    world = make_world(6, step=0.5, trainer_count=1)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    lower, upper = wait_for_mix2(world, lambda work: work.bench.peer_id > work.partner and bool(work.order_again()))
    world.part(lower, upper)
    world.run_for(60.0)
    assert Stand.ANSWERED in upper.durable_stands.values()
    world.heal()
    world.run_until(lambda: Stand.ANSWERED not in upper.durable_stands.values(), 5 * ROUND_SECONDS_MAX)
    assert world.mixing_checker.settled_count == 0
    assert upper.counts["debts", "void"] >= 1


@pytest.mark.parametrize("tenths", range(1, 30, 4))
@pytest.mark.parametrize("variant", [MixingVariant.LOCAL_M1_M2, MixingVariant.GLOBAL_M1_LOCAL_M2])
def test_a_daemon_that_restarts_in_a_round_costs_its_training_process_that_round(
    tenths: int, variant: MixingVariant
) -> None:
    world = make_world(7, variant, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.run_for(tenths / 10)
    member = world.node("trainer 0")
    toy = member.toy
    assert toy is not None
    assert member.mixing is not None
    lost = member.mixing.round_index
    world.stop_daemon(member)
    assert toy.doing in (Doing.OPENING, Doing.INNER), "it waits for nobody"
    world.run_for(0.3)
    world.start(member)
    count = len(world.waits)
    world.run_until(lambda: toy.plan is not None and toy.plan.round_index != lost, ROUND_SECONDS_MAX)
    assert [ready for name, ready, _ in world.waits[count:] if name == member.name] == []
    assert toy.plan is not None
    assert toy.plan.is_listed
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    assert member.toy is toy
    assert toy.adopted_count == 0
    assert any(name == member.name and not ready.is_alone for name, ready, _ in world.waits[count:])


def test_while_its_daemon_is_away_a_training_process_goes_on_alone() -> None:
    world = make_world(7, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    member = world.node("trainer 0")
    world.stop_daemon(member)
    before = member.round_count
    world.run_for(5 * (RECONNECT_SECONDS + 1.0))
    assert member.round_count >= before + 4
    world.start(member)
    count = len(world.waits)
    world.run_until(lambda: any(name == member.name for name, *_ in world.waits[count:]), 10 * ROUND_SECONDS_MAX)


def test_a_training_process_that_got_ahead_of_all_others_alone_mixes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is the faster, so the others would never reach its rounds."""
    monkeypatch.setattr(mixing_node, "RECONNECT_SECONDS", 0.5)
    world = make_world(7, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    member = world.node("trainer 0")
    world.stop_daemon(member)
    world.run_for(60.0)
    ahead, others = (
        member.mixing_disk.round_index,
        max(m.mixing_disk.round_index for m in world.members if m is not member),
    )
    assert ahead > others + world.settings.roster_rounds
    world.start(member)
    count = len(world.waits)
    world.run_for(3 * ROUND_SECONDS_MAX)
    mixed = [ready.round_index for name, ready, _ in world.waits[count:] if name == member.name and not ready.is_alone]
    assert min(mixed) < ahead


def test_a_straggler_goes_on_in_the_newest_round() -> None:
    world = make_world(8, step=0.5)
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    slow = world.node("trainer 1")
    world.stop_daemon(slow)
    world.run_for(120.0)
    world.start(slow)
    assert slow.mixing is not None
    world.run_until(lambda: (slow.mixing.round_index or 0) >= world.round_index > 10, 5 * ROUND_SECONDS_MAX)
    skipped = world.round_index - slow.round_count
    assert skipped > 5


def test_without_its_coordinator_a_stale_roster_sits_out_and_nothing_waits() -> None:
    world = make_world(9, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.crash(world.node("authority 0"))
    world.run_for(120.0)
    count = len(world.waits)
    world.run_rounds(5, 5 * ROUND_SECONDS_MAX)
    assert world.waits[count:] == []
    assert world.node("trainer 0").counts["mixing_rounds", "unlisted"] >= 5
    world.start(world.node("authority 0"))
    world.run_until(lambda: len(world.waits) > count + 10, 10 * ROUND_SECONDS_MAX)


def test_a_coordinator_that_dies_is_replaced_and_its_rosters_go_on() -> None:
    world = make_world(10, authority_count=3, trainer_count=1, step=0.5)
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    first = next(m for m in world.members if m.convener is not None and m.convener.is_leading(world.now))
    world.crash(first)
    world.run_for(120.0)
    leading = [m for m in world.members if m.convener is not None and m.convener.is_leading(world.now)]
    assert len(leading) == 1
    newest = leading[0].rosters.newest
    assert newest is not None
    assert newest.roster.term > 1
    assert len(newest.members) == 3
    world.start(first)
    world.run_for(120.0)
    newest = leading[0].rosters.newest
    assert newest is not None
    assert len(newest.members) == 4


def test_a_member_that_is_gone_is_listed_no_more_and_is_again_when_it_is_back() -> None:
    world = make_world(11, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    gone = world.node("trainer 2")
    world.crash(gone)
    world.run_for(PRESENT_SECONDS + 60.0)
    known = world.node("authority 0").rosters.find(world.round_index)
    assert known is not None
    assert gone.peer_id not in known.members
    world.start(gone)
    world.run_for(60.0)
    known = world.node("authority 0").rosters.find(world.round_index)
    assert known is not None
    assert gone.peer_id in known.members


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_a_joiner_begins_with_what_the_others_hold(variant: MixingVariant) -> None:
    world = make_world(12, variant, joiner_count=1, spread=1.0, step=0.25)
    world.run_until(lambda: world.round_index >= 3, 5 * ROUND_SECONDS_MAX)
    joiner = world.node("joiner 0")
    world.start(joiner)
    world.run_until(lambda: joiner.toy is not None and joiner.toy.adopted_count == 1, 5 * ROUND_SECONDS_MAX)
    low, high = (np.min([m.z for m in world.members[:-1]]), np.max([m.z for m in world.members[:-1]]))
    assert low - 2.0 <= joiner.z.min() <= joiner.z.max() <= high + 2.0
    world.run_until(lambda: ("mixing_rounds", "listed") in joiner.counts, 10 * ROUND_SECONDS_MAX)


@pytest.mark.parametrize("variant", list(MixingVariant))
def test_an_only_authority_that_lost_its_state_is_soon_given_one_by_those_who_went_on_alone(
    variant: MixingVariant,
) -> None:
    world = make_world(12, variant, trainer_count=2, inner_seconds=(1.0, 2.0), step=0.25)
    world.run_rounds(3, 4 * ROUND_SECONDS_MAX)
    authority = world.node("authority 0")
    world.crash(authority)
    authority.mixing_disk.z, authority.mixing_disk.round_index = None, 0
    # The last roster ends meanwhile, and nobody can offer a state without one.
    world.run_for(100.0)
    world.start(authority)
    done = authority.round_count
    world.run_until(lambda: authority.round_count > done, ROUND_SECONDS_MAX)
    assert authority.toy is not None
    assert authority.toy.adopted_count == 1, "with its own start it would pull the others back"


@pytest.mark.parametrize("authority_count", [1, 3])
def test_where_every_training_process_lost_its_state_all_begin_anew_together(authority_count: int) -> None:
    world = make_world(12, authority_count=authority_count, trainer_count=2, inner_seconds=(1.0, 2.0))
    world.run_rounds(3, 4 * ROUND_SECONDS_MAX)
    for member in world.members:
        member.kill_training()
        member.mixing_disk.z, member.mixing_disk.round_index = None, 0
    world.run_for(1.0)
    for member in world.members:
        member.attach_training()
    done, since = {member.name: member.round_count for member in world.members}, len(world.waits)
    world.run_until(lambda: all(m.round_count > done[m.name] for m in world.members), ROUND_SECONDS_MAX)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    assert {name for name, ready, _ in world.waits[since:] if not ready.is_alone} == set(done)


def test_one_that_comes_back_without_a_state_waits_for_those_it_finds_later() -> None:
    """Two that lost theirs find each other first; the third, which holds it, is found before they begin anew."""
    world = make_world(12, trainer_count=2, inner_seconds=(1.0, 2.0), step=0.25)
    world.run_rounds(3, 4 * ROUND_SECONDS_MAX)
    *gone, holder = world.members
    for member in gone:
        world.crash(member)
        member.mixing_disk.z, member.mixing_disk.round_index = None, 0
        world.part(member, holder)
    for member in gone:
        world.start(member)
    world.run_for(5.0)
    world.heal()
    done = {member.name: member.round_count for member in gone}
    world.run_until(lambda: all(m.round_count > done[m.name] for m in gone), 2 * ROUND_SECONDS_MAX)
    assert all(member.toy is not None and member.toy.adopted_count == 1 for member in gone)


def test_an_owner_that_is_gone_leaves_own_values_in_its_slices() -> None:
    world = make_world(13, MixingVariant.GLOBAL_M1, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.crash(world.node("trainer 0"))
    count = len(world.waits)
    world.run_until(lambda: len(world.waits) > count + 2, 2 * ROUND_SECONDS_MAX)
    ready = world.waits[-1][1]
    assert sum(piece.mean is None for piece in ready.slices) == count_slices(4) // 4
    assert ready.reason == "lost"


def test_blobs_of_rounds_that_are_over_are_released() -> None:
    world = make_world(14, MixingVariant.GLOBAL_M1_LOCAL_M2, step=0.5)
    world.run_rounds(4, 4 * ROUND_SECONDS_MAX)
    counts = []
    for _ in range(5):
        world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
        counts.append(max(len(member.store.lists) for member in world.members))
    assert max(counts) <= min(counts) + 8
    assert max(counts) < 60


def lie_with_nan(values: Values) -> Values:
    lie: Values = np.full_like(values, np.nan)
    return lie


@pytest.mark.parametrize("variant", [MixingVariant.GLOBAL_M1, MixingVariant.LOCAL_M1_M2])
def test_a_mean_or_part_that_is_not_finite_is_taken_by_nobody(variant: MixingVariant) -> None:
    world = make_world(15, variant, step=0.5)
    liar = world.node("trainer 0")
    world.mixing_checker.dishonest.add(liar.peer_id)
    liar.lies = lie_with_nan
    world.run_rounds(4, 4 * ROUND_SECONDS_MAX)
    honest = [member for member in world.members if member is not liar]
    assert all(np.isfinite(member.z).all() for member in honest)
    assert sum(member.counts.get(("strike", "finite"), 0) for member in honest) >= 3


def test_under_loss_alone_no_round_is_aborted_and_pairs_conserve_the_mean() -> None:
    faults = Faults(drop_per_mille=10, close_per_mille=20, lose_per_mille=10, duplicate_per_mille=80)
    world = make_world(16, faults=faults, step=0.5)
    world.run_rounds(10, 20 * ROUND_SECONDS_MAX)
    assert world.mixing_checker.exchange_count >= 10


def test_only_training_processes_that_wait_are_told_a_result() -> None:
    world = make_world(17, step=0.5)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    member = world.node("trainer 0")
    member.kill_training()
    world.run_for(5.0)
    assert member.toy is None
    member.attach_training()
    world.run_rounds(2, 5 * ROUND_SECONDS_MAX)
    assert member.toy is not None
    assert member.toy.doing in list(Doing)


# A checker that finds nothing proves nothing: each of these bugs is planted, and must be found.


def lose_the_last_message(seed: int) -> None:
    world = make_world(seed, step=0.5, trainer_count=1)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    cut_after_answer(world)
    world.run_for(60.0)
    world.heal()
    world.run_for(60.0)


def test_a_debt_that_is_forgotten_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(journal: Journal, exchange: Exchange, stand: Stand) -> None:
        journal.drop(exchange.round_index, exchange.job)

    monkeypatch.setattr(Journal, "turn", turn)
    with pytest.raises(SimulationError, match="moved"):
        lose_the_last_message(5)


def test_a_debt_that_is_paid_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Debts, "settle", lambda debts, names: [])
    monkeypatch.setattr(ToyMixing, "has_added", lambda toy, name: False)
    with pytest.raises(SimulationError, match="twice"):
        lose_the_last_message(5)


def test_an_answering_side_that_takes_unasked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairWork, "_is_taken_there", lambda work: True)
    world = make_world(5, step=0.5, trainer_count=1)
    with pytest.raises(SimulationError, match="never stored"):
        world.run_rounds(3, 3 * ROUND_SECONDS_MAX)


def test_a_lower_side_that_takes_on_a_hint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PairWork._find

    def find(work: PairWork, kind: ShareKind) -> Share | None:
        is_answer = kind is ShareKind.PART and work.bench.peer_id < work.partner
        return original(work, kind) or (original(work, ShareKind.HINT) if is_answer else None)

    monkeypatch.setattr(PairWork, "_find", find)
    world = make_world(5, step=0.5, trainer_count=1)
    with pytest.raises(SimulationError, match="moved"):
        world.run_rounds(3, 3 * ROUND_SECONDS_MAX)


def test_owners_that_say_different_things_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(5, MixingVariant.GLOBAL_M1, step=0.5)
    original = EverybodyWork.wants

    def take_own(work: EverybodyWork) -> object:
        # Whoever takes its own part in place of the owner's mean.
        for place, piece in enumerate(work._slices):
            if piece.piece is None and work.own:
                piece.piece = MixedSlice(name_of(work.own[place]), 2)
        return original(work)

    monkeypatch.setattr(EverybodyWork, "wants", take_own)
    with pytest.raises(SimulationError, match="two means"):
        world.run_rounds(3, 3 * ROUND_SECONDS_MAX)


def test_a_wait_without_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairWork, "is_due", lambda work, now: False)
    monkeypatch.setattr(Reach, "is_lost", lambda reach, peer_id, now, since: False)
    world = make_world(5, step=0.5, trainer_count=1)
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    world.crash(world.node("trainer 0"))
    with pytest.raises(SimulationError, match="longer than it should"):
        world.run_for(200.0)
