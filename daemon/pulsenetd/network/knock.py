"""Knocking: a plain TCP connection that is closed again, to see whether anybody listens at an address.

libp2p remembers a failed dial and refuses the next one for up to five minutes, longer with each failure, and offers
no way to forget. A node that dials through an outage therefore stays alone for minutes after it. So libp2p is
asked only where somebody opened the door: a knock costs the back-off nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Final

from pulsenetd.network import addresses

CLOSED: Final = {
    "refused": "connection refused",
    "timed-out": "no answer",
    "unreachable": "no route to the host",
    "unresolved": "the name does not resolve",
}
"""Why nobody opened: reasons of a :class:`pulsenetd.network.dial.DialOutcome`, and words for people."""

_FAMILIES: Final = {
    "ip4": socket.AF_INET,
    "dns4": socket.AF_INET,
    "ip6": socket.AF_INET6,
    "dns6": socket.AF_INET6,
    "dns": socket.AF_UNSPEC,
}


async def knock(address: str, timeout_seconds: float, *, greeting: bytes = b"") -> str | None:
    """Return why nobody opens at a checked address, a key of :data:`CLOSED`; ``None`` if somebody does.

    Only TCP can be knocked at; of any other address nothing is known, and ``None`` leaves it to a dial.

    Args:
        address: Where to knock.
        timeout_seconds: Limit for all of it.
        greeting: What must be said there first, without being asked; anything else counts as ``refused``.
    """
    kind, port_kind = address.split("/")[1], address.split("/")[3]
    if port_kind != "tcp":
        return None
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(
                addresses.get_host(address), addresses.get_port(address), family=_FAMILIES[kind]
            )
            try:
                heard = await reader.readexactly(len(greeting))
            finally:
                writer.close()
    except TimeoutError:
        return "timed-out"
    except asyncio.IncompleteReadError:
        return "refused"
    except (socket.gaierror, UnicodeError):  # the latter: a name that DNS has no way to write
        return "unresolved"
    except OSError as error:
        return _explain(error)
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None if heard == greeting else "refused"


def _explain(error: OSError) -> str:
    # a name with several addresses fails with one error that lists them all in its text
    if error.errno == errno.ECONNREFUSED or "refused" in str(error):
        return "refused"
    if error.errno == errno.ETIMEDOUT:
        return "timed-out"
    return "unreachable"
