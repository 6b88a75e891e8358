"""Health endpoints say what is true and bind where told (A-OBS-4, A-OBS-5)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from pulsenetd.admin import AdminServer
from pulsenetd.errors import AddressInUseError
from pulsenetd.read_only_http import Request

READY = {"version": False}


@pytest.fixture
def server() -> Iterator[AdminServer]:
    READY["version"] = False
    server = AdminServer(
        "127.0.0.1",
        0,
        metrics=lambda: b"pulsenet_x 1\n",
        live=lambda: {"loop": True},
        ready=lambda: READY,
        status=lambda: {"version": 7},
        history=lambda: {"times_ms": [1]},
        log=lambda level, text: {"asked": [level, text]},
    )
    yield server
    server.close()


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_ready_follows_its_checks_while_live_stays(server: AdminServer) -> None:
    """A-OBS-4"""
    assert fetch(server.url + "/livez") == (200, "ok\n")
    assert fetch(server.url + "/readyz") == (503, "[-] version\n")
    READY["version"] = True
    assert fetch(server.url + "/readyz") == (200, "ok\n")
    assert fetch(server.url + "/readyz?verbose") == (200, "[+] version\n")
    READY["version"] = False
    assert fetch(server.url + "/readyz")[0] == 503


def test_metrics_and_status_are_served_and_other_paths_are_named(server: AdminServer) -> None:
    assert fetch(server.url + "/metrics") == (200, "pulsenet_x 1\n")
    assert json.loads(fetch(server.url + "/status")[1]) == {"version": 7}
    answer = json.loads(fetch(server.url + "/status?history&log&level=error&text=a%20b")[1])
    assert answer == {"version": 7, "history": {"times_ms": [1]}, "log": {"asked": ["error", "a b"]}}
    status, text = fetch(server.url + "/shutdown")
    assert status == 404
    assert "/readyz" in text


@pytest.mark.parametrize("path", ["/metrics", "/status", "/readyz", "/", "/status.js"])
def test_a_page_whose_name_leads_here_gets_nothing(path: str, server: AdminServer) -> None:
    """DNS rebinding: for the browser the request goes to the page's own origin."""
    request = urllib.request.Request(server.url + path, headers={"Host": "page.example"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=5)
    with caught.value:
        assert caught.value.code == 403
        assert b"localhost" in caught.value.read()


def test_ipv6_is_listened_on_too() -> None:
    try:
        server = AdminServer("::1", 0, metrics=bytes, live=lambda: {"loop": True}, ready=dict, status=dict)
    except AddressInUseError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    try:
        assert server.url.startswith("http://[::1]:")
        assert fetch(server.url + "/livez") == (200, "ok\n")
    finally:
        server.close()


def test_only_reading_is_possible(server: AdminServer) -> None:
    """A-OBS-5"""
    request = urllib.request.Request(server.url + "/status", data=b"stop", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=5)
    with caught.value:
        assert caught.value.code == 405


def test_other_machines_are_shown_no_log(server: AdminServer) -> None:
    """A-OBS-5"""
    far = server._answer_status(Request({"log": ""}, is_local=False))
    assert json.loads(far[2]) == {"version": 7, "log": None}


def test_a_server_without_history_has_no_page() -> None:
    server = AdminServer("127.0.0.1", 0, metrics=bytes, live=dict, ready=dict, status=dict)
    try:
        assert fetch(server.url + "/")[0] == 404
        assert json.loads(fetch(server.url + "/status?history")[1]) == {}
    finally:
        server.close()


def test_taken_port_is_named(server: AdminServer) -> None:
    """A-OBS-5, A-NET-2"""
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(AddressInUseError, match=str(port)):
        AdminServer("127.0.0.1", port, metrics=bytes, live=dict, ready=dict, status=dict)


def test_impossible_address_is_one_clear_error() -> None:
    with pytest.raises(AddressInUseError, match="cannot listen"):
        AdminServer("203.0.113.1", 0, metrics=bytes, live=dict, ready=dict, status=dict)
