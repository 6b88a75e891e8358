"""One frozen :class:`Config`, built once: flag > ``PULSENET_*`` > TOML file > default.

Nothing else in the project reads the environment. Protocol limits are not configuration: all peers
must agree on them, so they live in ``pulsenet/limits.py``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pulsenet.errors import ConfigError, UsageError
from pulsenet.ids import Version

ENVIRONMENT_PREFIX: Final = "PULSENET_"

_LINK_SUFFIX: Final = "_SERVICE_HOST"

FILE_SIZE_BYTES_MAX: Final = 1 << 20
"""A longer file is not read: it is something else, and a device has no end."""

ROLES: Final = ("trainer", "inferencer", "seed")
ENGINES: Final = ("files", "vllm", "sglang", "none")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
CODECS: Final = ("auto", "tight", "plain", "absolute", "dense")

RATE_MIN: Final = 64 << 10
"""Least cap in bytes per second: a chunk of 1 MiB then leaves before its reader takes the link for dead."""

_SIZE_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _option(default: Any, text: str, *, choices: tuple[str, ...] = (), kind: str = "text", metavar: str = "") -> Any:
    """Declare a configuration field: its default, how text becomes a value, and its help."""
    metadata = {"help": text, "choices": choices, "kind": kind, "metavar": metavar}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything an operator may choose for one node."""

    role: str = _option("trainer", "what this node does", choices=ROLES)
    run: str = _option("local", "name of the run on this machine", metavar="NAME")
    token: str = _option("", "join token printed by 'pulsenet run create'", metavar="TOKEN")
    run_file: str = _option("", "run file to read token and bootstraps from", kind="path", metavar="FILE")
    data_dir: str = _option("", "node directory (default: under $XDG_DATA_HOME/pulsenet)", kind="path", metavar="DIR")
    bootstrap: tuple[str, ...] = _option((), "multiaddress of a peer to join by, with /p2p/<peer>", metavar="ADDR")
    listen: str = _option("", "multiaddress to listen on (default: loopback for 'local', else all)", metavar="ADDR")
    announce: tuple[str, ...] = _option((), "multiaddress others can dial, if not the one listened on", metavar="ADDR")
    wait: bool = _option(False, "keep trying while no bootstrap is reachable", kind="flag")
    start_timeout_seconds: float = _option(60.0, "limit for p2pd's start and the first join", kind="seconds")
    metrics_host: str = _option("127.0.0.1", "address of /metrics, /livez, /readyz", metavar="HOST")
    metrics_port: int = _option(0, "port of /metrics; 0 picks a free one", kind="port")
    engine: str = _option("files", "engine kept current beside an inferencer", choices=ENGINES)
    engine_dir: str = _option("", "where the files engine writes (default: under the node directory)", kind="path")
    engine_url: str = _option("", "vLLM or SGLang on this machine to attach to, http://127.0.0.1:PORT", metavar="URL")
    serve: tuple[str, ...] = _option((), "start vLLM; its arguments follow after '--'", kind="rest")
    engine_python: str = _option("", "interpreter that has vLLM, for --serve (default: this one)", kind="path")
    engine_reload: bool = _option(False, "let vLLM load versions from disk where it cannot be patched", kind="flag")
    openai_port: int = _option(0, "serve vLLM's OpenAI API with weight versions on this port; 0: off", kind="port")
    openai_host: str = _option("127.0.0.1", "address of the OpenAI API", metavar="HOST")
    companions: str = _option("", "model directory whose other files are copied beside the weights", kind="path")
    codec: str = _option("auto", "how a trainer encodes patches", choices=CODECS)
    encode_cpu_seconds: float = _option(60.0, "CPU time for 'auto' to encode a version; else plain", kind="seconds")
    store_limit_bytes: int = _option(0, "disk for blobs; 0 means 20 % of what is free", kind="size")
    upload_limit: int = _option(0, "bytes per second sent to peers, as 5M; 0 means no cap", kind="rate", metavar="RATE")
    download_limit: int = _option(0, "bytes per second taken from peers; 0 means no cap", kind="rate", metavar="RATE")
    worker_threads: int = _option(2, "threads for encoding, decoding and hashing", kind="count")
    max_staleness: int = _option(-1, "a trainer drops rollouts more versions behind; -1 keeps all", kind="staleness")
    allow_uid: tuple[str, ...] = _option((), "further user ids that may use the local socket", metavar="UID")
    version_min: str = _option(
        "", "believe no head below this version, as 0.57; for a node that lost its state", kind="version"
    )
    ready_while_stale: bool = _option(
        True, "/readyz stays 200 while the newest head has outlived its validity", kind="flag"
    )
    round_seconds: float = _option(1200.0, "a round that takes longer is reported as stuck", kind="seconds")
    watchdog_seconds: float = _option(3600.0, "a node that stands still for longer ends itself", kind="seconds")
    p2pd: str = _option("", "p2pd binary to run instead of hivemind's", kind="path")
    supervise: bool = _option(False, "start the node again when it dies of a passing fault", kind="flag")
    log_level: str = _option("info", "least important log line shown", choices=LOG_LEVELS)
    log_json: bool = _option(False, "write log lines as JSON objects", kind="flag")


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration and, for each field, where its value came from."""

    config: Config
    origins: Mapping[str, str]


def fields() -> tuple[dataclasses.Field[Any], ...]:
    """Return the configuration's fields, in the order people read them."""
    return dataclasses.fields(Config)


