"""Named scenarios of rounds that are summed by slice: what travels, who may fail, and who may lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pulsenet.chain.records import SliceName
from pulsenet.ids import compute_digest
from pulsenet.node.effects import Fate, StepState, SumSlices
from pulsenet.node.events import SlicesSummed, StateStepped, StepFailed, SumFailed
from pulsenet.node.rounds_phase import Phase
from pulsenet.testing.rounds_node import RoundsNode
from pulsenet.testing.rounds_world import RoundsWorld
from pulsenet.testing.toy_training import SIZE, write_pieces
from pulsenet.wire.chunks import ChunkList
from pulsenet.wire.sections import find_slice_chunks

ALWAYS_SLICED_BITS = 0x7149_F2CA
"""1e30: no round's contributions are small enough to be fetched whole."""

ROUND_SECONDS_MAX = 40.0

NOTHING = compute_digest(b"nothing")


def make_world(seed: int, **changes: int) -> RoundsWorld:
    given = {"authority_count": 1, "trainer_count": 5} | changes
    # Long enough for everybody who is there to take part in every round.
    constants = {"all_gather_ratio_min": ALWAYS_SLICED_BITS, "contribution_wait_seconds": 60}
    return RoundsWorld(seed, constants=constants, **given)  # type: ignore[arg-type]


def run(world: RoundsWorld, count: int) -> None:
    world.run_rounds(count, count * ROUND_SECONDS_MAX)
    world.run_until(world.is_settled, ROUND_SECONDS_MAX)


def plain_trainers(world: RoundsWorld) -> list[RoundsNode]:
    return [node for node in world.nodes.values() if not node.is_authority]


def count_of(node: RoundsNode, label: str) -> int:
    return node.counts.get(("slices", label), 0)


def owner_at(world: RoundsWorld, place: int) -> RoundsNode:
    """Return who owns a slice while everybody contributes."""
    return world.nodes[sorted(world.nodes)[place]]


def test_every_trainer_counts_and_nobody_but_the_authority_fetches_whole_contributions() -> None:
    world = make_world(1)
    run(world, 5)
    assert [len(receipt.members) for receipt in world.receipts.values()] == [6] * 5
    for node in plain_trainers(world):
        assert node.counts["contributions", Fate.COUNTED] == 5
        assert count_of(node, "summed") == 5
        others = [c for digest, c in contributions_of(node, 4).items() if digest != node.peer_id]
        assert len(others) == 5
        assert not any(node.store.holds_blob(blob_id) for blob_id in others)
    assert all(
        world.node("authority 0").store.holds_blob(b) for b in contributions_of(plain_trainers(world)[0], 4).values()
    )


def contributions_of(node: RoundsNode, round_index: int) -> dict[object, object]:
    entries = node.ledger.contributions_to(round_index)
    return {peer_id: entry.contribution.blob_id for peer_id, (_, entry) in entries.items()}


def expect_received(world: RoundsWorld, node: RoundsNode, round_index: int) -> tuple[int, int]:
    """Return what a round brings a trainer by slice, and what it would bring by whole contributions."""
    final = node.ledger.final(round_index)
    aggregate = node.ledger.aggregate(round_index)
    assert final is not None
    assert aggregate is not None
    store = world.node("authority 0").store
    owners = [member.peer_id for member in final.receipt.members]
    own = owners.index(node.peer_id)
    by_slice = sum(name.encoded_size_bytes for place, name in enumerate(aggregate.slices) if place != own)
    whole = 0
    for member in final.receipt.members:
        entry = node.ledger.contribution(member.contribution_digest)
        assert entry is not None
        if member.peer_id == node.peer_id:
            continue
        whole += entry.contribution.encoded_size_bytes
        chunk_list = ChunkList.decode(store.lists[entry.contribution.blob_id])
        header, body = find_slice_chunks(chunk_list, own, len(owners))
        by_slice += sum(chunk_list.entries[place][0] for place in (*header, *body))
    return by_slice, whole


