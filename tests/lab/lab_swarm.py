"""Real nodes at the ends of the lab's links: a publisher that never forms patches by luck, and its readers."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from namespaces import Lab
from swarm import COMMAND, Node, Swarm, make_environment, open_swarm, run_json, wait_until

from pulsenet.local.client import Client
from pulsenet.local.shared_memory import write_snapshot
from pulsenet.tensors.digest import compute_region_root
from pulsenet.tensors.params import TensorSpec, make_table

PORT: Final = 4101
RUN: Final = "lab"


class LabNode(Node):
    """A node inside a namespace; it is asked for its status from there."""

    def __init__(self, lab: Lab, index: int, swarm: Swarm, name: str, role: str, options: Sequence[str]) -> None:
        home = swarm.home(f"{RUN}-{name}")
        super().__init__(swarm, name, role, home, options, home / "pulsenet" / RUN / name)
        self.lab = lab
        self.index = index
        self.home = home
        swarm.nodes[name] = self

    def start(self) -> LabNode:
        """Start the process at its end of the link."""
        where = [f"--listen=/ip4/0.0.0.0/tcp/{PORT}", f"--announce=/ip4/{self.lab.address(self.index)}/tcp/{PORT}"]
        join = [COMMAND, "join", "--role", self.role, "--data-dir", str(self.data_dir), f"--run={RUN}", *where]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.lab.command(self.index, *join, *self._options),
                env=make_environment(self.home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of the node's HTTP endpoint, which only its namespace reaches."""
        url = urlsplit(self.metrics_url)
        assert url.hostname is not None
        assert url.port is not None
        connection = http.client.HTTPConnection(url.hostname, url.port)
        connection.sock = self.lab.connect(self.index, (url.hostname, url.port), 5.0)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"{self.name} broke off: {error}") from error
        finally:
            connection.close()

    @property
    def address(self) -> str:
        """The multiaddress others dial."""
        return f"/ip4/{self.lab.address(self.index)}/tcp/{PORT}/p2p/{self.libp2p_id}"

    @property
    def libp2p_id(self) -> str:
        """The node's name in libp2p, as it told its operator."""
        found = re.search(r"^listening\s+\S+/p2p/(\S+)", self.wait_log("listening "), re.MULTILINE)
        assert found is not None, self.log
        return found[1]

    def wait_held(self, number: int, seconds: float) -> dict[str, Any]:
        """Wait until the node holds a version, its root checked; it has no engine that could apply it."""
        return self.wait_status(f"version {number} is held", lambda status: status["mirror_version"] == number, seconds)

    def count_bytes(self, direction: str, kind: str = "chunk") -> int:
        """Return the bytes of that kind that crossed the node's streams since it started."""
        return int(self.status["bytes"].get(f"{direction}_{kind}", 0))

    def count(self, name: str) -> dict[str, float]:
        """Return a counter with one label, by that label."""
        _, text = self.get("/metrics")
        return {label: float(value) for label, value in re.findall(rf'^{name}{{\w+="(.*)"}} (\S+)', text, re.MULTILINE)}

    def kill_p2pd(self) -> None:
        """Kill -9 the network process under the node."""
        for pid in self.find_p2pd():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reconnect(self) -> None:
        """End the node's connections and wait until it has new ones: they know nothing of an earlier link."""
        self.lab.break_connections(self.index)
        wait_until(f"{self.name} has a connection again", lambda: self.lab.count_connections(self.index) > 0)
        self.wait_status("it has neighbours again", lambda status: status["peers_neighbour"] > 0)


class Transfer:
    """Counts what crosses the streams from a publisher to a reader, from now on."""

    def __init__(self, publisher: LabNode, reader: LabNode) -> None:
        self._publisher, self._reader = publisher, reader
        self._sent_before = publisher.count_bytes("sent")
        self._received_before = reader.count_bytes("received")

    @property
    def sent_size_bytes(self) -> int:
        """Chunk bytes the publisher handed to its streams, to whomever they went."""
        return self._publisher.count_bytes("sent") - self._sent_before

    @property
    def received_size_bytes(self) -> int:
        """Chunk bytes that arrived whole at the reader."""
        return self._reader.count_bytes("received") - self._received_before

    def wait_received(self, size_bytes: int, seconds: float = 60.0) -> None:
        """Wait until the reader has so much, and not yet everything."""
        wait_until(f"{size_bytes} bytes arrive", lambda: self.received_size_bytes >= size_bytes, seconds)


class RandomModel:
    """Weights whose every step replaces all bits: a patch is as large as the model, whatever encodes it."""

    def __init__(self, size_bytes: int, seed: int = 3) -> None:
        self.table = make_table([TensorSpec("layer.weight", "BF16", (size_bytes // 2048, 1024))])
        self._random = np.random.default_rng(seed)
        self._bits: Any = None
        self.step_count = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights, and nearly of a patch."""
        return self.table.layout_size_bytes

    @property
    def root(self) -> str:
        """The root of the present bits."""
        return compute_region_root(self.table, self._bits).hex()

    def publish_step(self, client: Client) -> int:
        """Draw all weights anew, publish, wait for the commit; return the number of the version."""
        self.step_count += 1
        self._bits = self._random.integers(0, 256, self.table.layout_size_bytes, dtype=np.uint8)
        descriptor = write_snapshot(self.table, [(0, 0, self.table.view(self._bits, 0).view(np.uint8))])
        try:
            result = client.publish(self.table, descriptor, self.step_count, True, timeout_seconds=60)
        finally:
            os.close(descriptor)
        assert result.status == "committed", result
        assert result.version is not None
        return result.version.number


class LabSwarm:
    """A publisher at link 0 and readers at the others, on machines of their own."""

    def __init__(self, lab: Lab, swarm: Swarm) -> None:
        self.lab = lab
        self._swarm = swarm
        self.publisher: LabNode
        self._token = ""

    def start_publisher(self, *options: str, anchor_interval: int = 1000) -> LabNode:
        """Create the run on the publisher's machine and start it."""
        self.publisher = LabNode(self.lab, 0, self._swarm, "publisher", "trainer", ("--codec=dense", *options))
        home = self.publisher.home
        key = run_json("keygen", str(self.publisher.data_dir / "identity.key"), home=home)["public_key"]
        interval = ("--anchor-interval", str(anchor_interval))
        created = run_json("run", "create", RUN, "--authority", key, *interval, home=home)
        self._token = created["token"]
        self.publisher.start()
        return self.publisher

    def start_reader(self, index: int, *options: str) -> LabNode:
        """Start a reader, which knows the publisher alone."""
        bootstrap = f"--bootstrap={self.publisher.address}"
        own = (f"--token={self._token}", bootstrap, "--engine=none", *options)
        reader = LabNode(self.lab, index, self._swarm, f"reader{index}", "inferencer", own)
        reader.start()
        return reader


@contextmanager
def open_lab_swarm(lab: Lab) -> Iterator[LabSwarm]:
    """Lend nodes in a lab and leave nothing of them behind."""
    with open_swarm() as swarm:
        yield LabSwarm(lab, swarm)
