"""Named scenarios of the version chain, each on real machines in a simulated swarm."""

from __future__ import annotations

import copy

import pytest

from pulsenet.chain.records import Kind
from pulsenet.chain.retention import RetentionLimits
from pulsenet.ids import Digest, Version
from pulsenet.node.events import BlobDamaged, HeadSeen, RoomTaken
from pulsenet.node.mender import MEND_SECONDS
from pulsenet.testing.node import SimNode
from pulsenet.testing.world import World

SETTLE_SECONDS = 60.0


def make_world(version_count: int, anchor_interval: int = 10) -> tuple[World, SimNode]:
    """Return a swarm whose publisher has committed this many versions, extras included."""
    world = World(1, anchor_interval=anchor_interval)
    trainer = world.add_node("trainer", "trainer")
    for _ in range(version_count):
        world.publish_and_wait()
        world.run_for(1.0)
    return world, trainer


def forget_blob(node: SimNode, number: int, kind: Kind = Kind.PATCH) -> None:
    """Lose the chunks of one version's blob, as a disk might."""
    for manifest in node.store.manifests().values():
        if manifest.version.number == number and manifest.kind is kind:
            used = {
                digest
                for other in node.store.manifests().values()
                if other.blob_id != manifest.blob_id
                for digest in node.store.digests_of(node.store.lists[other.blob_id])
            }
            for digest in node.store.digests_of(node.store.lists[manifest.blob_id]):
                if digest not in used:
                    del node.store.chunks[digest]
            return
    raise AssertionError(f"no {kind} to {number}")


def fetched_numbers(node: SimNode, kind: Kind) -> list[int]:
    return sorted(m.version.number for m in node.store.manifests().values() if m.kind is kind)


