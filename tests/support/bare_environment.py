"""An environment that has only what pyproject.toml requires, without or with some extras."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(requirements: Sequence[str]) -> dict[str, Distribution]:
    """Return the installed distributions that requirements need, transitively, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        wanted, extra = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for part in ("", *wanted.extras):
            if (wanted.name, part) in seen:
                continue
            seen.add((wanted.name, part))
            try:
                found[wanted.name] = distribution(wanted.name)
            except PackageNotFoundError:  # whoever runs the tests does without it
                continue
            waiting += [(Requirement(text), part) for text in found[wanted.name].requires or ()]
    return found


def make_environment(folder: Path, *extras: str) -> Path:
    """Fill a folder with links to the packages that the base and some extras require."""
    requirements = list(PROJECT["dependencies"])
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    folder.mkdir()
    for installed in required(requirements).values():
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(str(installed.locate_file(top)))
    return folder


def python_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where only the packages in a folder, and the repository's own, can be imported."""
    sources = (ROOT, ROOT / "kernels", ROOT / "pipelines", folder)
    return subprocess.run(
        [sys.executable, "-S", *arguments],  # -S: without the environment's own packages
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        capture_output=True,
        text=True,
    )
