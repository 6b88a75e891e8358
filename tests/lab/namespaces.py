"""A star of network namespaces on this machine: what nodes of a swarm see of the internet, with every fault at hand.

    node i: namespace NAME-i, eth0 = 10.91.0.(i+1)/24 ---- cable i ---- bridge in namespace NAME-hub

Rates are the kernel's token buckets, so a busy processor does not change them; delay and loss come from
:mod:`cable`. Nothing leaves the namespaces, and closing the lab removes them with every process inside.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cable import enter

SUBNET: Final = "10.91.0"
MOVE_STEP: Final = 50
"""How far a moving node's new address is from its old one."""
QUEUE_MS: Final = 100
"""What a link's queue holds at its rate before it drops."""
CLOSE_SECONDS: Final = 5.0
CABLE: Final = Path(__file__).with_name("cable.py")


@dataclass(frozen=True, slots=True)
class Link:
    """A node's way into the network. Loss is a share of the packets."""

    up_mbps: float = 0.0
    """From the node; 0 is unlimited."""
    down_mbps: float = 0.0
    """To the node; 0 is unlimited."""
    delay_ms: float = 0.0
    """One way, in both directions: a node's round trip to one without delay is twice this."""
    loss_up: float = 0.0
    loss_down: float = 0.0
    congestion: str = ""
    """TCP congestion control of what the node sends; empty is the kernel's default."""
    unsent_size_bytes: int = 0
    """What a connection of the node takes at most before it is sent (``tcp_notsent_lowat``); 0 is the kernel's default.

    Whatever is said on a connection waits behind that. Where payloads are made small so that they fit slow links, a
    kernel's megabytes would be a payload of their own. A smaller send buffer would bound it too, and with it what may
    be on its way: four nodes that all send to all then reach 0.89 of their links, for 0.95.
    """


class LabUnavailableError(Exception):
    """This machine cannot run the lab; the text says why."""


