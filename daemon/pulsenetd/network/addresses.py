"""Multiaddresses as text: what operators type and what peers announce."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Final

from pulsenet import limits
from pulsenet.errors import RemoteProtocolError, UsageError
from pulsenet.ids import PeerId
from pulsenetd.identity import from_libp2p_text, to_libp2p_text

_HOST_PROTOCOLS: Final = ("ip4", "ip6", "dns", "dns4", "dns6")
_PORT_PROTOCOLS: Final = ("tcp", "udp")
_EXAMPLE: Final = "an address looks like /ip4/203.0.113.7/tcp/4001"


def join_address(address: str, peer_id: PeerId) -> str:
    """Return the address with ``/p2p/<peer>`` at its end, as tokens and bootstraps carry it."""
    return f"{address}/p2p/{to_libp2p_text(peer_id)}"


def split_address(text: str) -> tuple[str, PeerId]:
    """Return the dialable part and the peer of ``/ip4/.../tcp/.../p2p/<peer>``.

    Raises:
        UsageError: the text is no such address.
    """
    address, separator, peer_text = text.rpartition("/p2p/")
    if not separator:
        raise UsageError(f"{text!r} names no peer: append /p2p/<peer id>; {_EXAMPLE}/p2p/12D3Koo...")
    check_address(address)
    try:
        return address, from_libp2p_text(peer_text)
    except RemoteProtocolError as error:
        raise UsageError(f"{text!r}: {error.detail}") from error


def check_address(address: str) -> None:
    """Check that the text is an address a node can listen on or dial.

    Raises:
        UsageError: it is not.
    """
    if len(address.encode()) > limits.ADDRESS_SIZE_BYTES_MAX:
        raise UsageError(f"an address of {len(address)} characters is too long")
    parts = address.split("/")
    # a comma would end the address on p2pd's command line
    if len(parts) < 5 or parts[0] or not all(parts[1:]) or "," in address or not address.isascii():
        raise UsageError(f"{address!r} is not an address: {_EXAMPLE}")
    if parts[1] not in _HOST_PROTOCOLS or parts[3] not in _PORT_PROTOCOLS:
        raise UsageError(f"{address!r} is not an address: {_EXAMPLE}")
    if "p2p-circuit" in parts:
        raise UsageError(f"{address!r} leads through a relay, which is not supported: give an address peers can dial")
    if not parts[4].isdecimal() or int(parts[4]) > 65_535:
        raise UsageError(f"{address!r}: {parts[4]!r} is not a port")
    if parts[1] in ("ip4", "ip6"):
        try:
            host = ipaddress.ip_address(parts[2])
        except ValueError as error:
            raise UsageError(f"{address!r}: {parts[2]!r} is not an IP address") from error
        if host.version != int(parts[1][2]):
            raise UsageError(f"{address!r}: {parts[2]!r} is not an {parts[1]} address")


def check_announced(address: str) -> None:
    """Check an address that others shall dial (A-NET-4: port 0 cannot be dialled).

    Raises:
        UsageError: it cannot be dialled.
    """
    check_address(address)
    if get_port(address) == 0:
        raise UsageError(f"cannot announce {address}: nobody can dial port 0; give the port others reach")
    if is_unspecified(address):
        raise UsageError(f"cannot announce {address}: nobody can dial it; give the address others reach")


def make_tcp_address(host: str, port: int) -> str:
    """Return the address of a TCP port at an IP address."""
    return f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"


def get_port(address: str) -> int:
    """Return the TCP or UDP port of a checked address."""
    return int(address.split("/")[4])


def get_host(address: str) -> str:
    """Return the IP address or name of a checked address."""
    return address.split("/")[2]


def with_port(address: str, port: int) -> str:
    """Return a checked address with another port."""
    parts = address.split("/")
    parts[4] = str(port)
    return "/".join(parts)


def is_unspecified(address: str) -> bool:
    """Return whether a checked address means "every interface"."""
    return _is_ip(address) and ipaddress.ip_address(get_host(address)).is_unspecified


def is_loopback(address: str) -> bool:
    """Return whether a checked address can be dialled from this machine only."""
    return _is_ip(address) and ipaddress.ip_address(get_host(address)).is_loopback


def is_private(address: str) -> bool:
    """Return whether a checked address can be dialled only from nearby (private, loopback, link-local, shared)."""
    return _is_ip(address) and not ipaddress.ip_address(get_host(address)).is_global


def select_announced(addresses: Iterable[str], *, private_too: bool) -> tuple[str, ...]:
    """Return the addresses to tell other peers, public ones first, at most ``ADDRESSES_MAX``.

    Private addresses (containers, home networks) stay out of a public swarm unless asked for (A-NET-6).
    """
    kept: Sequence[str] = [address for address in dict.fromkeys(addresses) if private_too or not is_private(address)]
    return tuple(sorted(kept, key=is_private))[: limits.ADDRESSES_MAX]


def _is_ip(address: str) -> bool:
    return address.split("/")[1] in ("ip4", "ip6")
