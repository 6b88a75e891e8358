#!/usr/bin/env python3
"""Builds the API reference from the docstrings: ``.ci/api.py DIRECTORY``. Any warning of pdoc's is an error."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Final

import pdoc

MODULES: Final = (
    "pulsenet",
    "pulsenet.training",
    "pulsenet.training.trl",
    "pulsenet.serving",
    "pulsenet.errors",
    "pulsenet.ids",
)
"""What is meant for others; everything else is the inside of a node."""


def main() -> int:
    warnings.simplefilter("error")
    for name in MODULES:
        module = import_module(name)
        for public in getattr(module, "__all__", ()):
            # pdoc looks no further than the names that a module has already.
            setattr(module, public, getattr(module, public))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