def flag_name(name: str) -> str:
    """Return the command-line flag of a field: ``data_dir`` -> ``--data-dir``."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """Return the environment variable of a field: ``data_dir`` -> ``PULSENET_DATA_DIR``."""
    return ENVIRONMENT_PREFIX + name.upper()


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> ResolvedConfig:
    """Combine flags, environment and file into one configuration.

    Args:
        flags: Field name to value as text (or tuple of texts, or bool); absent when not given.
        environment: The process environment.
        file: TOML file, or ``None``.

    Raises:
        UsageError: A flag's value is not allowed.
        ConfigError: A file or variable holds an unknown key or a value that is not allowed.
    """
    from_file = _read_file(file) if file is not None else {}
    _refuse_unknown_variables(environment)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for item in fields():
        name = item.name
        if name in flags:
            values[name] = _parse(item, flags[name], flag_name(name), UsageError)
            origins[name] = "flag " + flag_name(name)
        elif environment_name(name) in environment:
            values[name] = _parse(item, environment[environment_name(name)], environment_name(name), ConfigError)
            origins[name] = "environment " + environment_name(name)
        elif name in from_file:
            values[name] = _parse(item, from_file[name], f"{name} in {file}", ConfigError)
            origins[name] = f"file {file}"
        else:
            origins[name] = "default"
    config = Config(**values)
    _check_together(config, origins)
    return ResolvedConfig(config, origins)


def _read_file(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            data = opened.read(FILE_SIZE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {file}: {error}; check --config") from error
    if len(data) > FILE_SIZE_BYTES_MAX:
        raise ConfigError(f"{file} has more than {FILE_SIZE_BYTES_MAX} bytes: that is no configuration file")
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    for key in table:
        _refuse_unknown(key, [item.name for item in fields()], f"key '{key}' in {file}")
    return table


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    known = [environment_name(item.name) for item in fields()] + [ENVIRONMENT_PREFIX + "CONFIG"]
    link = next((key for key in environment if key.startswith(ENVIRONMENT_PREFIX) and key.endswith(_LINK_SUFFIX)), None)
    if link is not None:
        cause = "Kubernetes makes it of a service's name; set enableServiceLinks: false in the pod"
        raise ConfigError(f"unknown environment variable {link}: {cause}")
    for key in environment:
        if key.startswith(ENVIRONMENT_PREFIX):
            _refuse_unknown(key, known, f"environment variable {key}")


def _refuse_unknown(key: str, known: list[str], described: str) -> None:
    if key in known:
        return
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    hint = f"; did you mean {nearest[0]}?" if nearest else "; see 'pulsenet config show'"
    raise ConfigError(f"unknown {described}{hint}")


def _parse(item: dataclasses.Field[Any], raw: Any, described: str, error_type: type[ConfigError]) -> Any:
    """Turn text (or a TOML value) into the field's type, or say what is allowed."""
    try:
        if isinstance(item.default, tuple):
            parts = raw if isinstance(raw, list | tuple) else [part for part in str(raw).split(",") if part]
            return tuple(str(part) for part in parts)
        return _parse_single(item, raw)
    except ValueError as error:
        raise error_type(f"{described}: {error}") from None