def test_patches_are_decoded_while_they_arrive() -> None:
    world, _ = make_world(3)
    follower = world.add_node("follower", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    before = follower.versions.hands.mirror.prepared_count
    for _ in range(5):
        world.publish_and_wait()
        world.run_until(world.is_settled, SETTLE_SECONDS)
    assert follower.versions.hands.mirror.prepared_count == before + 5


def test_a_joiner_at_v57_takes_one_anchor_the_rest_and_one_engine_swap() -> None:
    """A-CHAIN-1: anchors at 1, 11, ... 51; nothing before the newest anchor is downloaded."""
    world, _ = make_world(57)
    joiner = world.add_node("joiner", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert joiner.versions.hands.swaps == [Version(0, 57)]
    assert joiner.versions.hands.engine.root == world.versions[Version(0, 57)]
    assert fetched_numbers(joiner, Kind.ANCHOR) == [51]
    assert min(fetched_numbers(joiner, Kind.PATCH)) == 52
    assert len(joiner.store.manifests()) <= 7
    assert not joiner.counts


def test_a_hole_in_the_chain_is_waited_out_until_the_next_anchor() -> None:
    """A-CHAIN-2: v18 is nowhere; the inferencer stays at v17 and recovers by itself at the anchor v21."""
    world, trainer = make_world(17)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.network.partitions.add((inferencer.peer_id, trainer.peer_id))
    for _ in range(3):
        world.publish_and_wait()
        world.run_for(1.0)
    forget_blob(trainer, 18)
    world.network.partitions.clear()
    world.run_for(120.0)
    assert inferencer.versions.follower is not None
    assert inferencer.versions.follower.mirror_version == Version(0, 17)
    assert inferencer.reports["version_lag"] == 3
    world.publish_and_wait()
    world.run_until(world.is_settled, 120.0)
    assert inferencer.versions.hands.swaps == [Version(0, 17), Version(0, 21)]
    assert ("rejected", "base_mismatch") not in inferencer.counts


def test_a_hole_is_passed_by_a_skip_patch_as_soon_as_there_is_one() -> None:
    world, trainer = make_world(12, anchor_interval=100)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.network.partitions.add((inferencer.peer_id, trainer.peer_id))
    for _ in range(5):
        world.publish_and_wait()
        world.run_for(1.0)
    forget_blob(trainer, 13)
    world.network.partitions.clear()
    world.run_until(world.is_settled, 120.0)
    # Back to v8 and over the skip patch to v16, with the engine never seeing anything but v12 and v17.
    assert inferencer.versions.hands.swaps == [Version(0, 12), Version(0, 17)]


def test_a_publisher_that_restarts_from_an_older_state_opens_an_epoch() -> None:
    """A-CHAIN-4: v8 is out; the publisher comes back from v5 and goes on with other weights."""
    world, trainer = make_world(5)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    old_store, old_region = copy.deepcopy(trainer.store), world.region
    for _ in range(3):
        world.publish_and_wait()
        world.run_for(1.0)
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.crash(trainer)
    trainer.store, world.region = old_store, old_region
    world.start(trainer)
    world.run_for(60.0)
    for _ in range(3):
        world.publish_and_wait(60.0)
        world.run_for(1.0)
    world.run_until(world.is_settled, 120.0)
    assert world.newest is not None
    assert world.newest.epoch == 1
    assert world.newest.number > 8
    assert inferencer.versions.hands.engine.root == world.versions[world.newest]
    assert inferencer.versions.hands.swaps == sorted(inferencer.versions.hands.swaps)


def test_a_mirror_with_a_flipped_bit_is_found_undone_and_rebuilt() -> None:
    """A-CHAIN-5: the next version is reported only with the right root."""
    world, _ = make_world(12)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    inferencer.versions.hands.mirror.flip_bit(world.chance)
    world.publish_and_wait()
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert inferencer.versions.hands.swaps == [Version(0, 12), Version(0, 13)]
    assert inferencer.counts["rejected", "base_mismatch"] == 1


def test_an_older_head_is_refused_now_and_after_a_restart() -> None:
    """A-CHAIN-6, A-AUTH-4: a valid signed v3 is offered again at v7."""
    world, trainer = make_world(3)
    old_head = trainer.store.newest_head()
    assert old_head is not None
    inferencer = world.add_node("inferencer", "inferencer")
    for _ in range(4):
        world.publish_and_wait()
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.crash(trainer)
    for _ in range(2):
        inferencer.deliver_to_all(HeadSeen(old_head, trainer.peer_id))
        world.run_for(5.0)
        assert inferencer.reports["latest_seen_version"] == 7
        assert inferencer.versions.follower is not None
        assert inferencer.versions.follower.mirror_version == Version(0, 7)
        world.crash(inferencer)
        world.start(inferencer)
        world.run_for(1.0)


def test_lag_is_honest_while_behind_and_when_nobody_is_heard() -> None:
    """A-OBS-2, A-AUTH-5: lag 3, then the publisher goes away and age grows; never a lag of 0 unheard."""
    world, trainer = make_world(7, anchor_interval=100)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert inferencer.reports["version_lag"] == 0
    world.network.partitions.add((inferencer.peer_id, trainer.peer_id))
    for _ in range(3):
        world.publish_and_wait()
        world.run_for(1.0)
    trainer.store.chunks.clear()
    world.network.partitions.clear()
    world.run_for(60.0)
    assert inferencer.reports["version_lag"] == 3
    assert inferencer.reports["publisher_seen"] is True
    ages = []
    world.crash(trainer)
    for _ in range(8):
        world.run_for(60.0)
        age = inferencer.reports["version_age_seconds"]
        assert isinstance(age, float)
        ages.append(age)
        assert inferencer.reports["version_lag"] == 3
    assert ages == sorted(ages)
    assert ages[-1] > 400
    assert inferencer.reports["publisher_seen"] is False
    assert inferencer.reports["stale"] is True


def test_a_current_node_that_hears_nobody_claims_no_lag() -> None:
    """A-OBS-2: not 0, but unknown."""
    world, trainer = make_world(3)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.crash(trainer)
    world.run_for(400.0)
    assert inferencer.reports["version_lag"] is None
    assert inferencer.reports["applied_version"] == 3


def test_announced_data_is_always_there() -> None:
    """A-PUB-2: a connected inferencer never asks in vain, and lets no version out for long."""
    world, _ = make_world(1)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    for _ in range(60):
        world.publish_and_wait()
        world.run_until(world.is_settled, 5.0)
    assert inferencer.counts == {}
    assert len(inferencer.versions.hands.swaps) == 61


def test_a_publisher_killed_at_any_time_loses_no_committed_version() -> None:
    """A-PUB-1, A-PUB-3: what was not committed is in the next patch."""
    world, trainer = make_world(2)
    inferencer = world.add_node("inferencer", "inferencer")
    for delay_ms in range(0, 160, 10):
        world.publish()
        world.run_for(delay_ms / 1000)
        world.crash(trainer)
        world.run_for(1.0)
        world.start(trainer)
        world.run_for(5.0)
        world.publish_and_wait()
        world.run_until(world.is_settled, SETTLE_SECONDS)
        assert world.newest is not None
        assert inferencer.versions.hands.engine.root == world.versions[world.newest]


def test_a_seed_alone_brings_a_newcomer_to_the_newest_version() -> None:
    world, trainer = make_world(14)
    seed = world.add_node("seed", "seed")
    first = world.add_node("first", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert fetched_numbers(seed, Kind.ANCHOR) == [1, 11]
    assert fetched_numbers(seed, Kind.PATCH) == list(range(2, 15))
    world.run_for(60.0)
    world.crash(trainer)
    world.crash(first)
    late = world.add_node("late", "inferencer")
    # Its only bootstrap is dead: it finds the seed where it reads the directory, one shard after another.
    world.run_until(lambda: late.versions.hands.engine.version == Version(0, 14), 320.0)
    assert late.reports["latest_seen_version"] == 14


@pytest.mark.parametrize("others", [1, 2])
def test_a_newcomer_is_served_while_the_publisher_is_away_for_long(others: int) -> None:
    """A-AUTH-7: its head is over; one seed is believed after a minute, two at once, and the newcomer says stale."""
    world, trainer = make_world(14)
    for index in range(others):
        world.add_node(f"seed {index}", "seed")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.run_for(60.0)
    world.crash(trainer)
    world.run_for(900.0)
    late = world.add_node("late", "inferencer")
    world.run_until(lambda: late.versions.hands.engine.version == Version(0, 14), 420.0)
    assert late.reports["stale"] is True
    assert any("no peer knows a head that is still valid" in line for line in late.log)
    world.start(trainer)
    world.publish_and_wait()
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert late.reports["stale"] is False


def test_a_seed_drops_what_the_publisher_drops() -> None:
    """A-DSK-3: two anchors and what came since the older, however long it runs."""
    world, trainer = make_world(1, anchor_interval=4)
    seed = world.add_node("seed", "seed", RetentionLimits())
    inferencer = world.add_node("inferencer", "inferencer")
    for _ in range(40):
        world.publish_and_wait()
        world.run_until(world.is_settled, SETTLE_SECONDS)
    world.run_for(60.0)
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert set(seed.store.manifests()) == set(trainer.store.manifests())
    assert len(seed.store.manifests()) < 20
    assert set(seed.store.chunks) == set(trainer.store.chunks)
    # The inferencer came by the first anchor and still keeps what rebuilds its mirror.
    assert fetched_numbers(inferencer, Kind.ANCHOR) == [1]


@pytest.mark.parametrize("role", ["seed", "inferencer"])
def test_what_a_disk_damaged_is_fetched_again_and_not_announced_meanwhile(role: str) -> None:
    """A-DSK-2: found by a scrub while nothing else happens; whatever the catalogue still names comes back."""
    world, trainer = make_world(14)
    node = world.add_node("keeper", role)
    world.run_until(world.is_settled, SETTLE_SECONDS)
    before = set(node.store.chunks)
    for kind, number in ((Kind.PATCH, 13), (Kind.ANCHOR, 11)):
        forget_blob(node, number, kind)
    lost = before - set(node.store.chunks)
    assert lost
    lists = {blob_id: set(node.store.digests_of(data)) for blob_id, data in node.store.lists.items()}
    for blob_id, digests in lists.items():
        if digests & lost:
            node.deliver_to_all(BlobDamaged(blob_id))
    follower = node.versions.follower
    assert follower is not None
    assert 11 not in follower.holdings.anchors
    world.run_until(lambda: set(node.store.chunks) == before, SETTLE_SECONDS)
    world.run_until(lambda: 11 in follower.holdings.anchors, SETTLE_SECONDS)
    assert follower.phase == "current"
    assert node.versions.hands.fetched_size_bytes > 0
    trainer.deliver_to_all(BlobDamaged(next(iter(trainer.store.lists))))
    world.publish_and_wait()
    world.run_until(world.is_settled, SETTLE_SECONDS)


def damage(node: SimNode, number: int, kind: Kind = Kind.PATCH) -> set[Digest]:
    """Lose the chunks of one version's blob, have the node hear of it, and return what is gone."""
    before = set(node.store.chunks)
    forget_blob(node, number, kind)
    lost = before - set(node.store.chunks)
    assert lost
    for blob_id, data in tuple(node.store.lists.items()):
        if lost & set(node.store.digests_of(data)):
            node.deliver_to_all(BlobDamaged(blob_id))
    return lost


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_publisher_gets_back_from_readers_what_its_disk_damaged(is_restarted: bool) -> None:
    """A-DSK-2: found while it runs, or by a scrub while it stood still; no version and no anchor is made for it."""
    world, trainer = make_world(14)
    world.add_node("keeper", "seed")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    known = set(trainer.store.manifests())
    if is_restarted:
        world.crash(trainer)
        forget_blob(trainer, 13)
        forget_blob(trainer, 11, Kind.ANCHOR)
        world.start(trainer)
    else:
        damage(trainer, 13)
        damage(trainer, 11, Kind.ANCHOR)
    world.run_until(lambda: all(map(trainer.store.holds_blob, trainer.store.lists)), SETTLE_SECONDS)
    world.run_for(2 * MEND_SECONDS)
    assert set(trainer.store.manifests()) == known
    assert sum("is whole again" in line for line in trainer.log) == 2


@pytest.mark.parametrize("kind", [Kind.PATCH, Kind.ANCHOR])
def test_a_publisher_whose_lost_blob_nobody_has_offers_an_anchor_instead(kind: Kind) -> None:
    """A-DSK-2: newcomers find a way in, although nothing more is published."""
    world, trainer = make_world(14)
    damage(trainer, 13 if kind is Kind.PATCH else 11, kind)
    world.run_for(MEND_SECONDS + 5.0)
    (told,) = (line for line in trainer.log if "no peer" in line)
    assert "pulsenet doctor" in told
    assert any(entry.kind is Kind.ANCHOR and entry.version.number == 14 for entry in trainer.store.manifests().values())
    newcomer = world.add_node("newcomer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert newcomer.versions.hands.engine.version == Version(0, 14)


def test_an_anchor_of_the_newest_version_that_was_lost_is_made_again_and_stays_one() -> None:
    world, trainer = make_world(11)
    known = set(trainer.store.manifests())
    damage(trainer, 11, Kind.ANCHOR)
    world.run_for(MEND_SECONDS + 5.0)
    assert all(map(trainer.store.holds_blob, trainer.store.lists))
    assert set(trainer.store.manifests()) == known
    world.publish_and_wait()
    assert world.newest == Version(0, 12)


def test_a_seed_lets_go_of_old_versions_when_rounds_take_its_room() -> None:
    world, _ = make_world(14)
    seed = world.add_node("seed", "seed", RetentionLimits(size_bytes_max=1 << 30))
    world.run_until(world.is_settled, SETTLE_SECONDS)
    count = len(seed.store.manifests())
    size_bytes = sum(manifest.encoded_size_bytes for manifest in seed.store.manifests().values())
    seed.deliver_to_all(RoomTaken((1 << 30) - size_bytes // 2))
    world.run_until(lambda: len(seed.store.manifests()) < count, SETTLE_SECONDS)
    assert seed.versions.follower is not None
    assert seed.versions.follower.holdings.version_last == 14
    seed.deliver_to_all(RoomTaken(0))
    world.run_until(lambda: len(seed.store.manifests()) == count, SETTLE_SECONDS)


def test_a_killed_inferencer_comes_back_from_its_own_disk() -> None:
    """A-CHK-4: what is durable is not fetched again."""
    world, trainer = make_world(9)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_until(world.is_settled, SETTLE_SECONDS)
    world.crash(inferencer)
    world.start(inferencer)
    world.run_until(world.is_settled, SETTLE_SECONDS)
    assert inferencer.versions.hands.fetched_size_bytes == 0
    assert inferencer.versions.hands.engine.version == Version(0, 9)
    assert trainer.is_up


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3, 0.5, 0.8])
def test_an_inferencer_killed_mid_fetch_resumes(seconds: float) -> None:
    """A-CHK-4 in the swarm: total received stays near the payload."""
    world, _ = make_world(9)
    inferencer = world.add_node("inferencer", "inferencer")
    world.run_for(seconds)
    first = inferencer.versions.hands.fetched_size_bytes
    world.crash(inferencer)
    world.start(inferencer)
    world.run_until(world.is_settled, SETTLE_SECONDS)
    stored = sum(len(data) for data in inferencer.store.chunks.values())
    assert first + inferencer.versions.hands.fetched_size_bytes <= 1.05 * stored + 256
