"""What members of a run that mixes may say of its rounds: rosters, shares and answers to probes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pulsenet.chain.records import Probe, Roster, Share, ShareKind
from pulsenet.chain.trust import Trust
from pulsenet.errors import TrustError
from pulsenet.ids import compute_digest
from pulsenet.outer.mixing.pairing import count_slices

DIGEST = compute_digest(b"x")
NAMED = compute_digest(b"the roster")


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(TrustError) as caught:
        call()
    return caught.value.code


class Floor:
    """A run that trains with two listed keys and one open place; the publisher coordinates term 1."""

    def __init__(self, make_run: Callable[..., Any], **changes: Any) -> None:
        keys = tuple(sorted(key.peer_id for key in (make_run.trainer, make_run.inferencer)))  # type: ignore[attr-defined]
        self.run = make_run(**{"trainers": keys, "open_trainers_max": 1, "algorithm": "gossip", **changes})
        self.trust: Trust = self.run.trust()

    def roster(self, *keys: Any, **changes: Any) -> Roster:
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "revision": 0,
            "term": 1,
            "number": 1,
            "first_round": 4,
            "round_count": 2,
            "members": tuple(sorted(key.peer_id for key in keys or (self.run.trainer, self.run.inferencer))),
            "subset": (),
        }
        return Roster(**{**fields, **changes})

    def accept_roster(self, roster: Roster, *, signer: Any = None, coordinator: Any = None) -> Roster:
        signed = self.run.sign(roster, signer or self.run.publisher)
        key = (coordinator or self.run.publisher).peer_id
        return self.trust.accept_roster(signed, term=1, coordinator=key)

    def accept_share(self, roster: Roster | None = None, *, signer: Any = None, **changes: Any) -> Share:
        key = self.run.trainer
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "revision": 0,
            "peer_id": key.peer_id,
            "roster": NAMED,
            "round_index": 4,
            "job": 1,
            "kind": ShareKind.PART,
            "slice_index": 0,
            "slice_count": 1,
            "contributors": b"",
            "blob_id": DIGEST,
            "encoded_size_bytes": 9,
            "element_count": 10,
            "norm_bits": 0,
            "mixed_root": None,
        }
        share = Share(**{**fields, **changes})
        assert self.trust.accept_share(self.run.sign(share, signer or key), roster or self.roster(), NAMED) == share
        return share

    def accept_probe(self, roster: Roster | None = None, *, signer: Any = None, **changes: Any) -> Probe:
        key = self.run.trainer
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "revision": 0,
            "peer_id": key.peer_id,
            "roster": NAMED,
            "round_index": 4,
            "batch": DIGEST,
            "bins": DIGEST,
            "answer": b"answer",
            "scores": b"",
        }
        probe = Probe(**{**fields, **changes})
        assert self.trust.accept_probe(self.run.sign(probe, signer or key), roster or self.roster(), NAMED) == probe
        return probe


@pytest.fixture
def floor(run: Any) -> Floor:
    return Floor(type(run))


def test_only_the_coordinator_of_the_proved_term_signs_rosters(floor: Floor) -> None:
    run, roster = floor.run, floor.roster()
    assert floor.accept_roster(roster) == roster
    assert code_of(lambda: floor.accept_roster(roster, signer=run.second)) == "untrusted"
    assert code_of(lambda: floor.accept_roster(roster, signer=run.owner, coordinator=run.owner)) == "untrusted"
    assert code_of(lambda: floor.accept_roster(floor.roster(term=2))) == "term"
    assert code_of(lambda: floor.accept_roster(floor.roster(revision=1))) == "revision-unknown"


def test_a_roster_lists_no_more_strangers_than_the_run_lets_in(floor: Floor) -> None:
    run = floor.run
    floor.accept_roster(floor.roster(run.trainer, run.stranger))
    assert code_of(lambda: floor.accept_roster(floor.roster(run.stranger, run.owner))) == "untrusted"


@pytest.mark.parametrize("kind", ["accept_share", "accept_probe"])
def test_a_member_speaks_for_itself_about_a_round_of_the_roster(floor: Floor, kind: str) -> None:
    accept, run = getattr(floor, kind), floor.run
    accept()
    accept(round_index=5)
    assert code_of(lambda: accept(signer=run.inferencer)) == "untrusted"
    assert code_of(lambda: accept(signer=run.stranger, peer_id=run.stranger.peer_id)) == "untrusted"
    assert code_of(lambda: accept(revision=1)) == "revision-unknown"
    assert code_of(lambda: accept(round_index=3)) == "mismatch"
    assert code_of(lambda: accept(round_index=6)) == "mismatch"
    other = floor.roster(first_round=9)
    assert code_of(lambda: accept(other)) == "mismatch"


@pytest.mark.parametrize("kind", ["accept_share", "accept_probe"])
@pytest.mark.parametrize("places", [0, 1])
def test_a_strangers_word_counts_while_the_run_is_open(run: Any, kind: str, places: int) -> None:
    floor = Floor(type(run), open_trainers_max=places)
    stranger, accept = floor.run.stranger, getattr(floor, kind)
    roster = floor.roster(floor.run.trainer, stranger)
    accept(roster)
    said: dict[str, Any] = {"signer": stranger, "peer_id": stranger.peer_id}
    if places:
        accept(roster, **said)
    else:
        assert code_of(lambda: accept(roster, **said)) == "untrusted"


def test_another_rosters_name_fits_no_round(floor: Floor) -> None:
    share = floor.accept_share()
    signed = floor.run.sign(share, floor.run.trainer)
    assert code_of(lambda: floor.trust.accept_share(signed, floor.roster(), DIGEST)) == "mismatch"


def test_a_share_is_whole_or_in_the_slices_of_so_many_members(floor: Floor) -> None:
    run = floor.run
    floor.accept_share(slice_count=8, slice_index=1)
    assert code_of(lambda: floor.accept_share(slice_count=2)) == "mismatch"
    three = floor.roster(run.trainer, run.inferencer, run.stranger)
    floor.accept_share(three, slice_count=12)
    assert code_of(lambda: floor.accept_share(three, slice_count=8)) == "mismatch"


@pytest.mark.parametrize(
    ("contributors", "fits"),
    [
        (b"\x80", True),
        (b"\xc0", True),
        (b"\x00", False),
        (b"\x20", False),
        (b"\xe0", False),
        (b"\x01", False),
        (b"\x80\x00", False),
        (b"\x00\x80", False),
    ],
)
def test_a_mean_names_members_of_its_roster(floor: Floor, contributors: bytes, fits: bool) -> None:
    mean: dict[str, Any] = {"kind": ShareKind.MEAN, "slice_count": 8, "contributors": contributors}
    if fits:
        floor.accept_share(**mean)
    else:
        assert code_of(lambda: floor.accept_share(**mean)) == "mismatch"


@pytest.mark.parametrize(
    ("count", "contributors", "fits"),
    [
        (8, b"\x01", True),
        (8, b"\x01\x00", False),
        (9, b"\x00\x80", True),
        (9, b"\x00\x40", False),
        (9, b"\x01", False),
    ],
)
def test_eight_members_fill_a_byte_and_a_ninth_begins_another(
    floor: Floor, count: int, contributors: bytes, fits: bool
) -> None:
    others = [bytes([number]) * 32 for number in range(1, count)]
    roster = floor.roster(members=tuple(sorted((floor.run.trainer.peer_id, *others))))
    mean: dict[str, Any] = {"kind": ShareKind.MEAN, "slice_count": count_slices(count), "contributors": contributors}
    if fits:
        floor.accept_share(roster, **mean)
    else:
        assert code_of(lambda: floor.accept_share(roster, **mean)) == "mismatch"


def test_an_answer_scores_all_tensors_of_the_subset_or_none(floor: Floor) -> None:
    subset = floor.roster(subset=(0, 3, 5))
    floor.accept_probe(subset)
    floor.accept_probe(subset, scores=bytes(12))
    assert code_of(lambda: floor.accept_probe(subset, scores=bytes(8))) == "mismatch"
    assert code_of(lambda: floor.accept_probe(subset, scores=bytes(16))) == "mismatch"
    floor.accept_probe(scores=bytes(8))