def _parse_single(item: dataclasses.Field[Any], raw: Any) -> Any:
    kind, choices = item.metadata["kind"], item.metadata["choices"]
    if kind == "flag":
        return _parse_flag(raw)
    if kind == "size":
        return parse_size(raw)
    if kind == "rate":
        return parse_rate(raw)
    if kind in ("count", "port"):
        return _parse_integer(raw, 0 if kind == "port" else 1, 65_535 if kind == "port" else 1_000_000)
    if kind == "staleness":
        return _parse_integer(raw, -1, 1_000_000)
    if kind == "seconds":
        return _parse_seconds(raw)
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not text")
    if kind == "version" and raw:
        parse_version(raw)
    if "\0" in raw:
        raise ValueError(f"{raw!r} holds a zero byte")
    if choices and raw not in choices:
        raise ValueError(f"'{raw}' is not one of {', '.join(choices)}")
    return raw


def parse_version(text: str) -> Version:
    """Return the version that ``epoch.number`` names.

    Raises:
        ValueError: It names none.
    """
    if not re.fullmatch(r"\d{1,19}\.\d{1,19}", text):
        raise ValueError(f"'{text}' is no version: epoch, point, number")
    epoch, number = map(int, text.split("."))
    return Version(epoch, number)


def _parse_flag(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    lowered = str(raw).lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"'{raw}' is not true or false")


def _parse_integer(raw: Any, least: int, most: int) -> int:
    try:
        number = int(str(raw))
    except ValueError:
        raise ValueError(f"'{raw}' is not a whole number from {least} to {most}") from None
    if isinstance(raw, bool) or not least <= number <= most:
        raise ValueError(f"{raw} is not a whole number from {least} to {most}")
    return number


def _parse_seconds(raw: Any) -> float:
    try:
        number = float(str(raw))
    except ValueError:
        raise ValueError(f"'{raw}' is not a number of seconds") from None
    if not 0 < number <= 86_400:
        raise ValueError(f"{raw} is not between 0 and 86400 seconds")
    return number


def parse_size(raw: Any) -> int:
    """Turn ``10G``, ``512MiB`` or a number of bytes into bytes.

    Raises:
        ValueError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", str(raw).strip(), re.IGNORECASE)
    if match is None or isinstance(raw, bool):
        raise ValueError(f"'{raw}' is not a size such as 512M or 20G")
    return int(match.group(1)) * _SIZE_UNITS[match.group(2).upper()]


def parse_rate(raw: Any) -> int:
    """Turn ``5M``, ``512KiB/s`` or a number of bytes per second into bytes per second; 0 means no cap.

    Raises:
        ValueError: The text is not a rate, or one at which no chunk would arrive before its reader gives up.
    """
    rate = parse_size(str(raw).removesuffix("/s") if not isinstance(raw, bool) else raw)
    if 0 < rate < RATE_MIN:
        raise ValueError(f"'{raw}' is less than 64K per second, at which nothing arrives in time; 0 means no cap")
    return rate


def check_run_name(name: str) -> None:
    """Refuse what cannot name a run, and with it a directory.

    Raises:
        ValueError: The text says what a name is.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError(f"'{name}' is not a run name: use letters, digits, '.', '_' and '-' (64 at most)")


