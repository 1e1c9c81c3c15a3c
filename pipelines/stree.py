"""Hand over to the real package `stree`, or say in one line that this Python does not have it.

`python pipelines/NAME.py` looks for modules in this folder first, so a command's first `import
stree` ends here. The folder then leaves the path, as no import should find its modules.
"""

import shlex
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
sys.path[:] = [each for each in sys.path if not each or Path(each).resolve() != _here]
del sys.modules["stree"]
try:
    import stree  # noqa: F401  (takes the place of this module in sys.modules)
except ModuleNotFoundError as error:
    if error.name != "stree":
        raise
    _python = _here.parent / ".venv" / "bin" / "python"
    _todo = (
        f"type {shlex.join([str(_python), *sys.argv])}, or first . {_python.parent}/activate"
        if _python.exists()
        else f"type make install in {_here.parent}, then . .venv/bin/activate"
    )
    print(f"error: {sys.executable} does not have stree: {_todo}", file=sys.stderr)
    sys.exit(2)