@pytest.mark.parametrize("trainer_count", [2, 3, 4, 5])
def test_what_a_trainer_receives_is_one_slice_of_all_and_all_slices_of_one(trainer_count: int) -> None:
    """Bounded by two dense copies whatever their number; by whole contributions it grows with it."""
    world = make_world(2, trainer_count=trainer_count)
    run(world, 4)
    member_count = trainer_count + 1
    for node in plain_trainers(world):
        expected = [expect_received(world, node, round_index) for round_index in range(4)]
        by_slice, whole = (sum(values) for values in zip(*expected, strict=True))
        assert node.received_size_bytes == by_slice
        # 9 bytes an element that was sent; heads of 4 bytes a contribution and a slice; no slice is larger by more
        # than an element than another.
        dense_size_bytes, head_size_bytes = 9 * SIZE, 4
        most = 2 * (member_count - 1) * (dense_size_bytes / member_count + head_size_bytes) + 9 * member_count
        assert by_slice <= 4 * most
        assert member_count < 5 or by_slice < whole


def test_an_owner_that_dies_costs_its_slice_and_nothing_else() -> None:
    world = make_world(3)
    run(world, 2)
    dead = owner_at(world, 2)
    if dead.is_authority:
        dead = owner_at(world, 3)
    world.run_until(
        lambda: any(node.rounds is not None and node.rounds.phase is Phase.GATHERING for node in plain_trainers(world)),
        ROUND_SECONDS_MAX,
    )
    world.crash(dead)
    run(world, 2)
    alive = [node for node in plain_trainers(world) if node is not dead]
    # At most two slices in the round of its death, one in every other.
    summed = [count_of(node, "summed") - len(world.receipts) for node in alive]
    assert set(summed) <= {0, 1}
    assert any(summed)
    world.start(dead)
    run(world, 2)
    assert dead.counts["contributions", Fate.COUNTED] >= 3


def test_an_owner_that_serves_other_bytes_is_struck_and_passed_over() -> None:
    world = make_world(4)
    run(world, 1)
    liar = plain_trainers(world)[0]
    rightly = liar.training.sum_slices

    def serve_wrongly(order: SumSlices) -> SlicesSummed | SumFailed:
        found = rightly(order)
        assert isinstance(found, SlicesSummed)
        for digest in liar.store.digests_of(liar.store.lists[found.slices[0][1].blob_id]):
            liar.store.chunks[digest] = b"lie"
        return found

    liar.training.sum_slices = serve_wrongly  # type: ignore[method-assign]
    liar.training.step = lambda order: StepFailed(order.round_index, "decode")  # type: ignore[method-assign]
    world.run_rounds(2, 2 * ROUND_SECONDS_MAX)
    honest = [node for node in plain_trainers(world) if node is not liar]
    assert all(node.counts.get(("strike", "bad-chunk"), 0) > 0 for node in honest)
    # Whoever summed the slice itself serves it, too, so not everybody has to.
    assert any(count_of(node, "summed") >= 3 for node in honest)
    assert all(count_of(node, "astray") == 0 for node in honest)


def test_an_owner_that_serves_nobody_is_passed_over() -> None:
    world = make_world(5)
    run(world, 1)
    first, second = plain_trainers(world)[:2]
    # They have every contribution's parts from others, but each other's slice only by summing it.
    world.part(first, second)
    run(world, 2)
    assert count_of(first, "summed") > len(world.receipts) - 1
    world.heal()
    run(world, 1)


def test_without_a_signed_name_everything_is_fetched_whole() -> None:
    world = make_world(6)
    authority = world.node("authority 0")
    authority.training.sum_slices = lambda order: SumFailed(order.round_index, "decode")  # type: ignore[method-assign]
    run(world, 2)
    assert count_of(authority, "failed") >= 1
    for node in plain_trainers(world):
        assert world.node("authority 0").ledger.aggregate(0) is None
        assert all(node.store.holds_blob(blob_id) for blob_id in contributions_of(node, 0).values())  # type: ignore[arg-type]
        # What it summed has no name that anybody could ask for.
        assert count_of(node, "summed") == 2


def lie_about(node: RoundsNode, round_index: int, place: int) -> None:
    """Let a training process sum one slice of one round wrongly: always to the same end, whoever does."""
    rightly = node.training.sum_slices

    def sum_wrongly(order: SumSlices) -> SlicesSummed | SumFailed:
        found = rightly(replace(order, stored=order.slices))
        if order.round_index != round_index or not isinstance(found, SlicesSummed) or place not in order.slices:
            return found
        (right,) = (name for own, name in found.slices if own == place)
        data = bytearray(b"".join(node.store.read_blob(right.blob_id)))
        data[-1] ^= 0x40
        wrong = SliceName(*write_pieces(node.store, [bytes(data)]))
        return replace(found, slices=tuple((own, wrong if own == place else name) for own, name in found.slices))

    node.training.sum_slices = sum_wrongly  # type: ignore[method-assign]