def _check_together(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse values that are fine alone and wrong together, before any network use."""

    def refuse(name: str, text: str) -> None:
        error_type = UsageError if origins[name].startswith("flag") else ConfigError
        raise error_type(f"{origins[name]}: {text}")

    try:
        check_run_name(config.run)
    except ValueError as error:
        refuse("run", str(error))
    checks: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("bootstrap", config.bootstrap),
        ("announce", config.announce),
        ("listen", (config.listen,) if config.listen else ()),
    )
    for name, given in checks:
        for address in given:
            try:
                _check_address(name, address)
            except UsageError as error:
                refuse(name, str(error))
    if not config.metrics_host:
        refuse("metrics_host", "no address, which would be all of them: give 127.0.0.1, or 0.0.0.0 if that is meant")
    wrong_wait = _find_wrong_wait(config, origins)
    if wrong_wait is not None:
        refuse(*wrong_wait)
    if config.engine == "vllm" and not config.engine_url and not config.serve:
        refuse("engine", "vllm needs --engine-url of a running one, or --serve -- and the arguments to start one")
    if config.engine == "sglang" and not (config.engine_url and config.companions):
        refuse(
            "engine",
            "sglang needs --engine-url of a running one, and --companions, the model directory it started from",
        )
    if config.engine not in ("vllm", "sglang") and config.engine_url:
        refuse("engine_url", "goes with --engine vllm or sglang")
    if config.engine != "vllm" and config.serve:
        refuse("serve", "goes with --engine vllm")
    if config.engine_reload and not (config.engine == "vllm" and (config.serve or config.companions)):
        refuse(
            "engine_reload", "goes with --engine vllm, and --companions, the model directory, unless --serve says it"
        )
    if config.openai_port and config.engine != "vllm":
        refuse("openai_port", "goes with --engine vllm")
    if not config.openai_host:
        refuse("openai_host", "no address, which would be all of them: give 127.0.0.1, or 0.0.0.0 if that is meant")
    if config.engine_url and config.serve:
        refuse("engine_url", "goes with an engine that somebody else runs, not with --serve")
    if config.engine == "vllm":
        from pulsenetd.engines.vllm_server import check_server

        try:
            check_server(config.engine_url, config.serve)
        except ConfigError as error:
            refuse("serve" if config.serve else "engine_url", str(error))
    for uid in config.allow_uid:
        if not re.fullmatch(r"[0-9]{1,10}", uid):
            refuse("allow_uid", f"'{uid}' is not a numeric user id")


def _find_wrong_wait(config: Config, origins: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the field that makes a wait no longer than the one inside it, and what is wrong with it (A-CLI-6)."""
    from pulsenet.node.timeouts import Timeouts, check_timeouts

    waits = Timeouts(round_seconds=config.round_seconds, watchdog_seconds=config.watchdog_seconds)
    try:
        check_timeouts(waits)
    except ConfigError:
        source, longest = waits.source_switch_seconds, waits.watchdog_seconds
        if waits.round_seconds <= source:
            text = f"{waits.round_seconds:g} is not above {source:g}, the seconds after which a source is given up"
            return "round_seconds", text
        if origins["round_seconds"] == "default":
            return "watchdog_seconds", f"{longest:g} is not above --round-seconds, {waits.round_seconds:g}"
        return "round_seconds", f"{waits.round_seconds:g} is not below --watchdog-seconds, {longest:g}"
    return None


def _check_address(name: str, address: str) -> None:
    # Imported late, as above: commands that use no network do not need the daemon's packages.
    from pulsenetd.network import addresses

    if name == "bootstrap":
        addresses.check_announced(addresses.split_address(address)[0])
    elif name == "announce":
        addresses.check_announced(address)
    else:
        addresses.check_address(address)
