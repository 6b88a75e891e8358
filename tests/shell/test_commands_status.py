"""``pulsenet status``: running nodes answer, dead ones are named, and nothing else is believed."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import UnavailableError
from pulsenetd import cli
from pulsenetd.admin import AdminServer
from pulsenetd.commands.status import read_status
from pulsenetd.node_file import NODE_FILE


class Machine:
    """Node directories whose nodes answer, are dead, or are something else."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home / "pulsenet"
        self._capsys = capsys
        self._open: list[Any] = []

    def write(self, node: str, url: Any) -> Path:
        directory = self.home / node
        directory.mkdir(parents=True)
        (directory / NODE_FILE).write_text(json.dumps({"metrics_url": url}))
        return directory

    def start(self, node: str, status: Any) -> Path:
        server = AdminServer("127.0.0.1", 0, metrics=bytes, live=dict, ready=dict, status=lambda: status)
        self._open.append(server)
        return self.write(node, server.url)

    def answer(self, node: str, data: bytes) -> Path:
        """Something else listens where the node did."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._open.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        return self.write(node, f"http://127.0.0.1:{listener.getsockname()[1]}")

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["status", *arguments])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Machine]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    made = Machine(tmp_path, capsys)
    yield made
    made.close()


STATUS = {
    "run": "mine",
    "role": "inferencer",
    "applied_version": 7,
    "version_lag": 0,
    "peers": 3,
    "state": "current",
}


def test_two_nodes_of_one_role_are_told_apart(machine: Machine) -> None:
    machine.start("mine/inferencer", STATUS)
    machine.start("mine/inferencer-2", STATUS)
    machine.start("mine/elsewhere", STATUS | {"role": "seed"})
    _, out, _ = machine.run()
    assert [line.split()[0] for line in out.splitlines()] == ["mine/seed", "mine/inferencer", "mine/inferencer-2"]


def test_a_node_with_a_directory_of_its_own_is_shown_with_the_others(machine: Machine, tmp_path: Path) -> None:
    machine.start("mine/inferencer", STATUS)
    own = machine.start("../own", STATUS | {"role": "seed"})
    gone = machine.home / "mine" / "gone@0"
    gone.symlink_to(tmp_path / "gone")
    (machine.home / "mine" / "own@0").symlink_to(tmp_path / "own")
    code, out, err = machine.run("--run", "mine", "--json")
    assert (code, err) == (0, "")
    assert [node["data_dir"] for node in json.loads(out)["nodes"]] == [
        str(machine.home / "mine" / "inferencer"),
        str(own.resolve()),
    ]


def test_without_any_node_the_next_step_is_named(machine: Machine) -> None:
    code, out, err = machine.run()
    assert (code, err) == (0, "")
    assert "no node is running; start one with 'pulsenet join --role trainer'\n" in out
    assert "'pulsenet status --data-dir DIR'" in out
    code, out, _ = machine.run("--json")
    assert (code, json.loads(out)) == (0, {"nodes": []})


def test_every_running_node_has_a_line(machine: Machine) -> None:
    machine.start("mine/inferencer", STATUS)
    machine.start("local/trainer", {"run": "local", "role": "trainer", "applied_version": None, "state": "starting"})
    code, out, err = machine.run()
    assert (code, err) == (0, "")
    trainer, inferencer = out.splitlines()
    assert trainer.split() == ["local/trainer", "version", "-", "lag", "?", "peers", "0", "starting"]
    assert inferencer.split() == ["mine/inferencer", "version", "0.7", "lag", "0", "peers", "3", "current"]
    assert trainer.index("version") == inferencer.index("version")
    code, out, _ = machine.run("--run", "mine", "--json")
    assert json.loads(out) == {"nodes": [{"data_dir": str(machine.home / "mine" / "inferencer"), **STATUS}]}


def test_one_node_is_asked_by_its_directory(machine: Machine) -> None:
    directory = machine.start("mine/inferencer", STATUS)
    code, out, err = machine.run("--data-dir", str(directory), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"data_dir": str(directory), **STATUS}


def test_a_directory_without_a_node_is_an_error(machine: Machine, tmp_path: Path) -> None:
    code, out, err = machine.run("--data-dir", str(tmp_path / "nowhere"))
    assert (code, out) == (1, "")
    assert "start it with 'pulsenet join --data-dir" in err


def test_a_node_that_was_killed_is_named_and_hides_no_other(machine: Machine) -> None:
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))  # refuses, because nobody listens on it
    dead = machine.write("mine/dead", f"http://127.0.0.1:{reserved.getsockname()[1]}")
    machine.start("mine/inferencer", STATUS)
    for arguments in ((), ("--json",)):
        code, out, err = machine.run(*arguments)
        assert code == 0
        assert "inferencer" in out
        assert f"the node in {dead} does not answer" in err
    code, _, err = machine.run("--data-dir", str(dead))
    reserved.close()
    assert code == 1
    assert err.endswith("(Connection refused); look at its log, or start it again\n")
    assert "Errno" not in err


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot JSON!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_another_program_on_the_nodes_old_port_is_not_believed(machine: Machine, data: bytes) -> None:
    directory = machine.answer("mine/inferencer", data)
    with pytest.raises(UnavailableError, match="does not answer"):
        read_status(directory)


@pytest.mark.parametrize("url", [None, 7, "file:///etc/passwd", "https://example.org"])
def test_a_node_file_that_names_no_local_address_is_refused(machine: Machine, url: Any) -> None:
    with pytest.raises(UnavailableError, match="names no http address"):
        read_status(machine.write("mine/inferencer", url))


@pytest.mark.parametrize("text", ["", "[]", "{}", "no JSON"])
def test_a_damaged_node_file_is_no_node(tmp_path: Path, text: str) -> None:
    (tmp_path / NODE_FILE).write_text(text)
    with pytest.raises(UnavailableError, match="no node runs"):
        read_status(tmp_path)


def test_a_proxy_of_the_environment_is_not_asked_for_a_node_of_this_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = machine.start("mine/inferencer", STATUS)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # keeps what the environment said at its first use
    assert read_status(directory) == STATUS


def test_the_round_is_shown_where_there_are_rounds(machine: Machine) -> None:
    status = {"run": "mine", "role": "trainer", "round_index": 7, "rounds_phase": "gathering", "round_contributors": 3}
    machine.start("mine/trainer", {**status, "rounds_reason": "no-source"})
    machine.start("mine/trainer-2", {"run": "mine", "role": "trainer"})
    code, out, err = machine.run()
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.endswith("round 7 gathering (no-source), 3 counted")
    assert "round" not in second


def test_a_line_says_so_where_readers_upload_too_little(machine: Machine) -> None:
    machine.start("mine/inferencer", {"run": "mine", "role": "inferencer", "fetch_shortfall": "thin-upload"})
    machine.start("mine/inferencer-2", {"run": "mine", "role": "inferencer", "fetch_shortfall": ""})
    machine.start("mine/inferencer-3", {"run": "mine", "role": "inferencer", "fetch_shortfall": "no-readers"})
    _, out, _ = machine.run()
    first, second, third = out.splitlines()
    assert first.endswith("readers upload too little, the publisher helps out")
    assert "publisher" not in second
    assert third.endswith("other readers cannot be reached, the publisher serves this node alone")


def test_how_far_apart_trainers_are_is_shown_where_they_mix(machine: Machine) -> None:
    mixing = {"run": "mine", "role": "trainer", "mixing_variant": "local_m1_m2", "consensus": False}
    far = {"disagreement": 0.1234, "disagreement_l2_end": 5.0, "disagreement_l2_bound": 4.25}
    machine.start("mine/a", mixing | far)
    machine.start("mine/b", mixing | {"consensus": True, "disagreement": None, "disagreement_l2_end": None})
    machine.start("mine/c", mixing | {"consensus": True, "disagreement_l2_end": 5.0, "disagreement_l2_bound": None})
    first, second, third = machine.run()[1].splitlines()
    assert first.endswith("no consensus, disagreement 0.123, weights 5 apart, bound 4.25")
    assert "apart" not in second
    assert "consensus" not in second
    assert third.endswith("  weights 5 apart")
