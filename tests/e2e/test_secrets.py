"""Nothing secret leaves a running node: by status, metrics, page, logs, command lines, or what people paste."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from swarm import Node, Swarm, run_command, run_json
from synthetic import MEGABYTE, SyntheticModel, connect

from pulsenet.chain.token import decode_token

pytestmark = pytest.mark.e2e

LOOPBACK = "--listen=/ip4/127.0.0.1/tcp/0"
KEY_PREFIX_SIZE_BYTES = 4
SEED_SIZE_BYTES = 32
PATHS = ("/status?history&log", "/metrics", "/livez?verbose", "/readyz?verbose", "/?log", "/nothing")


def write_forms(secret: bytes) -> Iterator[str]:
    """Yield the ways in which bytes get into text, whole or their first half."""
    for part in (secret, secret[: len(secret) // 2]):
        yield part.hex()
        for encode in (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode):
            # The last group of a part depends on what follows it.
            yield encode(part).decode().rstrip("=")[:-2].lower()
        yield str(list(part))[1:-1]
        yield repr(part)[2:-1].lower()


def read_seed(path: Path) -> bytes:
    """Return the secret half of a key file."""
    seed = path.read_bytes()[KEY_PREFIX_SIZE_BYTES : KEY_PREFIX_SIZE_BYTES + SEED_SIZE_BYTES]
    assert len(seed) == SEED_SIZE_BYTES
    return seed


def find_secrets(text: str, secrets: dict[str, bytes], words: dict[str, str]) -> list[str]:
    """Return the names of what is in a text and must not be."""
    lower = text.lower()
    found = [name for name, secret in secrets.items() if any(form in lower for form in write_forms(secret))]
    return found + [name for name, word in words.items() if word.lower() in lower]


def read_command_lines(pid: int) -> str:
    """Return the command lines of a process and of all that it started, as everybody on the machine sees them."""
    text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    children = ""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            children += (task / "children").read_text() + " "
    return "\n".join([text, *(read_command_lines(int(child)) for child in children.split())])


def test_a_secret_is_found_in_whatever_form() -> None:
    secret = bytes(range(100, 132))
    for text in (secret.hex().upper(), base64.b64encode(secret).decode(), str(list(secret)), f"x {secret!r}"):
        assert find_secrets(f"log {text} line", {"key": secret}, {}) == ["key"]
    assert find_secrets("/HOME/x", {"key": secret}, {"home": "/home/x"}) == ["home"]
    assert find_secrets("nothing", {"key": secret}, {"home": "/home/x"}) == []


def start_private_swarm(swarm: Swarm) -> tuple[str, list[Node]]:
    """Return the token of a private run, and a trainer and a reader of it that have published and applied a version."""
    home = swarm.home()
    trainer = swarm.add("trainer", "trainer", "--run=closed", LOOPBACK, "--debug", run="closed")
    reader = swarm.add("reader", "inferencer", "--run=closed", LOOPBACK, "--debug", run="closed")
    keys = [run_json("keygen", str(node.data_dir / "identity.key"), home=home) for node in (trainer, reader)]
    created = run_json("run", "create", "closed", "--private", "--authority", keys[0]["public_key"], home=home)
    assert run_json("run", "admit", "closed", keys[1]["peer_id"], "--role", "inferencer", home=home)["complete"]
    for node in (trainer, reader):
        node.start().wait_ready()
    with connect(trainer.data_dir) as client:
        assert SyntheticModel(MEGABYTE).publish_step(client) == 1
    reader.wait_applied(1)
    return created["token"], [trainer, reader]


def test_nothing_secret_leaves_a_running_node(swarm: Swarm) -> None:
    token, nodes = start_private_swarm(swarm)
    run_directory = nodes[0].data_dir.parent
    secrets = {
        "secret of the run": decode_token(token).secret,
        "owner's key": read_seed(run_directory / "owner.key"),
        **{f"key of the {node.name}": read_seed(node.data_dir / "identity.key") for node in nodes},
    }
    assert all(len(secret) >= 16 for secret in secrets.values())
    words = {"token": token, "private path": str(swarm.directory)}
    # Secrets are there to be found: the run file, which is private, holds the token.
    assert find_secrets((run_directory / "run.json").read_text(), secrets, words)
    for node in nodes:
        for path in PATHS:
            _, body = node.get(path)
            assert find_secrets(body, secrets, words) == [], f"{node.name} {path}"
        # A log on the node's own machine may name its files.
        assert find_secrets(node.log, secrets, {"token": token}) == [], node.name
        assert find_secrets(read_command_lines(node.pid), secrets, {"token": token}) == [], node.name
        command_lines = read_command_lines(node.pid)
        assert "p2pd" in command_lines, "the children are looked at"
    for command in (
        ["doctor"],
        ["status", "--json", "--data-dir", str(nodes[1].data_dir)],
        ["config", "show", "--origin", "--role", "inferencer"],
    ):
        done = run_command(*command, home=swarm.home(), environment={"PULSENET_TOKEN": token})
        assert find_secrets(done.stdout + done.stderr, secrets, {"token": token}) == [], command


def test_the_token_of_a_public_run_holds_nothing_secret(swarm: Swarm) -> None:
    home = swarm.home()
    key = swarm.directory / "key"
    public = run_json("keygen", str(key), home=home)["public_key"]
    token = run_json("run", "create", "open", "--authority", public, home=home)["token"]
    assert decode_token(token).secret == b""
    raw = base64.b32decode(token[len("pulse1") :].upper() + "=" * (-len(token[len("pulse1") :]) % 8))
    for path in (key, home / "pulsenet" / "open" / "owner.key"):
        assert read_seed(path) not in raw
    assert str(swarm.directory).encode() not in raw
