"""What the doctor says about port, bootstraps and running nodes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import UnavailableError
from pulsenet.ids import PeerId
from pulsenetd.doctor.findings import Grade, Subject, warn
from pulsenetd.doctor.network import look_at_bootstraps, look_at_nodes, look_at_port
from pulsenetd.network.addresses import join_address
from pulsenetd.network.dial_back import GREETING

PEER = PeerId(bytes(32))
HERE = Path("/nowhere")


@contextlib.contextmanager
def greeter(words: bytes) -> Iterator[str]:
    """Lend the address of something that says this to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(words)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield join_address(f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}", PEER)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_each_bootstrap_has_its_own_line_and_reason() -> None:
    """A-NET-1."""
    refused = join_address("/ip4/127.0.0.1/tcp/1", PEER)
    quic = join_address("/ip4/127.0.0.1/udp/1/quic-v1", PEER)
    with greeter(GREETING) as alive, greeter(b"220 mail ready for everybody\r\n") as other:
        findings = look_at_bootstraps(Subject(HERE, bootstraps=(alive, refused, other, quic, "nonsense")))
    assert [finding.grade for finding in findings] == [Grade.OK] + 4 * [Grade.WARN]
    assert findings[0].text == f"{alive}: a libp2p node answers"
    assert findings[1].text == f"{refused}: connection refused"
    assert findings[2].text == f"{other}: something answers that is no libp2p node"
    assert "only TCP" in findings[3].text
    assert "names no peer" in findings[4].text


def test_no_bootstrap_that_answers_is_a_failure_and_none_at_all_is_not() -> None:
    (finding,) = look_at_bootstraps(Subject(HERE, bootstraps=(join_address("/ip4/127.0.0.1/tcp/1", PEER),)))
    assert finding.grade is Grade.FAIL
    assert finding.next_step
    assert look_at_bootstraps(Subject(HERE))[0].grade is Grade.OK


def test_a_port_that_is_free_taken_or_not_of_this_machine(tmp_path: Path) -> None:
    """A-NET-2."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}"
        (finding,) = look_at_port(Subject(HERE, listen=address))
        assert (finding.grade, finding.text) == (Grade.FAIL, f"{port} is in use by another program")
        (tmp_path / "node.json").touch()
        assert look_at_port(Subject(HERE, nodes=(tmp_path,), listen=address))[0].grade is Grade.WARN
        assert look_at_port(Subject(HERE, nodes=(tmp_path,)))[0].grade is Grade.OK  # its own port is its own matter
    assert look_at_port(Subject(HERE, listen=address))[0].grade is Grade.OK
    assert look_at_port(Subject(HERE, listen="/ip4/192.0.2.1/tcp/4001"))[0].grade is Grade.FAIL
    assert look_at_port(Subject(HERE, listen="/ip4/0.0.0.0/tcp/0"))[0].grade is Grade.OK
    assert "--listen" in look_at_port(Subject(HERE))[0].next_step


def told(tmp_path: Path, status: dict[str, Any]) -> list[tuple[Grade, str, str]]:
    (tmp_path / "node.json").touch()
    findings = look_at_nodes(Subject(HERE, nodes=(tmp_path,)), lambda _: {"run": "r", **status})
    return [(finding.grade, finding.text, finding.next_step) for finding in findings]


def test_what_a_running_node_learned_from_its_peers_is_passed_on(tmp_path: Path) -> None:
    """A-DHT-2."""
    name = f"r/{tmp_path.name}"
    good = {"reachable": True, "advice": "peers can dial this node at 8.8.8.8 port 1"}
    assert told(tmp_path, {"peers": 3, "reachability": good, "clock_offset_seconds": 0.2}) == [
        (Grade.OK, f"{name}: 3 peers", ""),
        (Grade.OK, f"{name}: peers can dial this node at 8.8.8.8 port 1", ""),
    ]
    bad = {"reachable": False, "advice": "peers cannot dial it. To be found, join with --announce X"}
    unknown = {"reachable": None, "advice": "no peer could tell"}
    assert told(tmp_path, {"peers": 0, "reachability": bad, "clock_offset_seconds": -600.0}) == [
        (Grade.WARN, f"{name}: no peers", "is another node of the run up? Look at 'bootstraps' above"),
        (Grade.WARN, f"{name}: peers cannot dial it", "To be found, join with --announce X"),
        (Grade.WARN, f"{name}: the clock is 600.0 s behind its peers", "run 'timedatectl set-ntp true'"),
    ]
    assert len(told(tmp_path, {"peers": 1, "reachability": unknown})) == 1


def test_a_node_that_does_not_answer_and_none_at_all_are_said(tmp_path: Path) -> None:
    def ask(_node: Path) -> dict[str, Any]:
        raise UnavailableError("the node does not answer; start it again")

    assert "none is running" in look_at_nodes(Subject(HERE, nodes=(tmp_path,)), ask)[0].text
    (tmp_path / "node.json").touch()
    (finding,) = look_at_nodes(Subject(HERE, nodes=(tmp_path,)), ask)
    assert finding == warn("the node does not answer", "start it again")


def test_the_step_of_an_error_is_what_follows_the_last_mark(tmp_path: Path) -> None:
    def ask(_node: Path) -> dict[str, Any]:
        raise UnavailableError("the node in /data/a; b does not answer (too old; rejected); look at its log")

    (tmp_path / "node.json").touch()
    (finding,) = look_at_nodes(Subject(HERE, nodes=(tmp_path,)), ask)
    assert finding == warn("the node in /data/a; b does not answer (too old; rejected)", "look at its log")


@pytest.mark.parametrize("status", [{}, {"reachability": "odd", "clock_offset_seconds": None}])
def test_an_older_nodes_status_is_enough(tmp_path: Path, status: dict[str, Any]) -> None:
    assert len(told(tmp_path, {"peers": 2, **status})) == 1
