"""Run a command for a script of pipelines/, or say in one line that this Python lacks `stree`."""

import importlib
import shlex
import sys
from pathlib import Path


def run(name: str) -> None:
    """Run the command in the module of that name in `stree_pipelines.commands`, then exit.

    The exit code is 2 where this Python does not have the package `stree`: most often the
    environment that `make install` sets up has not been activated.
    """
    try:
        from stree.common.errors import exit_with_reason
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "stree":
            raise
        root = Path(sys.argv[0]).resolve().parents[1]
        python = root / ".venv" / "bin" / "python"
        todo = (
            f"type {shlex.join([str(python), *sys.argv])}, or first . {python.parent}/activate"
            if python.exists()
            else f"type make install in {root}, then . .venv/bin/activate"
        )
        print(f"error: {sys.executable} does not have stree: {todo}", file=sys.stderr)
        sys.exit(2)
    exit_with_reason(lambda: importlib.import_module(f"stree_pipelines.commands.{name}").main())
