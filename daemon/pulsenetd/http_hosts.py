"""Names and addresses of this machine's HTTP ports: what a URL of one looks like, and who may ask in which name."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit


def find_family(host: str) -> socket.AddressFamily:
    """Return the address family to listen on a host in: an address with colons is one of IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def join_host(host: str, port: int) -> str:
    """Return host and port as URLs write them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback_host(text: str) -> bool:
    """Say whether the host of ``host`` or ``host:port`` is this machine by a name no other machine has."""
    host = _split_host(text)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_name(text: str) -> bool:
    """Say whether the host of ``host`` or ``host:port`` is a name, which may lead anywhere, and no address."""
    host = _split_host(text)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _split_host(text: str) -> str:
    try:
        return (urlsplit(f"//{text}").hostname if text.count(":") < 2 or "[" in text else text) or ""
    except ValueError:
        return ""


def takes_host(listening_on: str, header: str) -> bool:
    """Say whether a request for this ``Host`` may be served: on loopback only one that names no other machine.

    A page in a browser whose own name leads here asks in that name, and could read the answer as its own.
    """
    return not is_loopback_host(listening_on) or not header or is_loopback_host(header)