def note_damage(node: RoundsNode, round_index: int) -> None:
    """Tell the checkers from when on the node's state is wrong on purpose."""
    rightly = node.training.step

    def step(order: StepState) -> StateStepped:
        node.is_damaged |= order.round_index == round_index and bool(order.slices)
        return rightly(order)

    node.training.step = step  # type: ignore[method-assign]


def test_an_authority_that_signs_a_wrong_name_is_overruled_by_what_the_receipt_lists() -> None:
    world = make_world(7)
    authority = world.node("authority 0")
    rightly = authority.training.sum_slices

    def sum_wrongly(order: SumSlices) -> SlicesSummed | SumFailed:
        found = rightly(order)
        assert isinstance(found, SlicesSummed)
        return replace(found, slices=tuple((p, SliceName(NOTHING, 9)) for p, _ in found.slices))

    authority.training.sum_slices = sum_wrongly  # type: ignore[method-assign]
    run(world, 2)
    # Nobody can serve what does not exist, and whoever sums a slice itself finds another name.
    assert all(count_of(node, "astray") == 0 for node in world.nodes.values())
    assert all(node.counts["contributions", Fate.COUNTED] == 2 for node in plain_trainers(world))


def test_an_authority_that_lies_with_an_owner_is_named_and_its_victims_restore() -> None:
    world = make_world(8)
    run(world, 4)
    place = next(index for index in range(6) if not owner_at(world, index).is_authority and index > 0)
    authority, owner = world.node("authority 0"), owner_at(world, place)
    victims = [node for node in plain_trainers(world) if node is not owner]
    round_index = world.round_index
    for node in (authority, owner):
        lie_about(node, round_index, place)
    for node in (*victims, owner):
        note_damage(node, round_index)
    world.run_rounds(3, 3 * ROUND_SECONDS_MAX)
    world.run_until(lambda: not any(node.is_damaged for node in victims), 3 * ROUND_SECONDS_MAX)
    assert all(count_of(node, "astray") == 1 for node in victims)
    run(world, 2)
    assert all(count_of(node, "astray") == 1 for node in victims)


def test_two_authorities_that_disagree_are_both_ignored() -> None:
    world = make_world(9, authority_count=3, trainer_count=3)
    second = world.node("authority 1")
    rightly = second.training.sum_slices

    def sum_wrongly(order: SumSlices) -> SlicesSummed | SumFailed:
        found = rightly(order)
        assert isinstance(found, SlicesSummed)
        return replace(found, slices=tuple((p, SliceName(NOTHING, 9)) for p, _ in found.slices))

    second.training.sum_slices = sum_wrongly  # type: ignore[method-assign]
    run(world, 3)
    disputed = [n.ledger.is_disputed(i) for n in world.nodes.values() for i in range(3) if n.ledger.final(i)]
    assert not any(count_of(node, "astray") for node in world.nodes.values())
    assert all(node.counts["contributions", Fate.COUNTED] >= 1 for node in plain_trainers(world))
    assert len(disputed) > 0


def test_a_joiner_replays_by_slices_and_a_lone_training_process_may_die_while_it_sums() -> None:
    world = make_world(10, joiner_count=1)
    run(world, 6)
    joiner = world.node("joiner 0")
    world.start(joiner)
    world.run_until(lambda: joiner.rounds is not None and joiner.rounds.phase is Phase.PENDING, 3 * ROUND_SECONDS_MAX)
    node = plain_trainers(world)[0]
    world.run_until(lambda: node.rounds is not None and node.rounds.phase is Phase.GATHERING, ROUND_SECONDS_MAX)
    node.kill_training()
    world.run_for(1.0)
    node.attach_training()
    run(world, 2)
    assert joiner.counts["contributions", Fate.COUNTED] >= 1


def test_slices_are_let_go_with_their_receipts() -> None:
    world = make_world(11, trainer_count=3)
    sizes = []
    for _ in range(3):
        run(world, 8)
        sizes.append([len(node.store.lists) for node in world.nodes.values()])
    # A generation more or less is there at any moment; one that stayed would be there every time.
    assert all(last <= max(before) + 8 for last, *before in zip(sizes[-1], *sizes[:-1], strict=True))
