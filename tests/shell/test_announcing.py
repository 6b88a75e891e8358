"""What a node says when it starts: enough for others to join, and nothing that only members may know."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsenet.chain.records import JoinToken
from pulsenet.chain.token import decode_token
from pulsenet.ids import RunId
from pulsenetd.announcing import announce_start
from pulsenetd.config import resolve
from pulsenetd.identity import load_or_create, to_libp2p_text
from pulsenetd.node_file import NODE_FILE
from pulsenetd.startup import Settled
from pulsenetd.storage.disk import DirectoryLock

RUN = RunId(bytes(range(32)))


@pytest.fixture
def settled(tmp_path: Path) -> Any:
    lock = DirectoryLock.acquire(tmp_path)

    def settle(secret: bytes = b"", *, is_local: bool = False) -> Settled:
        identity = load_or_create(tmp_path / "identity.key")
        token = JoinToken(RUN, 0, (), secret, None)
        return Settled("theirs", tmp_path, token, tmp_path, lock, identity, is_local)

    yield settle
    lock.release()


def announce(settled: Settled, role: str = "seed", *, may_publish: bool = True, algorithm: str = "") -> str:
    said: list[str] = []
    announce_start(
        resolve({"role": role}, {}, None).config,
        settled,
        announced=("/ip4/203.0.113.5/tcp/4001",),
        listening=("/ip4/127.0.0.1/tcp/4001",),
        metrics_url="http://127.0.0.1:9",
        algorithm=algorithm,
        may_publish=may_publish,
        say=said.append,
    )
    return "\n".join(said)


def test_the_token_of_a_public_run_is_said_with_an_address_of_this_node(settled: Any) -> None:
    node = settled()
    (word,) = [word for word in announce(node).split() if word.startswith("pulse1")]
    peer = to_libp2p_text(node.identity.peer_id)
    assert decode_token(word).bootstraps == (f"/ip4/203.0.113.5/tcp/4001/p2p/{peer}",)


def test_the_secret_of_a_private_run_is_not_said_for_what_is_said_is_logged(settled: Any, tmp_path: Path) -> None:
    text = announce(settled(b"0123456789abcdef"))
    assert "pulse1" not in text
    assert "pulsenet run show theirs" in text
    written = json.loads((tmp_path / NODE_FILE).read_text())
    assert set(written) == {"pid", "peer_id", "metrics_url", "role"}


@pytest.mark.parametrize("secret", [b"", b"0123456789abcdef"], ids=["public", "private"])
def test_a_token_that_ended_is_not_said_for_nobody_joins_by_it(settled: Any, secret: bytes) -> None:
    node = settled(secret)
    token = replace(node.token, expires_at_ms=1_000)
    text = announce(replace(node, token=token, has_token_ended=True))
    assert "pulse1" not in text
    assert "join token   ended 1970-01-01 00:00 UTC: 'pulsenet run token theirs' makes another" in text.splitlines()


def test_the_run_of_this_machine_needs_no_token(settled: Any) -> None:
    assert "join token" not in announce(settled(b"x" * 16, is_local=True))


def test_the_page_and_the_metrics_are_named(settled: Any) -> None:
    text = announce(settled())
    assert "status page  http://127.0.0.1:9/\n" in text
    assert "metrics      http://127.0.0.1:9/metrics\n" in text


def test_weights_that_are_there_are_not_promised_for_later(settled: Any, tmp_path: Path) -> None:
    node = settled()
    current = tmp_path / "weights" / "current"
    assert f"weights      {current}, once a version is here\n" in announce(node, "inferencer") + "\n"
    current.mkdir(parents=True)
    assert f"weights      {current}\n" in announce(node, "inferencer") + "\n"


def test_a_trainer_whose_key_may_not_publish_is_told_so_at_once(settled: Any) -> None:
    """Its training loop runs on whatever publish() answers, and nobody may look."""
    node = settled()
    step = f"let its owner run 'pulsenet run promote NAME {to_libp2p_text(node.identity.peer_id)}'"
    told = f"publishing   nothing: the run does not list this key; {step}"
    assert told in announce(node, "trainer", may_publish=False).splitlines()
    assert "publishing" not in announce(node, "trainer")
    assert "publishing" not in announce(node, "seed", may_publish=False)
    assert "publishing" not in announce(node, "trainer", may_publish=False, algorithm="pulseloco")
