"""All commands do alike: options in full, the one that was meant, a help of the command's own
options, one code for what is not there, and configs that work from any folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import datasets
import pytest
from tiny_run import distill_arguments, make_workspace

from stree.common.errors import NotFound, StreeError, UsageError
from stree.generation import GenerationConfig
from stree.tree_policy.names import TREE_POLICIES
from stree_lab import (
    bench_cpu,
    bench_decode,
    bench_kernels,
    bench_queue,
    bench_report,
    bench_serving,
    bench_training,
    calibration,
    grown_trees,
    paper_tables,
    project_speed,
    study,
)
from stree_lab.benches import trees_pay
from stree_lab.studies import prompt_memory
from stree_pipelines.commands import (
    ask_conversations,
    benchmark_checkpoint,
    chat,
    compare,
    corpus,
    distill,
    doctor,
    eval_spec,
    fetch_benchmarks,
    generate_data,
    profile_drafter,
    report,
    serve,
    suggest_tree,
    train_target,
)
from stree_pipelines.comparison.gate import gate
from stree_pipelines.console import command_line
from stree_pipelines.console.command_line import (
    CommandParser,
    PlainParser,
    input_path,
    suggestion,
)
from stree_pipelines.data import loss_mask, tokenizer_training
from stree_pipelines.evaluation.plan import EvaluationSettings

REPOSITORY = Path(__file__).parents[3]
QUICKSTART = str(REPOSITORY / "configs/distill/quickstart.yaml")
TARGET = str(REPOSITORY / "configs/target/python-docs.yaml")
GATE = ["new", "--baseline", "old", "--target", "t", "--out", "o", "--fail_below", "speedup=-5%"]
# Each command, with what it cannot do without.
COMMANDS = {
    distill: ["fit", "--config", QUICKSTART, "--run_dir", "r"],
    train_target: ["fit", "--config", TARGET, "--run_dir", "r"],
    generate_data: ["--target", "t", "--prompts", "p", "--out", "o"],
    eval_spec: ["--run", "r"],
    benchmark_checkpoint: GATE,
    compare: ["c.yaml"],
    project_speed: ["c", "--times", "t"],
    study: ["train", "s.yaml"],
    profile_drafter: ["r"],
    report: ["r"],
    suggest_tree: ["r"],
    chat: ["t"],
    serve: ["t"],
    corpus: ["o"],
    fetch_benchmarks: [],
    ask_conversations: ["c", "--out", "o"],
    doctor: [],
    tokenizer_training: ["o", "--data", "d"],
    loss_mask: ["d", "--tokenizer", "t"],
    bench_cpu: ["o"],
    bench_decode: ["o"],
    bench_kernels: ["o"],
    bench_queue: ["o", "--target", "t"],
    bench_serving: ["o", "--target", "t"],
    bench_training: ["o"],
    bench_report: ["o"],
    calibration: ["t", "d", "o"],
    grown_trees: ["t", "d", "o"],
    prompt_memory: ["c", "o"],
    paper_tables: ["stree-table-1"],
    trees_pay: [],
}
NAMES = {command: command.__name__.rpartition(".")[2] for command in COMMANDS}


def label(value: object) -> str:
    if isinstance(value, list):
        return " ".join(value).replace(f"{REPOSITORY}/", "")
    return NAMES.get(value, str(value))


def told(main, arguments: list[str], capsys) -> str:
    """Return the line with which a command refuses its arguments, by code 2."""
    with pytest.raises((SystemExit, UsageError)) as stopped:
        main(arguments)
    error = capsys.readouterr().err
    if isinstance(stopped.value, UsageError):
        return str(stopped.value)
    assert stopped.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    return error


def help_of(main, arguments: list[str], capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_every_command_is_here():
    with_parsers = (path for path in (REPOSITORY / "pipelines").rglob("*.py")
                    if re.search(r"^def main\(", path.read_text(), re.M))
    assert {path.stem for path in with_parsers} == set(NAMES.values())


def test_every_command_has_its_script():
    scripts = {path.stem for path in (REPOSITORY / "pipelines").glob("*.py")}
    commands = (REPOSITORY / "pipelines/stree_pipelines/commands").glob("*.py")
    assert scripts == {path.stem for path in commands} <= set(NAMES.values())


def test_an_evaluation_s_defaults_stand_in_one_place():
    usual = {
        each.name: list(each.default) if isinstance(each.default, tuple) else each.default
        for each in fields(EvaluationSettings) if each.default is not MISSING
    }
    assert usual["max_new_tokens"] == GenerationConfig().max_new_tokens
    assert usual.items() <= eval_spec.build_parser().get_defaults().as_dict().items()
    gated = benchmark_checkpoint.build_parser().get_defaults().as_dict()
    assert {name for name in usual if usual[name] != gated[name]} == {
        "methods", "temperatures",  # the gate asks for less: the tree, at T = 0
    }


def test_only_what_trains_waits_for_the_trainer():
    """Lightning takes longer to import than all the rest."""
    waits = {name for name, module in imported_by_command() if module.startswith("lightning")}
    assert waits == {"distill", "train_target", "bench_training", "study"}


def imported_by_command() -> Iterator[tuple[str, str]]:
    """Yield (command, module) for each module that is imported when a command starts."""
    folders = {"stree": "stree", "stree_kernels": "kernels/stree_kernels",
               "stree_pipelines": "pipelines/stree_pipelines", "stree_lab": "pipelines/stree_lab"}

    @cache
    def imports(path: Path) -> set[str]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {each.module or "" for each in tree.body if isinstance(each, ast.ImportFrom)}
        for each in tree.body:
            if isinstance(each, ast.Import):
                found |= {alias.name for alias in each.names}
            if isinstance(each, ast.ImportFrom):  # each name may be a module
                found |= {f"{each.module}.{alias.name}" for alias in each.names}
        return found

    for command in COMMANDS:
        seen, todo = set(), [command.__name__]
        while todo:
            module = todo.pop()
            package, _, rest = module.partition(".")
            path = REPOSITORY / folders.get(package, package) / f"{rest.replace('.', '/')}.py"
            if module not in seen and path.is_file():
                todo += imports(path)
            seen.add(module)
        yield from ((NAMES[command], module) for module in seen)


# Options


@pytest.mark.parametrize("command", COMMANDS, ids=label)
def test_an_abbreviation_is_refused_with_what_was_meant(command, capsys, monkeypatch):
    text = help_of(command.main, ["--help"], capsys, monkeypatch)
    meant = max(re.findall(r"^  (?:-\w, )?(--[\w.-]+)", text, re.M), key=len)
    line = told(command.main, [*COMMANDS[command], meant[:-1], "1"], capsys)
    assert f"there is no option {meant[:-1]} (did you mean {meant}?); see " in line


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--run_dri", "--run_dir"),  # letters in another order
        ("--max_steps", "--trainer.max_steps"),  # of a section that was forgotten
        ("--optimizer.lr", "--model.optimizer.lr"),
        ("--model.optimizer.warm_up_steps", "--model.optimizer.warmup_steps"),
        ("--data.seq_length", "--data.sequence_length"),
        ("--exports.first", "--export.first"),
    ],
)
def test_the_option_that_was_meant(given, meant, capsys):
    line = told(distill.main, [*COMMANDS[distill], given, "1"], capsys)
    assert f"no option {given} (did you mean {meant}?)" in line


def test_nothing_is_suggested_where_nothing_is_alike():
    assert suggestion("--nonsense", ["--run_dir", "--out"]) == ""
    assert suggestion("--model.nonsense", ["--model.lr", "--data.train"]) == ""


@pytest.mark.parametrize(
    ("command", "key", "line"),
    [
        (distill, "trainer: {max_step: 3}", "trainer.max_step (did you mean trainer.max_steps?)"),
        (distill, "model: {optimizer: {lrr: 3}}", "model.optimizer.lrr (did you mean model.optimi"),
        (distill, "data: {limits: 3}", "data.limits (did you mean data.limit?)"),
        (eval_spec, "temperature: [0]", "temperature (did you mean temperatures?)"),
        (benchmark_checkpoint, "fail_bellow: 3", "fail_bellow (did you mean fail_below?)"),
    ],
)
def test_a_key_of_a_file_is_spelt_in_full_too(command, key, line, tmp_path, capsys):
    (tmp_path / "typo.yaml").write_text(key + "\n")
    arguments = [*COMMANDS[command], "--config", str(tmp_path / "typo.yaml")]
    assert f"there is no option {line}" in told(command.main, arguments, capsys)


@pytest.mark.parametrize("main", [distill.main, train_target.main])
def test_a_forgotten_fit_is_told(main, capsys):
    for arguments in ([], ["--config", QUICKSTART, "--run_dir", "r"], ["fti"]):
        assert re.fullmatch(
            r"`fit` is missing, which comes first: .* fit --config FILE --run_dir FOLDER",
            told(main, arguments, capsys),
        )
    assert told(main, ["fit"], capsys).startswith("--config and --run_dir are missing: ")


def test_what_is_missing_is_named(capsys):
    line = told(distill.main, ["fit", "--run_dir", "r"], capsys)
    assert "model.target is missing: give a YAML file with --config, or --model.target …" in line
    line = told(distill.main, ["fit", "--run_dir", "r", "--model.target", "t"], capsys)
    assert "error: data.train is missing" in line
    assert "--run_dir is missing" in told(distill.main, ["fit", "--config", QUICKSTART], capsys)
    assert "error: run is missing; see stree report --help" in told(report.main, [], capsys)
    line = told(profile_drafter.main, ["r", "too", "many"], capsys)
    assert "error: 'too' is one argument too many" in line


@pytest.mark.parametrize(
    ("main", "given", "said"),
    [
        (eval_spec.main, ["--top_k", "1.5"], "top_k is 1.5, wanted a whole number"),
        (distill.main, ["fit", "--export.first", "null"], "export.first is null, wanted a whole"),
    ],
)
def test_a_value_of_another_type_is_told_in_our_words(main, given, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == UsageError.exit_code
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [CommandParser, PlainParser])
def test_an_option_is_also_spelt_with_dashes(kind):
    parser = kind("some.py")
    parser.add_argument("--max_new_tokens", type=int)
    for spelt in ("--max_new_tokens", "--max-new-tokens"):
        assert parser.parse_args([spelt, "3"]).max_new_tokens == 3


def test_a_gate_without_thresholds_is_told_by_an_example_that_is_one(capsys):
    arguments = [each for each in GATE if "fail_below" not in each and "=" not in each]
    line = told(benchmark_checkpoint.main, arguments, capsys)
    assert "error: fail_below is missing, as in: stree gate " in line
    example = line.partition("stree gate ")[2].partition(";")[0].split()
    options = benchmark_checkpoint.build_parser().parse_args(example)
    assert all(map(gate.Threshold.parse, options.fail_below))


# Help


@pytest.mark.parametrize(
    "command",
    [eval_spec, benchmark_checkpoint, bench_queue, generate_data, chat],
    ids=label,
)
def test_the_help_says_what_trees_there_are(command, capsys, monkeypatch):
    text = "".join(help_of(command.main, ["--help"], capsys, monkeypatch).split())
    assert re.search(r"--treeTREE.{0,30}" + re.escape("".join(TREE_POLICIES.split())), text)


@pytest.mark.parametrize("command", COMMANDS, ids=label)
def test_the_help_has_one_default_each(command, capsys, monkeypatch):
    text = help_of(command.main, ["--help"], capsys, monkeypatch)
    options = re.split(r"\n(?=  -)", text)[1:]
    assert options and all(option.count("default") <= 1 for option in options), options
    assert "null" not in re.findall(r"\(default: (\w+)", text)


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if not each.__name__.startswith("stree_lab")], ids=label
)
def test_the_help_fits_80_columns(command, capsys, monkeypatch):
    text = help_of(command.main, ["--help"], capsys, monkeypatch)
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("main", [distill.main, train_target.main])
def test_a_training_s_help_has_its_own_options_first(main, capsys, monkeypatch):
    text = help_of(main, ["--help"], capsys, monkeypatch)
    assert text == help_of(main, ["fit", "--help"], capsys, monkeypatch)
    assert text.splitlines()[0].endswith(" fit --config FILE --run_dir FOLDER [options]")
    names = re.findall(r"^  (?:-\w, )?--([\w.]+)", text, re.M)
    ours = [name for name in names if not name.startswith("trainer.")]
    assert names[: len(ours)] == ours and {"run_dir", "data.train", "model.optimizer.lr"} < set(
        ours
    )
    assert {"trainer.max_steps", "trainer.devices", "trainer.precision"} < set(names)
    assert not {"trainer", "model", "trainer.barebones", "trainer.fast_dev_run"} & set(names)
    assert "-->" not in text and "Lightning's" in text
    everything = help_of(main, ["--help_all"], capsys, monkeypatch)
    assert "--trainer.barebones" in everything and "Default: ``" not in everything


# Files


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (distill, ["--config", "absent.yaml"]),
        (distill, ["--model.target", "absent", "--dry_run"]),
        (distill, ["--model.target", str(REPOSITORY / "checkpoints/python-docs-hybrid"),
                   "--data.train", "absent.jsonl", "--dry_run"]),
        (train_target, ["--config", "absent.yaml"]),
        (train_target, ["--data.train", "absent.jsonl", "--dry_run"]),
        (eval_spec, []),
        (eval_spec, ["--config", "absent.yaml"]),
        (eval_spec, ["--target", "absent", "--methods", "autoregressive", "--benchmarks",
                     "{prompts}"]),
        (eval_spec, ["--target", str(REPOSITORY / "checkpoints/python-docs-hybrid"), "--checkpoint",
                     "absent", "--benchmarks", "{prompts}"]),
        (eval_spec, ["--target", "t", "--checkpoint", "c", "--benchmarks", "absent.jsonl"]),
        (eval_spec, ["--target", "t", "--checkpoint", "c", "--benchmarks", "{prompts}", "--tree",
                     "absent.yaml"]),
        (benchmark_checkpoint, []),
        (profile_drafter, []),
        (report, []),
        (suggest_tree, []),
        (doctor, ["--target", "absent"]),
        (tokenizer_training, []),
        (loss_mask, []),
        (bench_report, []),
    ],
    ids=label,
)
def test_what_is_not_there_has_one_code(command, more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", absent)
    (tmp_path / "train.jsonl").write_text(
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}\n'
    )
    (tmp_path / "prompts.jsonl").write_text('{"id": "1", "turns": ["a"]}\n')
    given = COMMANDS[command]
    if command is eval_spec and "--target" in more:
        given = ["--out", "o", "--device", "cpu"]
    files = {"{train}": "train.jsonl", "{prompts}": "prompts.jsonl"}
    with pytest.raises((SystemExit, StreeError)) as stopped:
        command.main([*given, *(files.get(each, each) for each in more)])
    code = getattr(stopped.value, "code", getattr(stopped.value, "exit_code", None))
    assert code == NotFound.exit_code == 2
    said = capsys.readouterr().err if isinstance(stopped.value, SystemExit) else str(stopped.value)
    assert "no " in said or "names no file" in said


def absent(name: str, **options):
    raise FileNotFoundError(name)


def test_a_path_is_of_the_current_folder_then_of_the_repository(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "data").mkdir(parents=True)
    monkeypatch.setattr(command_line, "SHIPPED_ROOT", there)
    monkeypatch.chdir(here)
    (there / "data/a.jsonl").write_text("")
    (there / "paper").write_text("")
    assert input_path("data/a.jsonl") == str(there / "data/a.jsonl")
    (here / "data/a.jsonl").write_text("")
    assert input_path("data/a.jsonl") == "data/a.jsonl"
    for as_given in ("data/absent", "paper", "{% if a/b %}" * 999, str(there / "data/a.jsonl")):
        assert input_path(as_given) == as_given


def test_a_shipped_config_finds_its_files_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = EvaluationSettings(
        "checkpoints/python-docs-hybrid", "eval", ("configs/eval/quickstart.yaml", "mt_bench"),
        tree="configs/trees/paper.yaml",
    )
    assert settings.target == str(REPOSITORY / "checkpoints/python-docs-hybrid")
    assert settings.benchmarks == (str(REPOSITORY / "configs/eval/quickstart.yaml"), "mt_bench")
    assert settings.out == "eval" and settings.method("stree").tree.num_nodes == 13
    for config in (QUICKSTART, "configs/distill/quickstart.yaml"):
        given = ["fit", "--config", config, "--run_dir", "r"]
        with pytest.raises(
            NotFound, match=r"data/absent\.jsonl: no such file"
        ):  # the target is found
            distill.main([*given, "--data.train", "data/absent.jsonl", "--dry_run"])


@pytest.mark.costly
def test_a_run_goes_on_from_another_folder(tmp_path, monkeypatch, capsys):
    """Its configuration keeps the names as they were given, so it is the same run."""
    repository = tmp_path / "repository/files"
    repository.mkdir(parents=True)
    make_workspace(repository)
    monkeypatch.setattr(command_line, "SHIPPED_ROOT", repository.parent)
    for folder, steps in ((repository.parent, 1), (tmp_path, 2)):
        monkeypatch.chdir(folder)
        distill.main(distill_arguments(Path("files"), tmp_path / "run", steps=steps))
    assert "resuming from" in capsys.readouterr().out
    assert "target: files/target\n" in (tmp_path / "run/config.yaml").read_text()
    eval_spec.main([
        "--run", str(tmp_path / "run"), "--benchmarks", str(prompts(tmp_path)), "--device", "cpu",
        "--dry_run",
    ])
    assert f"target: {repository}/target\n" in capsys.readouterr().out


def prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"id": "1", "turns": ["What is 1 plus 2?"]}\n')
    return path
