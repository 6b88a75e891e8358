"""The engine behind the OpenAI port, and the versions of its answers where it does not state them itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pulsenet.errors import PulsenetError
from pulsenet.ids import Version
from pulsenet.serving.vllm.exchange import parse_version
from pulsenet.serving.vllm.stamps import FIRST_HEADER, LAST_HEADER
from pulsenetd.engines.openai_answers import Stamp


@dataclass(frozen=True, slots=True)
class Upstream:
    """An engine that can be asked now."""

    url: str
    version: Version
    """What it held when the request came, or a little before: no token is of an older one."""
    read_label: Callable[[], str]
    """Returns the name of the weights now: no token that came is of a newer one."""


def read_stamp(get_header: Callable[[str], str | None]) -> Stamp | None:
    """Return what the engine says of an answer itself, by its headers; ``None`` if it says nothing."""
    first, last = get_header(FIRST_HEADER) or "", get_header(LAST_HEADER) or ""
    if parse_version(first) is None or parse_version(last) is None:
        return None
    return Stamp(first, last, is_exact=True)


def find_stamp(upstream: Upstream) -> Stamp | None:
    """Return the versions that enclose those of an answer that has just come; ``None`` if they are not known."""
    try:
        last = parse_version(upstream.read_label())
    except PulsenetError:
        return None
    if last is None or last < upstream.version:
        return None
    return Stamp(str(upstream.version), str(last), is_exact=last == upstream.version)
