"""Give commands that dry runs estimate, and count what they leave on disk."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_run import ARCHITECTURE, distill_arguments

from stree.models.config import HybridConfig

CONFIG = HybridConfig(**ARCHITECTURE)
PROMPTS = [{"id": str(i), "category": "sums", "turns": [f"What is {i} plus 2?"]} for i in range(3)]


def options_of(workspace: Path, run_dir: Path, *more: str) -> list[str]:
    kept = ("--checkpoint.every_n_steps", "2", "--checkpoint.keep_last", "2")
    return distill_arguments(workspace, run_dir, *kept, "--export.steps", "[2,5]", *more)


def evaluation_of(workspace: Path, run: Path, *more: str) -> list[str]:
    return [
        "--run", str(run), "--benchmarks", str(workspace / "prompts.jsonl"), "--device", "cpu",
        "--max-new-tokens", "8", "--ignore-eos", "--temperatures", "0", *more,
    ]


def everything_under(*folders: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for f in folders for path in (f, *f.rglob("*"))}


def bytes_under(folder: Path) -> int:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    parents = {path.resolve() for path in paths}
    return sum(path.stat().st_size for path in parents)


def architecture_options(**changes) -> list[str]:
    values = {**ARCHITECTURE, **changes}
    return [f"--model.architecture.{key}={json.dumps(value)}" for key, value in values.items()]