def why_not() -> str:
    """Return why no lab can run here, or the empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc", "ss") if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]} is not installed (iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    name = f"pulse{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("tc", "-n", name, *_shape("lo", 10.0))
        finally:
            _run("ip", "netns", "del", name)
    except LabUnavailableError as error:
        return str(error)
    return ""


def list_congestion_controls() -> list[str]:
    """Return the names this kernel has."""
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


class Lab:
    """Namespaces, links and processes. Use as a context."""

    def __init__(self, links: Sequence[Link], name: str = "") -> None:
        self._name = f"pulse{os.getpid()}{name}"
        self._hub = f"{self._name}-hub"
        self._links = list(links)
        self._hosts = [index + 1 for index in range(len(links))]
        self._cables: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Lab:
        try:
            _run("ip", "netns", "add", self._hub)
            _run("ip", "-n", self._hub, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", "br0", "up")
            for index in range(len(self._links)):
                self._add(index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def namespace(self, index: int) -> str:
        """Return the name of a node's namespace."""
        return f"{self._name}-{index}"

    def address(self, index: int) -> str:
        """Return a node's present IP address."""
        return f"{SUBNET}.{self._hosts[index]}"

    # Links

    def link(self, index: int) -> Link:
        """Return a node's link as it is now."""
        return self._links[index]

    def change(self, index: int, **changes: float | str) -> None:
        """Change a link while it runs. Congestion control holds for connections made from now on.

        A link made without delay and loss has none for good: it is no cable but a plain pair of devices.
        """
        link = self._links[index] = dataclasses.replace(self._links[index], **changes)  # type: ignore[arg-type]
        for where, device, mbps in (
            (self.namespace(index), "eth0", link.up_mbps),
            (self._hub, f"port{index}", link.down_mbps),
        ):
            if mbps:
                _run("tc", "-n", where, *_shape(device, mbps))
            else:
                _run("tc", "-n", where, "qdisc", "del", "dev", device, "root", check=False)
        if link.unsent_size_bytes:
            _run(*self.command(index, "sysctl", "-qw", f"net.ipv4.tcp_notsent_lowat={link.unsent_size_bytes}"))
        if index in self._cables:
            self._order(index, link)
        else:
            assert (link.delay_ms, link.loss_up, link.loss_down) == (0, 0, 0)
        self._route(index)

    def cut(self, index: int) -> None:
        """Pull the cable out."""
        _run("ip", "-n", self._hub, "link", "set", f"port{index}", "down")

    def mend(self, index: int) -> None:
        """Put the cable back."""
        _run("ip", "-n", self._hub, "link", "set", f"port{index}", "up")

    def cut_for(self, index: int, seconds: float) -> None:
        """Pull the cable out for so long."""
        self.cut(index)
        time.sleep(seconds)
        self.mend(index)

    def move(self, index: int) -> None:
        """Give a node another address, as a provider's router does at night."""
        device = ("dev", "eth0")
        # The old one first: with it would go every later address of its network.
        _run("ip", "-n", self.namespace(index), "addr", "del", f"{self.address(index)}/24", *device)
        self._hosts[index] += MOVE_STEP
        _run("ip", "-n", self.namespace(index), "addr", "add", f"{self.address(index)}/24", *device)
        self._route(index)

    def break_connections(self, index: int) -> None:
        """End every TCP connection between a node and others; both ends notice at once."""
        for at, dst in ((index, SUBNET + ".0/24"), *((other, self.address(index)) for other in self._others(index))):
            # Its status is of no use: sockets of other families make it complain.
            _run(*self.command(at, "ss", "-K", "-t", "dst", dst), check=False)

    def count_connections(self, index: int) -> int:
        """Return how many TCP connections a node has with others."""
        filters = ("state", "established", "dst", SUBNET + ".0/24")
        return len(_run(*self.command(index, "ss", "-H", "-t", "-n", *filters)).splitlines())

    def count_tcp_payload(self, index: int) -> dict[str, int]:
        """Return what the open TCP connections of a node with others carried each way, each byte once.

        A byte that was lost and sent again counts once, as the kernel handed it over or saw it acknowledged; headers do
        not count, and what connections carried that are closed by now does not either.
        """
        filters = ("state", "established", "dst", SUBNET + ".0/24")
        told = _run(*self.command(index, "ss", "-H", "-t", "-i", "-n", *filters))
        counted = {"received": "bytes_received", "sent": "bytes_acked"}
        return {way: sum(map(int, re.findall(rf"\b{name}:(\d+)", told))) for way, name in counted.items()}

    def sent_size_bytes(self, index: int) -> int:
        """Return what a node has sent into its link, headers and all."""
        return self._count(index, "tx")

    def received_size_bytes(self, index: int) -> int:
        """Return what reached a node, headers and all."""
        return self._count(index, "rx")

    # Processes and sockets

    def command(self, index: int, *arguments: str) -> list[str]:
        """Return the command that runs another one at a node."""
        return ["ip", "netns", "exec", self.namespace(index), *arguments]

    @contextmanager
    def at(self, index: int) -> Iterator[None]:
        """Make the sockets of this thread at a node, while the block runs; they stay there."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            with open(f"/run/netns/{self.namespace(index)}") as there:
                enter(there.fileno())
            yield
        finally:
            enter(home)
            os.close(home)

    def connect(self, index: int, address: tuple[str, int], seconds: float = 10.0) -> socket.socket:
        """Return a TCP connection made by a node."""
        with self.at(index):
            return socket.create_connection(address, timeout=seconds)

    def listen(self, index: int) -> socket.socket:
        """Return a TCP socket that listens at a node, on a port the system chose."""
        with self.at(index):
            return socket.create_server((self.address(index), 0))

    def close(self) -> None:
        """Kill whatever lives in the namespaces and remove them."""
        names = [self.namespace(index) for index in range(len(self._links))]
        give_up_at = time.monotonic() + CLOSE_SECONDS
        for name in names:
            while (pids := _run("ip", "netns", "pids", name, check=False).split()) and time.monotonic() < give_up_at:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.05)
        for cable in self._cables.values():
            assert cable.stdin is not None
            cable.stdin.close()
            cable.kill()
            cable.wait(CLOSE_SECONDS)
            assert cable.stdout is not None
            cable.stdout.close()
        self._cables.clear()
        for name in (*names, self._hub):
            _run("ip", "netns", "del", name, check=False)

    # Inside

    def _others(self, index: int) -> list[int]:
        return [other for other in range(len(self._links)) if other != index]

    def _add(self, index: int) -> None:
        namespace, port, link = self.namespace(index), f"port{index}", self._links[index]
        _run("ip", "netns", "add", namespace)
        if link.delay_ms or link.loss_up or link.loss_down:
            self._cables[index] = _start_cable(f"{namespace}:eth0", f"{self._hub}:{port}")
        else:
            pair = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
            _run("ip", "-n", self._hub, "link", "add", port, *pair)
        for where, device in ((self._hub, port), (namespace, "eth0")):
            # One packet a frame, or one loss would take 64 KB.
            _run("ip", "-n", where, "link", "set", device, "gso_max_segs", "1")
        _run("ip", "-n", self._hub, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        _run("ip", "-n", namespace, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
        self.change(index)

    def _order(self, index: int, link: Link) -> None:
        order = {"delay_seconds": link.delay_ms / 1000, "loss_there": link.loss_up, "loss_back": link.loss_down}
        cable = self._cables[index]
        assert cable.stdin is not None
        assert cable.stdout is not None
        cable.stdin.write(json.dumps(order).encode() + b"\n")
        cable.stdin.flush()
        # Not before it is so: what is sent next would still meet the cable as it was.
        assert cable.stdout.readline() == b"ready\n"

    def _route(self, index: int) -> None:
        congestion = self._links[index].congestion
        route = (f"{SUBNET}.0/24", "dev", "eth0", "proto", "kernel", "scope", "link", "src", self.address(index))
        chosen = ("congctl", congestion) if congestion else ()
        _run("ip", "-n", self.namespace(index), "route", "replace", *route, *chosen)

    def _count(self, index: int, way: str) -> int:
        shown = json.loads(_run("ip", "-n", self.namespace(index), "-j", "-s", "link", "show", "eth0"))
        return int(shown[0]["stats64"][way]["bytes"])


def _shape(device: str, mbps: float) -> tuple[str, ...]:
    burst_size_bytes = max(16_000, int(mbps * 1e6 / 8 * 0.005))
    bucket = ("rate", f"{int(mbps * 1000)}kbit", "burst", str(burst_size_bytes), "latency", f"{QUEUE_MS}ms")
    return ("qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _start_cable(first_end: str, second_end: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(CABLE), first_end, second_end]
    cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert cable.stdout is not None
    if cable.stdout.readline() != b"ready\n":
        cable.kill()
        cable.wait()
        raise LabUnavailableError(f"no cable between {first_end} and {second_end}")
    return cable


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise LabUnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
