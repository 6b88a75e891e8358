"""Precedence, refusals and their exit codes (A-CLI-2, A-CLI-3, A-NET-4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulsenet.errors import ConfigError, UsageError
from pulsenetd import config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pulsenet.toml"
    path.write_text('run = "from-file"\nmetrics_port = 9000\n')
    return path


def test_flag_beats_environment_beats_file_beats_default(file: Path) -> None:
    """A-CLI-3"""
    environment = {"PULSENET_RUN": "from-environment", "HOME": "/nowhere"}
    resolved = config.resolve({"run": "from-flag"}, environment, file)
    assert resolved.config.run == "from-flag"
    assert resolved.origins["run"] == "flag --run"
    resolved = config.resolve({}, environment, file)
    assert resolved.config.run == "from-environment"
    assert resolved.origins["run"] == "environment PULSENET_RUN"
    resolved = config.resolve({}, {}, file)
    assert (resolved.config.run, resolved.config.metrics_port) == ("from-file", 9000)
    assert resolved.origins["run"] == f"file {file}"
    resolved = config.resolve({}, {}, None)
    assert resolved.config.run == "local"
    assert resolved.origins["run"] == "default"


def test_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    """A-CLI-3"""
    path = tmp_path / "c.toml"
    path.write_text("metrics_prt = 1\n")
    with pytest.raises(ConfigError, match="did you mean metrics_port") as caught:
        config.resolve({}, {}, path)
    assert not isinstance(caught.value, UsageError)
    with pytest.raises(ConfigError, match="did you mean PULSENET_LISTEN"):
        config.resolve({}, {"PULSENET_LISTN": "x"}, None)
    with pytest.raises(ConfigError, match="config show"):
        config.resolve({}, {"PULSENET_ZZZZZZZZ": "x"}, None)


def test_what_kubernetes_tells_of_services_is_named_with_the_remedy() -> None:
    told = {"PULSENET_SEED_PORT": "tcp://10.96.0.1:4001", "PULSENET_SEED_SERVICE_HOST": "10.96.0.1"}
    with pytest.raises(ConfigError, match=r"PULSENET_SEED_SERVICE_HOST: Kubernetes .* enableServiceLinks: false"):
        config.resolve({}, told, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("role", "foo", "'foo' is not one of trainer, inferencer, seed"),
        ("metrics_port", "70000", "70000 is not a whole number from 0 to 65535"),
        ("metrics_port", "many", "'many' is not a whole number"),
        ("start_timeout_seconds", "0", "not between"),
        ("start_timeout_seconds", "soon", "not a number of seconds"),
        ("store_limit_bytes", "20 apples", "not a size"),
        ("wait", "perhaps", "not true or false"),
        ("run", "../up", "not a run name"),
        ("bootstrap", ["nonsense"], "nonsense"),
        ("bootstrap", ["/ip4/1.2.3.4/tcp/4001"], "/p2p/"),
        ("announce", ["/ip4/1.2.3.4/tcp/0"], "port 0"),
        ("announce", ["/ip4/1.2.3.400/tcp/1"], "1.2.3.400"),
        ("listen", "/ip4/127.0.0.1/tcp/70000", "'70000' is not a port"),
        ("max_staleness", "-2", "from -1 to 1000000"),
        ("max_staleness", "some", "from -1 to 1000000"),
        ("version_min", "57", "no version"),
        ("version_min", "0.57.1", "no version"),
        ("allow_uid", ["root"], "not a numeric user id"),
        ("allow_uid", ["\u00b2"], "not a numeric user id"),
        ("data_dir", "a\0b", "zero byte"),
        ("metrics_host", "", "127.0.0.1"),
    ],
)
def test_bad_flag_is_a_usage_error_that_names_flag_and_value(name: str, value: object, message: str) -> None:
    """A-CLI-2, A-NET-4"""
    with pytest.raises(UsageError) as caught:
        config.resolve({name: value}, {}, None)
    assert message in str(caught.value)
    assert config.flag_name(name) in str(caught.value)


def test_bad_variable_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="PULSENET_ROLE") as caught:
        config.resolve({}, {"PULSENET_ROLE": "foo"}, None)
    assert not isinstance(caught.value, UsageError)


def test_lists_come_from_toml_arrays_and_from_commas(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('allow_uid = ["1", "2"]\nwait = true\n')
    resolved = config.resolve({}, {}, path)
    assert resolved.config.allow_uid == ("1", "2")
    assert resolved.config.wait is True
    assert config.resolve({}, {"PULSENET_ALLOW_UID": "3,4"}, None).config.allow_uid == ("3", "4")


def test_unreadable_or_broken_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        config.resolve({}, {}, tmp_path / "absent.toml")
    path = tmp_path / "broken.toml"
    path.write_text("run = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        config.resolve({}, {}, path)


@pytest.mark.parametrize(("text", "rate"), [("0", 0), ("64K", 1 << 16), ("5M", 5 << 20), ("5 MiB/s", 5 << 20)])
def test_rates_are_sizes_per_second(text: str, rate: int) -> None:
    assert config.parse_rate(text) == rate
    resolved = config.resolve({"upload_limit": text}, {"PULSENET_DOWNLOAD_LIMIT": text}, None).config
    assert (resolved.upload_limit, resolved.download_limit) == (rate, rate)


@pytest.mark.parametrize("text", ["1", "63K", "5M/h", "fast", "-1", True])
def test_a_rate_at_which_nothing_arrives_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"64K|not a size"):
        config.parse_rate(text)


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("4K", 4096), ("1 GiB", 1 << 30), ("2TB", 2 << 40)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert config.parse_size(text) == size


@pytest.mark.parametrize(
    ("flags", "environment", "error", "text"),
    [
        (
            {"round_seconds": "4000"},
            {},
            UsageError,
            "flag --round-seconds: 4000 is not below --watchdog-seconds, 3600$",
        ),
        (
            {"watchdog_seconds": "900"},
            {},
            UsageError,
            "flag --watchdog-seconds: 900 is not above --round-seconds, 1200$",
        ),
        (
            {},
            {"PULSENET_ROUND_SECONDS": "10"},
            ConfigError,
            "environment PULSENET_ROUND_SECONDS: 10 is not above 10, the seconds after which a source is given up$",
        ),
    ],
)
def test_waits_that_are_not_nested_are_refused_with_the_rule(
    flags: dict[str, str], environment: dict[str, str], error: type[ConfigError], text: str
) -> None:
    """A-CLI-6: chunk idle < source switch < round < watchdog."""
    with pytest.raises(ConfigError, match=text) as caught:
        config.resolve(flags, environment, None)
    assert type(caught.value) is error


def test_waits_that_are_nested_are_taken() -> None:
    resolved = config.resolve({"round_seconds": "4000", "watchdog_seconds": "9000"}, {}, None)
    assert (resolved.config.round_seconds, resolved.config.watchdog_seconds) == (4000.0, 9000.0)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"engine": "vllm"}, "flag --engine: vllm needs --engine-url"),
        ({"engine_url": "http://127.0.0.1:1"}, "flag --engine-url: goes with --engine vllm or sglang"),
        ({"engine": "sglang", "engine_url": "http://127.0.0.1:1"}, "flag --engine: sglang needs .* --companions"),
        ({"engine": "sglang", "companions": "/base"}, "flag --engine: sglang needs --engine-url"),
        (
            {
                "engine": "sglang",
                "engine_url": "http://127.0.0.1:1",
                "companions": "/base",
                "serve": ("--model", "/base"),
            },
            "flag --serve: goes with --engine vllm",
        ),
        ({"engine_reload": True}, "flag --engine-reload: goes with --engine vllm"),
        (
            {"engine": "vllm", "engine_url": "http://127.0.0.1:1", "engine_reload": True},
            "flag --engine-reload: .*--companions",
        ),
        ({"openai_port": "8001"}, "flag --openai-port: goes with --engine vllm"),
        ({"openai_host": ""}, "flag --openai-host: no address"),
        ({"serve": ("--model", "/base")}, "flag --serve: goes with --engine vllm"),
        (
            {"engine": "vllm", "engine_url": "http://127.0.0.1:1", "serve": ("--model", "/base")},
            "flag --engine-url: goes with an engine that somebody else runs",
        ),
        ({"engine": "vllm", "engine_url": "http://10.0.0.1:1"}, "flag --engine-url: .* not on this machine"),
        ({"engine": "vllm", "serve": ("--dtype", "bfloat16")}, "flag --serve: .* --model at least"),
    ],
)
def test_an_engine_is_described_one_way(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        config.resolve(flags, {}, None)


def test_vllms_arguments_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('engine = "vllm"\nserve = ["--model", "/base"]\n')
    assert config.resolve({}, {}, file).config.serve == ("--model", "/base")


def test_a_file_without_end_is_not_read() -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        config.resolve({}, {}, Path("/dev/zero"))
