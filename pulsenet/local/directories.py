"""Where a user's process finds the daemon beside it: the data directory that the daemon chose by itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pulsenet.errors import ConfigError
from pulsenet.local.sockets import socket_path

RUN_NAME_DEFAULT: Final = "local"


def data_home(environment: Mapping[str, str]) -> Path:
    """Return the directory below which daemons keep their data: ``$XDG_DATA_HOME/pulsenet``."""
    base = environment.get("XDG_DATA_HOME") or os.path.join(environment.get("HOME", "/"), ".local", "share")
    return Path(base) / "pulsenet"


def find_data_directory(
    role: str,
    *,
    run: str = RUN_NAME_DEFAULT,
    data_dir: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Return the data directory of the running daemon to attach to.

    Looks at ``data_home/<run>/<role>``, ``<role>-2`` and so on, lowest number first, for one with a socket.

    Args:
        role: ``trainer`` or ``inferencer``.
        run: Name of the run, as given to ``pulsenet join``.
        data_dir: Taken as it is if given, whatever ``run`` says.
        environment: Where ``XDG_DATA_HOME`` and ``HOME`` are looked up; by default this process's own.

    Raises:
        ConfigError: No daemon is there; the message says which command starts one.
    """
    if data_dir is not None:
        found = Path(data_dir)
        if not socket_path(found).exists():
            raise ConfigError(
                f"no daemon listens in {found}: start it with 'pulsenet join --role {role} --data-dir {found}'"
            )
        return found
    directory = data_home(os.environ if environment is None else environment) / run
    numbered = re.compile(rf"{re.escape(role)}(?:-(\d+))?")
    candidates = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = numbered.fullmatch(path.name)
        if match and socket_path(path).exists():
            candidates.append((int(match[1] or 1), path))
    if not candidates:
        option = "" if run == RUN_NAME_DEFAULT else f" --run {run}"
        raise ConfigError(
            f"no {role} daemon of run '{run}' is running below {directory}: start it with "
            f"'pulsenet join --role {role}{option}' in another terminal"
        )
    return min(candidates)[1]
