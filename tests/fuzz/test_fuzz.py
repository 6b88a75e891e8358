"""Hostile bytes: a decoder refuses them as it promises, in bounded memory, and takes nothing unverified."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgpack
import pytest

# Tests are no package: helpers of several files are found by their directory.
sys.path.insert(0, str(Path(__file__).parent))

import campaign
from mutate import mutate
from targets import Target, require
from wire_targets import RECORD_TYPES

from pulsenet.chain import records
from pulsenet.local import protocol
from pulsenet.wire.messages import MESSAGE_TYPES

QUICK_COUNT = 20_000
NIGHTLY_COUNT = 1_000_000


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    return campaign.make_targets()


def _describe(outcome: campaign.Outcome) -> str:
    lines = [f"{failure.target}: {failure.error}\n  {failure.data[:4000].hex()}" for failure in outcome.failures[:10]]
    return "\n".join([f"{len(outcome.failures)} of {outcome.tried}", *lines])


def test_every_message_and_record_of_the_registries_is_mutated(targets: list[Target]) -> None:
    names = {target.name for target in targets}
    assert len(names) == len(targets)
    assert {f"message-{number:02}-{cls.__name__}" for number, cls in MESSAGE_TYPES.items()} <= names
    assert {f"local-{number:02}-{cls.__name__}" for number, cls in protocol.MESSAGE_TYPES.items()} <= names
    signed = {cls for cls in vars(records).values() if isinstance(cls, type) and hasattr(cls, "TYPE")}
    assert signed == set(RECORD_TYPES)
    for cls in RECORD_TYPES:
        assert {f"record-{cls.__name__}", f"rules-{cls.__name__}"} <= names


def test_what_is_mutated_is_well_formed_before(targets: list[Target]) -> None:
    codes = campaign.read_spec_codes()
    for target in targets:
        outcomes = [campaign.try_one(target, data, codes) for data in target.seeds]
        assert not [error for _, error in outcomes if error], target.name
        # Beliefs refuse some well-formed records, and rules what only the schema of a new record allows.
        assert any(accepted for accepted, _ in outcomes) or target.name.startswith("rules-"), target.name


def test_a_quick_campaign_breaks_nothing(targets: list[Target]) -> None:
    outcome = campaign.run(targets, QUICK_COUNT, seed=0)
    assert outcome.tried == QUICK_COUNT
    assert not outcome.failures, _describe(outcome)
    assert outcome.is_bounded, (outcome.growth, outcome.kept_size_bytes)
    # Mutations that never got past a header would prove little.
    assert outcome.accepted.total() > QUICK_COUNT // 20


@pytest.mark.nightly
def test_a_million_mutated_inputs_break_nothing(targets: list[Target]) -> None:
    outcome = campaign.run(targets, NIGHTLY_COUNT, seed=random.SystemRandom().randrange(2**32))
    assert outcome.tried == NIGHTLY_COUNT
    assert not outcome.failures, _describe(outcome)
    assert outcome.is_bounded, (outcome.growth, outcome.kept_size_bytes)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in sorted(campaign.CORPUS.glob("*/*.hex"))],
)
def test_what_once_broke_a_decoder_is_refused(targets: list[Target], path: Path) -> None:
    """Files of the corpus: a comment on what happened, then the bytes in hexadecimal."""
    (target,) = [target for target in targets if target.name == path.parent.name]
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    accepted, error = campaign.try_one(target, bytes.fromhex("".join(lines)), campaign.read_spec_codes())
    assert not error
    assert not accepted


def test_a_decoder_that_lies_is_found() -> None:
    """The harness itself: a wrong error, an unknown code and an acceptance that must not be are failures."""

    def wrong_error(data: bytes) -> None:
        raise KeyError("no such thing")

    def unknown_code(data: bytes) -> None:
        raise campaign.RemoteProtocolError("made-up")

    def too_trusting(data: bytes) -> None:
        require(data == b"signed", "anything goes")

    promised = (campaign.RemoteProtocolError,)
    for decode in (wrong_error, unknown_code, too_trusting):
        target = Target("lies", decode, promised, (b"signed",), has_spec_codes=True)
        assert campaign.run([target], 20, seed=1).failures


def test_mutations_are_drawn_from_the_seed_alone_and_reach_into_values() -> None:
    seeds = [msgpack.packb({"a": [1, b"x" * 40], "b": "text"})]

    def draw(seed: int) -> list[bytes]:
        source = random.Random(seed)
        return [mutate(source, seeds, is_structured=True) for _ in range(300)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    whole = 0
    for data in draw(3):
        try:
            value = msgpack.unpackb(data)
        except ValueError:
            continue
        whole += isinstance(value, dict) and value != {"a": [1, b"x" * 40], "b": "text"}
    assert whole > 60
