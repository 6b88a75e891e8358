"""The command lines are ones the installed command accepts, in an environment of their own."""

from pathlib import Path

from pulsenetd.cli import build_parser
from pulsenetd.commands import config as config_command
from pulsenetd.config import resolve
from pulsenetd.demo import command_lines
from pulsenetd.demo.command_lines import PULSENET
from pulsenetd.engines.vllm_process import ServerArguments


def test_every_command_is_understood_by_the_command_line(tmp_path: Path) -> None:
    commands = [
        command_lines.keygen(tmp_path / "key"),
        command_lines.create_run(authority="a" * 64, inferencers=["b" * 64, "c" * 64]),
        command_lines.join("trainer", tmp_path),
        command_lines.join("inferencer", tmp_path),
        command_lines.join_vllm(
            tmp_path, python="/venv/bin/python", base=tmp_path / "base", port=8123, context_tokens_max=64
        ),
        command_lines.create_rounds_run(trainers=["a" * 64, "b" * 64], inferencers=["c" * 64], inner_steps=8),
        command_lines.create_rounds_run(
            trainers=["a" * 64], inferencers=[], inner_steps=8, algorithm="gossip", variant="local_m1_m2"
        ),
        command_lines.join_rounds("trainer", tmp_path),
    ]
    for command in commands:
        assert tuple(command[: len(PULSENET)]) == PULSENET
        build_parser().parse_args(command[len(PULSENET) :])


def test_the_users_own_settings_do_not_reach_the_demonstration(tmp_path: Path) -> None:
    inherited = {"PATH": "/bin", "PULSENET_TOKEN": "pulse1x", "XDG_DATA_HOME": "/home/me", "OMP_NUM_THREADS": "8"}
    environment = command_lines.environment(tmp_path, inherited, threads=1)
    assert environment["PATH"] == "/bin"
    assert environment["XDG_DATA_HOME"] == str(tmp_path / "data")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "PULSENET_TOKEN" not in environment
    resolve({}, environment, None)


def test_a_node_with_vllm_is_given_what_the_demonstration_asks_it(tmp_path: Path) -> None:
    command = command_lines.join_vllm(
        tmp_path, python="/venv/bin/python", base=tmp_path / "base", port=8123, context_tokens_max=64
    )
    config = config_command.resolve(build_parser().parse_args(command[len(PULSENET) :])).config
    assert (config.engine, config.engine_python) == ("vllm", "/venv/bin/python")
    arguments = ServerArguments(config.serve)
    assert (arguments.model, arguments.port) == (str(tmp_path / "base"), 8123)
    assert "--enable-scale-out" in config.serve
    # what people set themselves counts more than our choice for a small machine
    environment = command_lines.vllm_environment({"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_nodes_live_where_join_would_put_them(tmp_path: Path) -> None:
    home = tmp_path / "data" / "pulsenet" / "demo"
    assert command_lines.node_directory(tmp_path, "trainer", 1) == home / "trainer"
    assert command_lines.node_directory(tmp_path, "inferencer", 1) == home / "inferencer"
    assert command_lines.node_directory(tmp_path, "inferencer", 3) == home / "inferencer-3"


def test_at_least_one_core_is_there() -> None:
    assert command_lines.core_count() >= 1
