"""Where a user's process finds the daemon beside it: the data directory that the daemon chose by itself."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pulsenet.errors import ConfigError
from pulsenet.local.sockets import socket_path, use_address

RUN_NAME_DEFAULT: Final = "local"

PROBE_SECONDS_MAX: Final = 1.0
"""A Unix socket connects at once or not at all, unless its owner is stopped."""


def data_home(environment: Mapping[str, str]) -> Path:
    """Return the directory below which daemons keep their data: ``$XDG_DATA_HOME/pulsenet``."""
    base = environment.get("XDG_DATA_HOME") or os.path.join(environment.get("HOME", "/"), ".local", "share")
    return Path(base) / "pulsenet"


def list_nodes(home: Path, run: str | None, file_name: str) -> list[Path]:
    """Return the data directories that hold a file, of a run's nodes, or of all: also those that lie elsewhere.

    A node that was told another directory leaves a link to it beside the run's others.
    """
    found = sorted(path.parent for path in home.glob(f"{run or '*'}/*/{file_name}"))
    # One that went from run to run has left a link beside each.
    return list(dict.fromkeys(node.readlink() if node.is_symlink() else node for node in found))


def find_data_directory(
    role: str,
    *,
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Return the data directory of the running daemon to attach to.

    Looks at ``data_home/<run>/<role>``, ``<role>-2`` and so on, lowest number first, for one whose daemon listens;
    one that a crash left a socket of comes last.

    Args:
        role: ``trainer`` or ``inferencer``.
        run: Name of the run, as given to ``pulsenet join``.
        data_dir: Taken as it is if given, whatever ``run`` says.
        environment: Where ``XDG_DATA_HOME`` and ``HOME`` are looked up; by default this process's own.

    Raises:
        ConfigError: No daemon is there, the message says which command starts one; or the directory cannot be read.
    """
    home = data_home(os.environ if environment is None else environment) / run
    directory = home if data_dir is None else Path(data_dir)
    try:
        if data_dir is None:
            found = _find_numbered(directory, role)
        else:
            found = directory if socket_path(directory).exists() else None
    except OSError as error:
        raise ConfigError(f"cannot look for a {role} daemon in {directory}: {error.strerror}") from error
    if found is not None:
        return found
    if data_dir is not None:
        raise ConfigError(
            f"no daemon listens in {directory}: start it with 'pulsenet join --role {role} --data-dir {directory}'"
        )
    option = "" if run == RUN_NAME_DEFAULT else f" --run {run}"
    raise ConfigError(
        f"no {role} daemon of run '{run}' is running below {directory}: start it with "
        f"'pulsenet join --role {role}{option}' in another terminal"
    )


def _find_numbered(directory: Path, role: str) -> Path | None:
    numbered = re.compile(rf"{re.escape(role)}(?:-(\d+))?")
    candidates = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = numbered.fullmatch(path.name)
        if match and socket_path(path).exists():
            candidates.append((not _listens(socket_path(path)), int(match[1] or 1), path))
    return min(candidates)[2] if candidates else None


def _listens(path: Path) -> bool:
    """Tell whether anybody accepts connections at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(PROBE_SECONDS_MAX)
        try:
            use_address(path, probe.connect)
        except OSError:
            return False
    return True
