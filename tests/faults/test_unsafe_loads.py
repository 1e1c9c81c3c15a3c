"""No code here reads files with what runs code in them: a lint over every Python file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("kernels", "stree", "pipelines")
# Its pickles come over a socket pair from this program's other process, to which nobody else writes
BETWEEN_PROCESSES = "pipelines/stree_pipelines/serving/messages.py"
# Modules whose readers run what the file says.
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy",
}
# Of these, readers are only called by the names that the lint knows.
WHOLE_MODULES = {"torch": "torch", "yaml": "yaml", "numpy": "np"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_YAML = {"full_load", "unsafe_load", "full_load_all", "unsafe_load_all", "load_all"}


def unsafe_loads(source: str) -> Iterator[str]:
    """Yield what in a module's text can run code out of a file, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for module in modules:
                if module.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"{node.lineno}: import of {module}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname not in (None, WHOLE_MODULES.get(alias.name, alias.asname)):
                        yield f"{node.lineno}: {alias.name} by another name"
            elif node.module in WHOLE_MODULES and any("load" in name for name in names):
                yield f"{node.lineno}: {node.module}'s reader without its module"
        elif isinstance(node, ast.Call) and (reason := unsafe_call(node)):
            yield f"{node.lineno}: {reason}"


def unsafe_call(call: ast.Call) -> str | None:
    *owner, name = ast.unparse(call.func).split(".")
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if not owner and name in FORBIDDEN_CALLS:
        return name
    if name == "load" and owner == ["torch"] and options.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if name == "load" and owner[:2] == ["torch", "jit"]:
        return "torch.jit.load"
    if name == "load" and owner in (["np"], ["numpy"]) and len(call.args) > 2:
        return "np.load's allow_pickle by position"
    if options.get("allow_pickle", "False") != "False":
        return "allow_pickle"
    if options.get("trust_remote_code", "False") != "False":
        return "trust_remote_code"
    if owner == ["yaml"] and name == "load":
        loader = options.get("Loader", ast.unparse(call.args[1]) if len(call.args) > 1 else "")
        if not loader.endswith("SafeLoader"):
            return "yaml.load without a SafeLoader"
    if owner == ["yaml"] and name in FORBIDDEN_YAML:
        return f"yaml.{name}"
    return None


def test_no_unsafe_loads():
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(files) > 50
    found = [
        f"{path.relative_to(REPOSITORY)}:{each}"
        for path in files
        for each in unsafe_loads(path.read_text(encoding="utf-8"))
    ]
    assert [each.rpartition(":")[::2] for each in found] == [
        (f"{BETWEEN_PROCESSES}:9", " import of pickle")
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import joblib", "import shelve, json",
        "import marshal", "import dill as d", "torch.load(p)", "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)", "np.load(p, allow_pickle=flag)", "eval(text)",
        "exec(text)", "yaml.load(text)", "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text, yaml.FullLoader)",
        "from torch import load", "import torch as t", "torch.jit.load(p)", "import runpy",
        "from yaml import unsafe_load", "np.load(p, None, True)", "import numpy as n",
        "yaml.unsafe_load(text)", "AutoModel.from_pretrained(p, trust_remote_code=True)",
    ],
)
def test_each_unsafe_load_is_found(source):
    assert list(unsafe_loads(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(p, weights_only=True)", "np.load(p, allow_pickle=False)", "np.load(p)",
        "yaml.safe_load(text)", "yaml.load(text, Loader=yaml.CSafeLoader)", "model.eval()",
        "import numpy as np", "from torch import Tensor", "import torch.nn.functional as F",
        "f(p, trust_remote_code=False)", "import pickletools", "json.load(file)",
    ],
)
def test_safe_loads_pass(source):
    assert not list(unsafe_loads(source))
