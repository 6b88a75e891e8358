"""One real engine per model family, shared by all tests of the family; skipped where vLLM is not installed.

An engine takes half a minute to start: the second family, and the one on two ranks, are for the night.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests are no package: the harness beside them is found by its directory.
sys.path.insert(0, str(Path(__file__).parent))

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.vllm)
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here; .ci/vllm makes an environment"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama", 1), id="llama"),
        pytest.param(("qwen2", 1), id="qwen2", marks=pytest.mark.nightly),
        pytest.param(("llama", 2), id="llama-2-ranks", marks=pytest.mark.nightly),
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Lend an engine with the node's side attached and a publisher's model."""
    from vllm_swarm import open_served

    family, ranks = request.param
    with open_served(family, ranks, tmp_path_factory.mktemp(f"{family}-{ranks}")) as opened:
        yield opened
