"""`stree`: every command under one name, by its own options, from a wheel and any folder too."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from documented import Command, lines_written_in, require_parse
from tiny_run import make_workspace

import stree
from stree.__main__ import COMMANDS, main
from stree.common.errors import UsageError, exit_with_reason
from stree_pipelines.console.command_line import typed_command
from stree_pipelines.evaluation.result_store import ResultStore

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


FIGURES = {  # of a paper or a page each, with a bench's use
    "stree_lab.calibration", "stree_lab.grown_trees", "stree_lab.studies.prompt_memory",
    "stree_lab.benches.trees_pay",
}


def test_every_command_but_the_benchmarks_is_there():
    def has_main(path: Path) -> bool:
        tree = ast.parse(path.read_text())
        return any(isinstance(each, ast.FunctionDef) and each.name == "main" for each in tree.body)

    folder = REPOSITORY / "pipelines"
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if not path.stem.startswith("bench_") and has_main(path)
    }
    assert {f"{entry.package}.{entry.module}" for entry in COMMANDS.values()} == modules - FIGURES


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_s_help_and_errors_call_it_by_its_name(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: stree {name} ")
    assert f"{COMMANDS[name].module}.py" not in text
    with pytest.raises((SystemExit, UsageError)):
        main([name, "--no_such_option", "1"])
    assert f"see stree {name}" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_command_lines_in_a_command_s_help_are_understood(name, capsys, tmp_path, monkeypatch):
    """From a folder that is no clone, so that nothing names a script."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    (tmp_path / "help.md").write_text(capsys.readouterr().out.partition("\n\n")[2])
    commands = [Command.of(line) for line in lines_written_in(tmp_path / "help.md")]
    assert {command.script for command in commands} <= {"stree"}
    for command in commands:
        require_parse(command)


def test_texts_name_the_version_and_the_extras():
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^## ([\d.]+)", changes, re.M)[0] == stree.__version__
    for name in ("CITATION.cff", "docs/beside-others.md"):
        text = (REPOSITORY / name).read_text()
        named = re.findall(r"^(?:version:|\|.*\*\*stree-spec\*\*) (\d[\d.]*)", text, re.M)
        assert set(named) == {stree.__version__}
    extras = re.search(r"The extras are (.*?)\.", changes)[1]
    assert re.findall(r"`(\w+)`", extras) == list(PROJECT["project"]["optional-dependencies"])


def test_help_version_and_what_there_is_not(capsys):
    for arguments in ([], ["--help"]):
        main(arguments)
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in COMMANDS)
    main(["--version"])
    assert capsys.readouterr().out == f"stree {stree.__version__}\n"
    with pytest.raises(UsageError, match=r"no command 'evl' \(did you mean eval\?\); see stree"):
        main(["evl"])
    with pytest.raises(UsageError, match="are missing: stree distil fit --config FILE"):
        main(["distil"])


@pytest.mark.parametrize(
    ("started", "typed"),
    [
        ("pipelines/distill.py", "python pipelines/distill.py fit"),
        ("/opt/bin/stree", "stree fit"),
        ("/opt/lib/stree/__main__.py", "python -m stree fit"),
    ],
)
def test_what_to_type_again_is_what_was_typed(started, typed, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started, "fit"])
    assert typed_command() == typed


def test_the_version_stands_in_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]


# Every command in a process of its own, which has what the commands share but finds no PyTorch.
WITHOUT_TORCH = """
import os, sys
sys.modules["torch"] = None
import jsonargparse, matplotlib.figure
from stree.__main__ import COMMANDS, main
from stree.common.errors import exit_with_reason
for name in COMMANDS:
    print(f"{name} says", file=sys.stderr, flush=True)
    if os.fork() == 0:
        exit_with_reason(lambda: main([name, "--help"]))
    print(f"{name} ends with {os.waitstatus_to_exitcode(os.wait()[1])}", flush=True)
import stree
assert stree.__version__ and "load" in stree.__all__
"""


