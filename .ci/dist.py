#!/usr/bin/env python3
"""Checks a wheel and an sdist as for a release: ``.ci/dist.py DIRECTORY``.

The sdist must hold all that is checked in. twine and check-wheel-contents run in an environment of their own.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TOOLS: Final = ("twine>=6", "check-wheel-contents>=0.6")


def main() -> int:
    directory = Path(sys.argv[1])
    (wheel,), (sdist,) = directory.glob("*.whl"), directory.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = set(listed.splitlines()) - packed
    if missing:
        print("\n".join(["the sdist lacks:", *sorted(missing)]), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="dist-") as place:
        tools = Path(place) / "bin"
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([tools / "python", "-m", "pip", "install", "-qq", *TOOLS], check=True)
        subprocess.run([tools / "twine", "check", "--strict", wheel, sdist], check=True)
        subprocess.run([tools / "check-wheel-contents", wheel], cwd=ROOT, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
