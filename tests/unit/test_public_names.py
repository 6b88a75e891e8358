"""``import pulsenet`` offers these names, each documented, and loads nothing until one is asked for."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pulsenet

SOURCE = Path(pulsenet.__file__)
PACKAGE = SOURCE.parent
NAMES = {
    "attach_publisher", "Publisher", "PublishResult", "PublishCallback", "LogprobCheck",
    "join_rounds", "OuterOptimizer", "OuterCallback", "join_mixing", "GossipOptimizer", "Probe",
    "attach_engine", "Subscriber", "Engine", "InProcessEngine", "FilesEngine", "Sample", "PulsenetError",
}  # fmt: skip
"""A name more is a promise more: see docs/compatibility.md."""

TORCHLESS = ("PublishResult", "attach_engine", "Subscriber", "Engine", "FilesEngine", "Sample", "PulsenetError")


def test_the_public_names_are_these() -> None:
    assert set(pulsenet.__all__) == NAMES == set(dir(pulsenet))
    assert len(pulsenet.__all__) == len(NAMES)
    with pytest.raises(AttributeError, match="no attribute 'publish'"):
        _ = pulsenet.publish  # type: ignore[attr-defined]


def test_type_checkers_see_what_programs_get() -> None:
    block = next(node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If))
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {name: f"pulsenet.{place}" for name, place in pulsenet._PLACES.items()}
    assert typed.keys() == NAMES


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import sys, pulsenet; print(*[name for name in sys.modules if name.startswith(('pulsenet.', 'numpy'))])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def test_names_that_compute_nothing_need_no_torch() -> None:
    code = f"import sys, pulsenet; [getattr(pulsenet, name) for name in {TORCHLESS}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "training"), ("transformers", "transformers"), ("pulsenet.typo", "")]
)
def test_a_package_that_is_not_installed_is_named_with_what_brings_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the library alone met the inside of it: twenty lines, and no next step."""

    def lack(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(pulsenet, "import_module", lack)
    step = f"pulsenet.Publisher needs {package}, which is not installed: pip install 'pulsenet[{extra}]'"
    with pytest.raises(ModuleNotFoundError) as caught:
        _ = pulsenet.Publisher
    assert (str(caught.value), caught.value.name) == (step if extra else f"No module named '{package}'", package)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_is_documented_with_all_that_can_be_called_on_it(name: str) -> None:
    assert f"`{name}`" in (pulsenet.__doc__ or "")
    try:
        found = getattr(pulsenet, name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers"):
            raise
        pytest.skip("needs torch or transformers")
    silent = [name] if not found.__doc__ else []
    if inspect.isclass(found):
        own = {key: value for key, value in vars(found).items() if not key.startswith("_")}
        functions = {key: getattr(value, "fget", value) for key, value in own.items()}
        silent += [
            key for key, value in functions.items() if callable(value) and not inspect.getdoc(getattr(found, key))
        ]
    assert not silent


@pytest.mark.parametrize("place", sorted(set(pulsenet._PLACES.values())))
def test_errors_that_a_public_function_raises_itself_are_named(place: str) -> None:
    source = (PACKAGE / Path(*place.split("."))).with_suffix(".py").read_text()
    unnamed = []
    for top in ast.parse(source).body:
        if getattr(top, "name", "") not in NAMES:
            continue
        for function in (node for node in ast.walk(top) if isinstance(node, ast.FunctionDef)):
            raised = {ast.unparse(node).split()[1].partition("(")[0] for node in ast.walk(function) if is_raising(node)}
            # What a constructor raises stands with its class, what an engine's methods raise with the protocol.
            text = ast.get_docstring(top if function.name.startswith("__") else function) or ""
            is_public = not function.name.startswith("_") or function.name in ("__init__", "__post_init__")
            if is_public and ":meth:`Engine." not in text:
                unnamed += [f"{function.name}: {error}" for error in raised if error[0].isupper() and error not in text]
    assert not unnamed


def is_raising(node: ast.AST) -> bool:
    """Return whether a node raises something new."""
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)


def test_references_in_docstrings_lead_somewhere() -> None:
    """Roles name modules and what is in them, as the API reference links them."""
    broken = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for target in re.findall(r":(?:func|class|mod|meth|data|attr|exc):`~?(pulsenet\.[\w.]+)`", text):
            if not leads_somewhere(target):
                broken.append(f"{path.relative_to(PACKAGE)}: {target}")
    assert not broken, "\n".join(broken)


def leads_somewhere(target: str) -> bool:
    """Return whether sources define what a dotted name says; read, because some need packages of their own."""
    words = target.split(".")[1:]
    for count in range(len(words), -1, -1):
        place = PACKAGE.joinpath(*words[:count])
        path = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
        if path.exists():
            source = path.read_text()
            starts = r"^\s*(?:class |def |async def |\")?"
            return all(re.search(rf"{starts}{word}\b", source, re.MULTILINE) for word in words[count:])
    return False