@pytest.mark.long
def test_a_python_without_pytorch_is_told_so_in_a_line():
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    need_none = {"corpus", "fetch", "mask", "tokenizer"}
    told = ran.stderr.splitlines()
    for name in COMMANDS:
        code = 0 if name in need_none else UsageError.exit_code
        assert f"{name} ends with {code}\n" in ran.stdout
    errors = [line for line in told if line.startswith("error: ")]
    assert len(errors) == len(COMMANDS) - len(need_none)
    assert all(f"{sys.executable} has no library 'torch': install" in line for line in errors)
    assert "Traceback" not in ran.stderr


SCRIPTS = sorted(path.name for path in (REPOSITORY / "pipelines").glob("*.py"))


def without_libraries(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-ES", str(script), "--help"], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_run_by_a_wrong_python_says_so_in_a_line(name):
    ran = without_libraries(REPOSITORY / "pipelines" / name)
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} does not have stree: type ")
    assert ran.returncode == UsageError.exit_code and not ran.stdout


def test_the_line_about_a_wrong_python_says_how_to_set_up(tmp_path):
    """A clone has an environment, or none."""
    (tmp_path / "pipelines").mkdir()
    for name in ("stree_pipelines/run_script.py", "corpus.py"):
        (tmp_path / "pipelines" / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "pipelines" / name, tmp_path / "pipelines" / name)
    script = tmp_path / "pipelines/corpus.py"
    told = without_libraries(script).stderr
    assert f"type make install in {tmp_path}, then . .venv/bin/activate" in told
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    told = without_libraries(script).stderr
    assert f"type {python} {script} --help, or first . {python.parent}/activate" in told


def test_a_module_of_our_own_that_is_missing_is_a_mistake_of_ours():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        exit_with_reason(lambda: __import__("stree.no_such_module"))


def test_what_stree_exports_is_imported_when_asked_for():
    assert set(stree.__all__) <= set(dir(stree))
    for name in stree.__all__:
        assert getattr(stree, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        stree.lode  # noqa: B018


def test_make_alone_lists_its_targets():
    told = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for target in ("install", "quickstart", "test", "check"):
        assert f"  make {target} " in told.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A fresh environment's bin, with the wheel and nothing else of this project: libraries are
    those of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("stree", "kernels", "pipelines", "configs"):
        shutil.copytree(
            REPOSITORY / name,
            folder / "source" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(folder / "source")], check=True)
    venv.create(folder / "venv", with_pip=False)
    python, (wheel,) = folder / "venv/bin/python", folder.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    libraries = [each for each in sys.path if Path(each, "torch").is_dir()]
    (site / "libraries.pth").write_text("\n".join(libraries) + "\n")
    return python.parent


# What is typed in one process, which imports PyTorch once; then where the code came from.
SESSION = """
import shlex, sys
from stree.__main__ import main
for line in sys.argv[1:]:
    main(shlex.split(line))
import stree, stree_kernels.ops, stree_pipelines.commands.report as report
print(*(each.__file__ for each in (stree, stree_kernels.ops, report)), sep="\\n")
"""


@pytest.mark.costly
def test_the_wheel_runs_outside_a_clone(installed, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    make_workspace(tmp_path)
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(str(installed / "stree"), "--version") == f"stree {stree.__version__}\n"
    target = tmp_path / "target"
    evaluation = (
        f"eval --config configs/eval/quickstart.yaml --target {target} --checkpoint {target} "
        "--benchmarks starter --tree configs/trees/paper.yaml --limit 1 --max_new_tokens 4 "
        "--temperatures 0 --out eval"
    )
    typed = ("doctor", "corpus data", evaluation, "report eval")
    told = run(str(installed / "python"), "-c", SESSION, *typed)
    assert "Everything that is needed works." in told
    assert all(Path(each).is_relative_to(installed.parent) for each in told.splitlines()[-3:])
    assert {row.method for row in ResultStore(empty / "eval").results()} == {
        "autoregressive", "vanilla_sd", "stree"
    }
    assert (empty / "eval/report.html").is_file()
    assert (empty / "data/train.jsonl").is_file()
    refused = subprocess.run(
        [str(installed / "stree"), "papers", "--list"],
        cwd=empty, env=environment, capture_output=True, text=True, check=False,
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "stree papers needs a clone of the repository" in refused.stderr
