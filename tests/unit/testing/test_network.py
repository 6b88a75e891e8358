"""Faults happen as often as they are set, and never on a calm network."""

from __future__ import annotations

from pulsenet.ids import Digest, PeerId
from pulsenet.testing.fakes import Chance
from pulsenet.testing.network import CALM, Faults, Network, draw_faults
from pulsenet.wire.messages import ChunkReply, HeadReply

A, B = PeerId(b"a" * 32), PeerId(b"b" * 32)
CHUNK = ChunkReply(Digest(b"d" * 32), b"data")


def test_a_calm_network_only_delays() -> None:
    network = Network(Chance(1), CALM)
    for _ in range(200):
        assert network.find_failure(A, B) == ""
        assert not network.duplicates()
        assert not network.engine_fails()
        assert network.corrupt(A, CHUNK) == CHUNK
        assert CALM.latency_seconds_min <= network.latency_seconds() <= CALM.latency_seconds_max


def test_a_bad_network_fails_in_every_way() -> None:
    network = Network(Chance(1), Faults(drop_per_mille=300, close_per_mille=300, flip_per_mille=500))
    assert {network.find_failure(A, B) for _ in range(200)} == {"", "timeout", "closed"}
    arrived = [network.corrupt(A, CHUNK) for _ in range(200)]
    assert CHUNK in arrived
    assert any(reply != CHUNK for reply in arrived)
    assert network.corrupt(A, HeadReply(None)) == HeadReply(None)


def test_partitions_cut_both_ways_and_silence_one() -> None:
    network = Network(Chance(1), CALM)
    network.partitions.add((A, B))
    assert network.is_cut(A, B)
    assert network.is_cut(B, A)
    assert network.find_failure(B, A) == "timeout"
    network.partitions.clear()
    network.silent.add(B)
    assert network.find_failure(A, B) == "timeout"
    assert network.find_failure(B, A) == ""


def test_liars_never_send_the_truth() -> None:
    network = Network(Chance(1), CALM)
    network.liars.add(A)
    arrived = [network.corrupt(A, CHUNK) for _ in range(100)]
    assert CHUNK not in arrived
    assert ChunkReply(CHUNK.digest, None) in arrived
    assert network.corrupt(B, CHUNK) == CHUNK


def test_faults_are_drawn_by_seed() -> None:
    assert draw_faults(Chance(3)) == draw_faults(Chance(3))
    assert draw_faults(Chance(3)) != draw_faults(Chance(4))


def test_islands_are_cut_both_ways_or_one() -> None:
    network = Network(Chance(1), CALM)
    network.islands = {A: 1}
    assert network.loses(A, B)
    assert network.loses(B, A)
    network.one_way = True
    assert network.loses(A, B)
    assert not network.loses(B, A)
    assert network.is_cut(B, A)
    network.islands[B] = 1
    assert not network.is_cut(A, B)


def test_a_clog_holds_messages_until_it_ends() -> None:
    network = Network(Chance(1), CALM)
    network.clogs[A, B] = 100.0
    assert network.way_seconds(A, B, 90.0) >= 10.0
    assert network.way_seconds(B, A, 90.0) < 1.0
    assert network.way_seconds(A, B, 101.0) < 1.0


def test_replies_are_lost_and_messages_delayed_as_often_as_it_is_set() -> None:
    network = Network(Chance(1), Faults(lose_per_mille=500, delay_per_mille=500))
    assert {network.loses_reply(A, B) for _ in range(100)} == {True, False}
    seconds = [network.latency_seconds() for _ in range(100)]
    assert 20 < sum(second > CALM.latency_seconds_max for second in seconds) < 80


def test_healing_ends_everything() -> None:
    network = Network(Chance(1), Faults(drop_per_mille=1000))
    network.partitions.add((A, B))
    network.islands[A] = 1
    network.clogs[A, B] = 1e9
    network.silent.add(B)
    network.liars.add(B)
    network.heal()
    assert network.find_failure(A, B) == ""
    assert network.way_seconds(A, B, 0.0) < 1.0
    assert network.corrupt(B, CHUNK) == CHUNK
