"""``keygen``, ``verify`` and ``patch``: what works on files alone, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pulsenetd import cli
from pulsenetd.identity import load, to_libp2p_text


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def ok(self, *arguments: str | Path) -> str:
        code, out, err = self.run(*arguments)
        assert (code, err) == (0, "")
        return out

    def fails(self, code: int, text: str, *arguments: str | Path) -> None:
        found, _, err = self.run(*arguments)
        assert found == code
        assert text in err
        assert len(err.splitlines()) == 1


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


# keygen


def test_a_key_is_made_before_its_node(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "node" / "identity.key"
    text = shell.ok("keygen", path).strip()
    assert to_libp2p_text(load(path).peer_id) == text
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_made_key_is_told_to_programs(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    told = json.loads(shell.ok("keygen", path, "--json"))
    key = load(path).peer_id
    assert told == {"peer_id": to_libp2p_text(key), "public_key": key.hex(), "file": str(path)}


def test_a_key_is_never_overwritten_and_told_again(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    held = shell.ok("keygen", path).strip()
    data = path.read_bytes()
    shell.fails(2, f"holds {held} already; a key is never overwritten", "keygen", path)
    assert path.read_bytes() == data


def test_a_place_where_no_key_can_be_is_named(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shell.fails(6, str(tmp_path / "file"), "keygen", tmp_path / "file" / "identity.key")


# verify and patch


class Models:
    """Two versions of a model."""

    def __init__(self, directory: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        self.old, self.new, self.patch = (directory / name for name in ("old.safetensors", "new.safetensors", "p"))
        weights = torch.randn(300, 40, generator=generator).to(torch.bfloat16)
        save_file({"layer": weights}, self.old)
        changed = weights.clone()
        changed.view(-1)[:50] += 1
        save_file({"layer": changed}, self.new)


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


def test_the_root_of_a_model_is_printed_and_checked(shell: Shell, models: Models) -> None:
    root = shell.ok("verify", models.old).strip()
    assert len(bytes.fromhex(root)) == 32
    told: dict[str, Any] = json.loads(shell.ok("verify", models.old, "--json"))
    assert (told["root"], told["element_count"], told["elements_by_dtype"]) == (root, 12_000, {"BF16": 12_000})
    assert shell.ok("verify", models.old, "--root", root.upper()).strip() == root
    shell.fails(5, "fetch it again", "verify", models.new, "--root", root)


def test_a_model_that_is_not_there_is_a_usage_error(shell: Shell, tmp_path: Path) -> None:
    shell.fails(2, str(tmp_path / "nothing"), "verify", tmp_path / "nothing")


def test_a_patch_is_made_shown_and_applied(shell: Shell, models: Models, tmp_path: Path) -> None:
    made = json.loads(shell.ok("patch", "make", models.old, models.new, "-o", models.patch, "--json"))
    assert json.loads(shell.ok("patch", "show", models.patch, "--json")) == made
    assert made["base_root"] == shell.ok("verify", models.old).strip()
    assert 0 < made["changed_count"] <= 50
    output = tmp_path / "made.safetensors"
    applied = json.loads(shell.ok("patch", "apply", models.old, models.patch, "-o", output, "--json"))
    assert applied["root"] == made["root"] == shell.ok("verify", output).strip()
    assert torch.equal(load_file(output)["layer"], load_file(models.new)["layer"])


def test_people_read_counts_shares_and_ratios(shell: Shell, models: Models) -> None:
    out = shell.ok("patch", "make", models.old, models.new, "-o", models.patch, "--codec", "plain")
    lines = {line.split("  ")[0].strip(): line.split()[-1] for line in out.splitlines()}
    made = json.loads(shell.ok("patch", "show", models.patch, "--json"))
    assert lines["element count"] == "12,000"
    density = next(name for name in made if name.startswith("density"))
    assert lines[density.replace("_", " ")] == f"{made[density]:.4%}"
    compression = next(name for name in made if "compression" in name)
    assert lines[compression.replace("_", " ")] == f"{made[compression]:,.2f}"
    assert not any("{" in value or "[" in value for value in lines.values())


def test_a_patch_fits_its_base_only(shell: Shell, models: Models, tmp_path: Path) -> None:
    shell.ok("patch", "make", models.old, models.new, "-o", models.patch)
    output = tmp_path / "made.safetensors"
    shell.fails(5, "give the model it was made from", "patch", "apply", models.new, models.patch, "-o", output)
    assert not output.exists()


def test_a_file_that_is_no_patch_is_named(shell: Shell, models: Models) -> None:
    models.patch.write_bytes(b"no patch")
    shell.fails(2, str(models.patch), "patch", "show", models.patch)
    shell.fails(2, str(models.patch) + "x", "patch", "show", str(models.patch) + "x")
