"""Hosts that are this machine are known, and IPv6 is written as URLs want it."""

from __future__ import annotations

import socket

import pytest

from pulsenetd.http_hosts import find_family, is_loopback_host, is_name, join_host, takes_host


@pytest.mark.parametrize(
    "text", ["localhost", "localhost:80", "127.0.0.1:8001", "127.8.8.8", "[::1]", "[::1]:80", "::1"]
)
def test_this_machine_is_known(text: str) -> None:
    assert is_loopback_host(text)


@pytest.mark.parametrize(
    "text",
    ["", "page.example", "localhost.page.example:80", "10.0.0.1", "[::1", "127.0.0.1.page.example", "a@b"],
)
def test_other_hosts_are_not(text: str) -> None:
    assert not is_loopback_host(text)


def test_addresses_of_both_families_are_listened_on_and_written() -> None:
    assert (find_family("127.0.0.1"), find_family("localhost")) == (socket.AF_INET, socket.AF_INET)
    assert (find_family("::1"), find_family("::")) == (socket.AF_INET6, socket.AF_INET6)
    assert (join_host("::1", 80), join_host("10.0.0.1", 80)) == ("[::1]:80", "10.0.0.1:80")


@pytest.mark.parametrize(
    ("listening_on", "header", "is_taken"),
    [
        ("127.0.0.1", "page.example:9090", False),
        ("::1", "page.example", False),
        ("127.0.0.1", "localhost:9090", True),
        ("::1", "[::1]:9090", True),
        ("127.0.0.1", "", True),
        ("0.0.0.0", "node-7.cluster:9090", True),  # noqa: S104
    ],
)
def test_on_loopback_other_names_are_not_served(listening_on: str, header: str, is_taken: bool) -> None:
    assert takes_host(listening_on, header) is is_taken


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("page.example:80", True),
        ("node-7", True),
        ("localhost:80", False),
        ("0.0.0.0:9471", False),
        ("[2001:db8::1]:80", False),
        ("10.0.0.1", False),
    ],
)
def test_names_that_may_lead_anywhere_are_told_from_addresses(text: str, is_one: bool) -> None:
    assert is_name(text) is is_one
