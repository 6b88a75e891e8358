"""Installs the wheel into an empty environment, outside the checkout, and uses it (``make dist``).

The environment sees the packages of the one that runs this, so nothing is downloaded twice; pulsenet itself
comes from the wheel alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

FORBIDDEN_TOP_LEVEL = {"daemon", "proto", "tests", "deploy"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return its output; its failure is ours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def check_contents(wheel: Path) -> None:
    """Refuse a wheel that would overwrite other projects' packages or lacks the typing marker."""
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert not top & FORBIDDEN_TOP_LEVEL, top
    page = [f"pulsenetd/page/assets/{name}" for name in ("page.html", "status.css", "status.js", "icon.svg")]
    for name in ("pulsenet/py.typed", "pulsenetd/py.typed", *page):
        assert name in names, name
    assert any(name.endswith("licenses/LICENSE") for name in names)


def main() -> int:
    """Check, install and use the wheel in the folder given."""
    (wheel,) = Path(sys.argv[1]).resolve().glob("*.whl")
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        venv.create(work / "environment", with_pip=True)
        python = work / "environment" / "bin" / "python"
        packages = run(sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip()
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip()
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=work)
        # Behind the wheel, so that pulsenet comes from it and its dependencies from here; editable hooks stay out.
        Path(site, "dependencies.pth").write_text(f"{packages}\n")
        for finder in Path(packages).glob("__editable__*pulsenet*.pth"):
            assert not (Path(site) / finder.name).exists()
        where = run(
            python,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{site!r}, {packages!r}]; import pulsenet, pulsenetd; "
            "print(pulsenet.__file__, pulsenetd.__file__)",
            cwd=work,
        ).split()
        assert all(path.startswith(site) for path in where), where
        pulsenet = work / "environment" / "bin" / "pulsenet"
        assert run(pulsenet, "--version", cwd=work).startswith("pulsenet ")
        make = (
            "import numpy, safetensors.numpy as s; a = numpy.arange(4096, dtype=numpy.float16); "
            "s.save_file({'w': a}, 'old.safetensors'); a[7] += 1; s.save_file({'w': a}, 'new.safetensors')"
        )
        run(python, "-c", make, cwd=work)
        made = json.loads(
            run(pulsenet, "patch", "make", "old.safetensors", "new.safetensors", "-o", "p", "--json", cwd=work)
        )
        run(pulsenet, "patch", "apply", "old.safetensors", "p", "-o", "out.safetensors", cwd=work)
        old, new, out = (
            run(pulsenet, "verify", name, cwd=work)
            for name in ("old.safetensors", "new.safetensors", "out.safetensors")
        )
        assert new == out != old
        assert made["changed_count"] == 1, made
    print(f"{wheel.name} works outside the checkout")
    return 0


if __name__ == "__main__":
    sys.exit(main())
