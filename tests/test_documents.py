"""The documents say what the code does.

Every line of every shell block is looked at: commands of pulsenet are parsed by the real parser, scripts of this
checkout must be there, and all other programs are named below. Lines of the walk-throughs are run as well, by
``tests/e2e/test_walk_throughs.py``, which says which are not and why. Python blocks must compile, and what they import
from pulsenet must be there; those that are files are run by the same test, those of docs/trl.md by ``tests/trl``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulsenetd import errors
from pulsenetd.cli import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
KEY = "12D3KooWS2z8DM9oktBGuW7ZeaKC56ghMPB5Yjn3ed1toUFuWwso"
PLACEHOLDERS = (
    ("pulse1...", "pulse1abc"),
    ("12D3KooW...", KEY),
    ("<key>", KEY),
    ("<name>", "myrun"),
)
OTHER_PROGRAMS = {
    "ssh", "sudo", "python", "python3", "python3.11", "pip", "source", ".", "export", "cd", "kill", "curl", "git",
    "vllm", "make", "docker", "kubectl", "systemctl", "systemd-sysusers", "install", "promtool", "prometheus", "cp",
    "mkdir",
}  # fmt: skip
"""What a reader of a shell block may be asked to start besides pulsenet."""
NOT_INSTALLED = ("trl", "datasets", "vllm", "transformers", "peft", "accelerate", "sglang")


def shell_lines() -> Iterator[tuple[str, str]]:
    """Yield every line of every shell block, continuations joined, placeholders filled in."""
    for path in DOCUMENTS:
        blocks = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                text = line.removeprefix("$ ").split(" #")[0].strip()
                if text and not text.startswith("#"):
                    yield path.relative_to(ROOT).as_posix(), fill(text)


def fill(text: str) -> str:
    for placeholder, value in PLACEHOLDERS:
        text = text.replace(placeholder, value)
    return text


def commands() -> Iterator[tuple[str, str]]:
    """Yield every ``pulsenet`` command shown in a document."""
    for name, line in shell_lines():
        # What follows in a pipe, or in brackets of the shell, is another program's.
        yield from ((name, part.strip()) for part in re.split(r"\s[|>]\s", line)[:1] if part.startswith("pulsenet "))
    for path in DOCUMENTS:
        # In running text a command may stand for all its uses; one with an option is meant as it stands.
        for command in re.findall(r"`(pulsenet [^`]*--[^`]+)`", path.read_text()):
            if not re.search(r"[<|…]|(?<!pulse1)(?<!KooW)\.\.\.", command):
                yield path.relative_to(ROOT).as_posix(), fill(command)


@pytest.mark.parametrize(("document", "command"), sorted(set(commands())))
def test_every_command_in_the_documents_parses(document: str, command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "COMMAND":
        return  # stands for each
    if words[-1] in ("--help", "--version"):
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args(words)
        assert caught.value.code == 0
        return
    build_parser().parse_args(words)


def test_no_line_of_a_shell_block_escapes_the_tests() -> None:
    """Neither by a program nobody knows, nor by a placeholder that is not filled in."""
    strange = []
    for name, line in shell_lines():
        words = line.split()
        program = next((word for word in words if "=" not in word or word in OTHER_PROGRAMS), words[0])
        known = (
            program == "pulsenet" or program in OTHER_PROGRAMS or program.startswith((".venv", ".ci/", "~/", "/opt/"))
        )
        if not known or (program == "pulsenet" and re.search(r"[<…]|\.\.\.", line)):
            strange.append(f"{name}: {line}")
    assert not strange, "\n".join(strange)


def test_scripts_that_the_documents_name_exist() -> None:
    missing = []
    for path in DOCUMENTS:
        for script in re.findall(
            r"\b((?:tests|deploy|\.ci|daemon|proto)/[\w./-]+\.(?:py|sh|toml|yaml|yml|json|md))", path.read_text()
        ):
            relative = (path.parent / script, ROOT / script, ROOT / "tests" / script)
            if not any(one.exists() for one in relative):
                missing.append(f"{path.name}: {script}")
    assert not missing, "\n".join(missing)


def test_tests_and_vectors_that_the_documents_name_exist() -> None:
    vectors = {path.stem for path in (ROOT / "proto" / "vectors").rglob("*.json")}
    missing = []
    for path in DOCUMENTS:
        text = path.read_text()
        for file, test in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", text):
            source = ROOT / "tests" / file
            if not source.exists() or f"def {test}(" not in source.read_text():
                missing.append(f"{path.name}: {file}::{test}")
        for names in re.findall(r"\bvectors? (`[\w-]+`(?:,\s+`[\w-]+`)*)", text):
            missing += [f"{path.name}: {name}" for name in re.findall(r"[\w-]+", names) if name not in vectors]
    assert not missing, "\n".join(missing)


def python_blocks() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
        ):
            yield f"{path.name}-{number}", block


PYTHON_BLOCKS = list(python_blocks())


@pytest.mark.parametrize(("name", "block"), PYTHON_BLOCKS, ids=[name for name, _ in PYTHON_BLOCKS])
def test_python_blocks_compile_and_import_what_is_there(name: str, block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("pulsenet", "pulsenetd"):
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("pulsenet", "pulsenetd"):
            check_names(node.module or "", [alias.name for alias in node.names])


def check_names(module: str, names: list[str]) -> None:
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Edges to packages with an environment of their own are read instead.
        if (error.name or "").split(".")[0] not in NOT_INSTALLED:
            raise
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
        defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        assert set(names) <= defined, f"{module} lacks {set(names) - defined}"
        return
    for one in names:
        assert hasattr(found, one) or importlib.util.find_spec(f"{module}.{one}"), f"{module} has no {one}"


def test_the_exit_code_table_names_every_code() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    shown = {int(code) for row in re.findall(r"^\| ([0-9, ]+) \|", text, re.MULTILINE) for code in row.split(",")}
    assert {code for _, code in errors.EXIT_CODES} <= shown
    assert set(errors.EXIT_MEANINGS) == shown


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        used = set(re.findall(r"(?:^|`)\s*make ([a-z-]+)", path.read_text(), re.MULTILINE))
        assert used <= targets, f"{path.name}: {used - targets}"


def test_the_index_leads_to_every_document() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#]+)", index))
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in {*linked, "README.md"}]
    assert not missing, missing


def test_sections_that_links_name_exist() -> None:
    broken = []
    for path in DOCUMENTS:
        for target, section in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text()):
            document = path if not target else (path.parent / target).resolve()
            if document.suffix == ".md" and section not in anchors(document):
                broken.append(f"{path.name}: {target}#{section}")
    assert not broken, "\n".join(broken)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
