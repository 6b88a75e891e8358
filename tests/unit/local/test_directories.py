"""Finding the daemon beside a user's process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pulsenet.errors import ConfigError
from pulsenet.local.directories import data_home, find_data_directory
from pulsenet.local.sockets import socket_path, use_address


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def make_socket(directory: Path, stack: ExitStack, *, listens: bool = True) -> None:
    """Put a socket where a daemon of this directory listens, or where a killed one did."""
    path = socket_path(directory)
    path.parent.mkdir(parents=True)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    use_address(path, listener.bind)
    if listens:
        listener.listen(1)


def test_the_data_home_follows_the_environment() -> None:
    assert data_home({"XDG_DATA_HOME": "/data", "HOME": "/home/me"}) == Path("/data/pulsenet")
    assert data_home({"HOME": "/home/me"}) == Path("/home/me/.local/share/pulsenet")
    assert data_home({"XDG_DATA_HOME": "", "HOME": "/home/me"}) == Path("/home/me/.local/share/pulsenet")


def test_the_lowest_number_that_listens_is_found(tmp_path: Path, stack: ExitStack) -> None:
    run = tmp_path / "pulsenet" / "local"
    environment = {"XDG_DATA_HOME": str(tmp_path)}
    for name in ("trainer-10", "trainer-2", "trainer-old", "inferencer", "seed-1"):
        make_socket(run / name, stack)
    (run / "trainer").mkdir()
    assert find_data_directory("trainer", environment=environment) == run / "trainer-2"
    make_socket(run / "trainer" / "x", stack)
    assert find_data_directory("inferencer", environment=environment) == run / "inferencer"


def test_a_killed_daemons_socket_comes_last(tmp_path: Path, stack: ExitStack) -> None:
    run = tmp_path / "pulsenet" / "mine"
    environment = {"XDG_DATA_HOME": str(tmp_path)}
    make_socket(run / "trainer", stack, listens=False)
    assert find_data_directory("trainer", run="mine", environment=environment) == run / "trainer"
    make_socket(run / "trainer-2", stack)
    assert find_data_directory("trainer", run="mine", environment=environment) == run / "trainer-2"


@pytest.mark.parametrize(
    ("run", "command"),
    [("local", "'pulsenet join --role trainer'"), ("mine", "'pulsenet join --role trainer --run mine'")],
)
def test_without_a_daemon_the_error_names_the_command(run: str, command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trainer daemon") as caught:
        find_data_directory("trainer", run=run, environment={"XDG_DATA_HOME": str(tmp_path)})
    assert command in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_explicit_directory_wins(tmp_path: Path, stack: ExitStack) -> None:
    environment = {"XDG_DATA_HOME": str(tmp_path)}
    make_socket(tmp_path / "pulsenet" / "local" / "trainer", stack)
    with pytest.raises(ConfigError, match="--data-dir"):
        find_data_directory("trainer", data_dir=tmp_path / "own", environment=environment)
    make_socket(tmp_path / "own", stack)
    assert find_data_directory("trainer", data_dir=str(tmp_path / "own"), environment=environment) == tmp_path / "own"


@pytest.mark.parametrize("fields", [{"data_dir": "x" * 5000}, {"run": "x" * 300}])
def test_a_directory_that_cannot_be_read_is_said_in_our_words(fields: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pulsenet").mkdir()
    with pytest.raises(ConfigError, match=r"x{300}"):
        find_data_directory("trainer", environment={"XDG_DATA_HOME": str(tmp_path)}, **fields)  # type: ignore[arg-type]
