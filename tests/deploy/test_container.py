"""The Dockerfile passes a real linter, and image and compose file start nodes that read what they are given."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from exported import ROOT

from pulsenetd import config
from pulsenetd.cli import build_parser

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = ROOT / "compose.yaml"
NODES = {"trainer": "trainer", "seed": "seed", "inferencer-1": "inferencer", "inferencer-2": "inferencer"}


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a tool that lies beside this Python or on the path."""
    program = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def read_instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, lines joined and comments left out."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def read_environment() -> dict[str, str]:
    """Return the variables the image sets."""
    pairs = [shlex.split(value) for name, value in read_instructions() if name == "ENV"]
    return dict(pair.split("=", 1) for one in pairs for pair in one)


# The image


def test_hadolint_has_nothing_to_say() -> None:
    done = run_tool("hadolint", "--failure-threshold", "style", "Dockerfile")
    assert done.returncode == 0, done.stdout
    assert not done.stdout


def test_everything_the_image_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [value.split()[:-1] for name, value in read_instructions() if name == "COPY" and "--from" not in value]
    names = [one for words in copied for one in words]
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
    assert set(names) == kept


def test_the_image_copies_whatever_the_wheel_is_made_of() -> None:
    """Otherwise the build of the image ends where setuptools misses a file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data_files = [name for names in project["tool"]["setuptools"]["data-files"].values() for name in names]
    wanted = [project["project"]["readme"], *project["project"]["license-files"], *data_files]
    copied = [word for name, value in read_instructions() if name == "COPY" for word in value.split()[:-1]]
    for name in wanted:
        assert any(name == one or name.startswith(f"{one}/") for one in copied), name


def test_the_image_has_two_stages_and_runs_as_nobody_in_particular() -> None:
    instructions = read_instructions()
    assert [value.split()[-1] for name, value in instructions if name == "FROM" and " AS " in value] == ["build"]
    assert sum(name == "FROM" for name, _ in instructions) == 2
    (user,) = [value for name, value in instructions if name == "USER"]
    (uid, gid) = user.split(":")
    assert uid == gid
    assert int(uid) > 999
    made = [value for name, value in instructions if name == "RUN" and "useradd" in value]
    assert f"--uid {uid}" in made[0]


def test_the_build_knows_both_variants_and_refuses_others(tmp_path: Path) -> None:
    """The step is run by a real shell, with a pip that writes down what it is asked for."""
    step = next(value for name, value in read_instructions() if name == "RUN" and "VARIANT" in value)
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    pip.chmod(0o755)
    step = step.replace("/opt/pulsenet/bin/pip", str(pip)).replace("python -m venv /opt/pulsenet", "true")
    asked = {}
    for variant in ("cpu", "cuda", "rocm"):
        done = subprocess.run(
            ["sh", "-c", step],
            env={"VARIANT": variant, "TORCH": "9.9", "PATH": "/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        asked[variant] = (done.returncode, (tmp_path / "asked").read_text().split()[-1])
        if variant == "rocm":
            assert "VARIANT is cpu or cuda, not 'rocm'" in done.stderr
    assert asked["cpu"] == asked["cuda"] == (0, "torch==9.9")
    assert asked["rocm"][0] == 2


def test_extras_and_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    defaults = dict(value.split("=", 1) for name, value in read_instructions() if name == "ARG" and "=" in value)
    assert set(defaults["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    assert project["requires-python"] == f">={defaults['PYTHON']}"
    pinned = re.search(r"^TORCH +\?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    assert defaults["TORCH"] == pinned[1]


def test_the_image_starts_a_node_by_its_variables() -> None:
    settings = {name: value for name, value in read_environment().items() if name.startswith("PULSENET_")}
    (command,) = [json.loads(value) for name, value in read_instructions() if name == "CMD"]
    build_parser().parse_args(command)
    resolved = config.resolve({}, settings, None).config
    ports = next(value for name, value in read_instructions() if name == "EXPOSE").split()
    assert ports == [resolved.listen.rsplit("/", 1)[1], str(resolved.metrics_port)]


def test_the_health_check_is_a_program_that_asks_the_node() -> None:
    (check,) = [value for name, value in read_instructions() if name == "HEALTHCHECK"]
    program = json.loads(check[check.index("[") :])
    ast.parse(program[2])
    assert f"127.0.0.1:{read_environment()['PULSENET_METRICS_PORT']}/livez" in program[2]


# The compose file


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """The compose file as Docker Compose itself understands it."""
    done = run_tool("docker-compose", "-f", str(COMPOSE), "--profile", "toy", "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    return dict(json.loads(done.stdout))


def test_compose_accepts_the_file_and_knows_every_service(resolved: dict[str, Any]) -> None:
    assert set(resolved["services"]) == {*NODES, "setup", "toy", "prometheus", "grafana"}
    assert resolved["services"]["seed"]["build"]["args"] == {"VARIANT": "cpu"}


@pytest.mark.parametrize("name", NODES)
def test_variables_of_a_node_are_its_options(resolved: dict[str, Any], name: str) -> None:
    service = resolved["services"][name]
    variables = {**read_environment(), **service["environment"]}
    settings = {key: value for key, value in variables.items() if key.startswith("PULSENET_")}
    node = config.resolve({}, settings, None).config
    assert node.role == NODES[name]
    assert node.announce == (f"/dns4/{name}/tcp/4001",)
    assert node.run_file == "/run-file/run.json"
    if service.get("command"):
        build_parser().parse_args(service["command"])


def test_nodes_keep_to_themselves(resolved: dict[str, Any]) -> None:
    """Nothing of them is published to the machine, and what they may do is taken from them."""
    for name in (*NODES, "setup", "toy"):
        service = resolved["services"][name]
        assert not service.get("ports"), name
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for name in ("prometheus", "grafana"):
        assert [port["host_ip"] for port in resolved["services"][name]["ports"]] == ["127.0.0.1"]


def test_what_is_mounted_exists_and_data_outlives_containers(resolved: dict[str, Any]) -> None:
    owners: dict[str, list[str]] = {}
    for name, service in resolved["services"].items():
        for mount in service["volumes"]:
            if mount["type"] == "bind":
                assert Path(mount["source"]).exists(), mount["source"]
                assert mount["read_only"]
            elif mount["target"] == "/data":
                owners.setdefault(mount["source"], []).append(name)
    assert owners == {
        "trainer": ["setup", "toy", "trainer"],
        **{name: [name] for name in NODES if name != "trainer"},
    }


def test_every_node_is_scraped_with_its_role() -> None:
    scraped = yaml.safe_load((ROOT / "deploy" / "compose" / "prometheus.yml").read_text())["scrape_configs"][0]
    targets = {
        target.split(":")[0]: group["labels"]["role"]
        for group in scraped["static_configs"]
        for target in group["targets"]
    }
    assert targets == NODES


def test_the_scraper_is_configured_as_promtool_wants_it(tmp_path: Path) -> None:
    # As it is mounted: the rules beside the configuration.
    shutil.copytree(ROOT / "deploy" / "prometheus" / "rules", tmp_path / "rules")
    shutil.copy(ROOT / "deploy" / "compose" / "prometheus.yml", tmp_path)
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_script_of_the_setup_is_plain_shell() -> None:
    done = subprocess.run(["sh", "-n", str(ROOT / "deploy" / "compose" / "setup.sh")], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_setup_that_was_stopped_goes_on_the_next_time(tmp_path: Path) -> None:
    """Right after the key was made, of all moments: the run has to name it, and only that command had said its name."""
    programs = tmp_path / "bin"
    programs.mkdir()
    node = f"exec {sys.executable} -m pulsenetd.cli"
    stopped = f'if [ ! -e {tmp_path}/once ]; then touch {tmp_path}/once; ({node} "$@") > /dev/null; exit 137; fi'
    for name, text in (("pulsenet", f'{stopped}\n{node} "$@"'), ("python", f'exec {sys.executable} "$@"')):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PULSENET_")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "RUN": "demo",
        "ADDRESS": "/dns4/trainer/tcp/4001",
        "RUN_FILE": str(tmp_path / "run.json"),
    }
    script = ["sh", str(ROOT / "deploy" / "compose" / "setup.sh")]
    codes = [subprocess.run(script, env=environment, capture_output=True, check=False).returncode for _ in range(3)]
    assert codes == [137, 0, 0]
    assert (tmp_path / "data" / "pulsenet" / "demo" / "trainer" / "identity.key").exists()
    assert (tmp_path / "run.json").read_bytes() == (tmp_path / "data/pulsenet/demo/run.json").read_bytes()
