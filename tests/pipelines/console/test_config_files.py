"""A YAML file that is not what a command wants is refused in one sentence that names the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stree.common.errors import UsageError
from stree_lab import study
from stree_pipelines.commands import (
    benchmark_checkpoint,
    compare,
    distill,
    eval_spec,
    generate_data,
    train_target,
)
from stree_pipelines.console.config_files import read_yaml

CONFIGS = Path(__file__).parents[3] / "configs"
# Arguments before the file, of each command that reads one
COMMANDS = {
    "eval": (eval_spec.main, ["--config"]),
    "gate": (benchmark_checkpoint.main, ["new", "--config"]),
    "answers": (generate_data.main, ["--config"]),
    "distil": (distill.main, ["fit", "--run_dir", "r", "--config"]),
    "train": (train_target.main, ["fit", "--run_dir", "r", "--config"]),
    "compare": (compare.main, []),
    "study": (study.main, ["train"]),
}
# A folder of configs/, and how a file in it is called where another command reads it
KINDS = {
    "target": "a config of `stree train`",
    "distill": "a config of `stree distil`",
    "eval": "a config of `stree eval`",
    "compare": "a config of `stree compare`",
    "study": "a config of `stree study`",
    "strategies": "a config of `stree distil` or `stree train`",
    "trees": "a tree, for an option `tree`",
}
READ_BY = {"target": {"train"}, "distill": {"distil"}, "eval": {"eval", "gate"},
           "compare": {"compare"}, "study": {"study"}, "strategies": {"distil", "train"},
           "trees": set()}
STUDY = """\
out: runs
distil: configs/distill/quickstart.yaml
trees: [paper]
compare: {target: t, benchmarks: [b]}
"""
COMPARISON = """\
target: t
out: o
benchmarks: [b]
arms: [{name: a, drafter: d}]
"""


def refusal(command: str, path: Path, capsys) -> str:
    main, arguments = COMMANDS[command]
    with pytest.raises((SystemExit, UsageError)) as stopped:
        main([*arguments, str(path)])
    if isinstance(stopped.value, SystemExit):
        assert stopped.value.code == UsageError.exit_code
        return capsys.readouterr().err
    return str(stopped.value)


@pytest.mark.quick(23)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " is empty, wanted keys with values"),
        ("- a\n- b\n", " is a list, wanted keys with values"),
        ("plain text\n", " is 'plain text', wanted keys with values"),
        ("3: a\n", " has the key 3, wanted keys that are text"),
        (b"a: \xff\n", " is no text in UTF-8 (byte 4), wanted a YAML file"),
        ("a: b: c\n", " cannot be read as YAML: mapping values are not allowed"),
        ("a: [1\n", " cannot be read as YAML: did not find expected ',' or ']' (line 2, column 1)"),
        ("a: \x07\n", " cannot be read as YAML: unacceptable character #x0007: control characters"),
        ("a: 1\nb: 2\na: 3\n", " cannot be read as YAML: key 'a' is given twice, in lines 1 and 3"),
        ("a: {b: [{c: 1, c: 2}]}\n", " cannot be read as YAML: key 'c' is given twice, in lines 1"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_without_keys_and_values_is_refused(command, text, said, tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refusal(command, path, capsys)
    assert f"{path}{said}" in line
    assert "unicode string" not in line and "\n" not in line.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_in_place_of_a_file_is_refused(command, tmp_path, capsys):
    line = refusal(command, tmp_path, capsys)
    assert f"{tmp_path} is a folder, wanted a YAML file" in line and "Parser key" not in line


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no\.yaml cannot be read \(No such file.*: give a YAML"):
        read_yaml(tmp_path / "no.yaml")


@pytest.mark.quick(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_shipped_config_of_another_command_is_called_by_its_name(command, kind, capsys):
    if command in READ_BY[kind]:
        return
    for path in sorted((CONFIGS / kind).glob("*.yaml")):
        assert f"{path} is {KINDS[kind]}; this command wants keys such as " in refusal(
            command, path, capsys
        )


@pytest.mark.parametrize(
    ("command", "text", "said"),
    [
        ("eval", "temperatures: hot", "temperatures is 'hot', wanted a list"),
        ("eval", "temperatures: [hot]", "temperatures is hot, wanted a number"),
        ("eval", "limit: many", "limit is many, wanted a whole number"),
        ("eval", "limit: 2024-01-01", "limit is 2024-01-01, wanted a whole number"),
        ("eval", "target: {a: 1}", "target is {'a': 1}, wanted text"),
        ("eval", "benchmarks: {a: 1, b: 2}", "benchmarks is {'a': 1, 'b': 2}, wanted a list"),
        ("eval", "nothing: {a: 1, b: 2}", "there is no option nothing"),
        ("eval", "dry_run: perhaps", "dry_run is 'perhaps', wanted true or false"),
        ("gate", "fail_below: 3", "fail_below is 3, wanted a list"),
        ("answers", "num_rows: some", "num_rows is some, wanted a whole number"),
        ("distil", "checkpoint:", "checkpoint is null, wanted keys with values"),
        ("distil", "trainer: 3", "trainer is 3, wanted keys with values"),
        ("distil", "model: {optimizer: muon}", "model.optimizer is 'muon', wanted keys with"),
        ("distil", "model: {features: yes please}", "model.features is yes please, wanted keys"),
        ("distil", "model: {loss: {kind: kl}}",
         "model.loss.kind is kl, wanted forward_kl, reverse_kl, jsd, tv or lk"),
        ("distil", "data: {train: 5}", "data.train is 5, wanted text or a list"),
        ("distil", "model: {target: t}\ndata: {limits: 3}", "there is no option data.limits (did"),
        ("compare", COMPARISON + "limit: many", "limit is 'many', wanted a whole number or null"),
        ("compare", COMPARISON + "temperatures: hot", "temperatures is 'hot', wanted a list"),
        ("compare", COMPARISON + "dtype: 16", "dtype is 16, wanted text"),
        ("compare", COMPARISON + "ignore_eos: 1", "ignore_eos is 1, wanted true or false"),
        ("study", STUDY.replace("out: runs", "out: [3]") + "arms: [{name: a}]", "out is [3], want"),
        ("study", STUDY.replace("[paper]", "[3]") + "arms: [{name: a}]", "trees is [3], wanted a"),
        ("study", STUDY + "arms: {name: a}", "arms is {'name': 'a'}, wanted a list"),
        ("study", STUDY + "arms: [a]", "arm 1 is 'a', wanted keys with values"),
        ("study", STUDY + "arms: [{name: a, distil: 3}]", "distil of arm 1 is 3, wanted text"),
        ("study", STUDY + "arms: [{name: a, set: 3}]", "set of arm 1 is 3, wanted keys with val"),
        ("study", STUDY + "arms: [{name: a, seed: [3]}]", "arm 1 has ['seed'], wanted some of na"),
        ("study", STUDY + "arms: [{name: a}]\nhold_back: {source: a, train: 3, prompts: c}",
         "train of hold_back is 3, wanted text"),
        ("study", STUDY + "arms: [{name: a}]\nhold_back: {source: a}",
         "hold_back does not say prompts, train"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_file(command, text, said, tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text(text + "\n")
    line = refusal(command, path, capsys)
    assert f"{path}: {said}" in line
    assert not re.search("<class|Error:|Traceback", line)


def test_an_option_of_the_command_line_is_not_blamed_on_a_file(tmp_path, capsys):
    path = tmp_path / "file.yaml"
    path.write_text("limit: 3\n")
    main, arguments = COMMANDS["eval"]
    with pytest.raises(SystemExit):
        main([*arguments, str(path), "--limit", "many"])
    assert capsys.readouterr().err.startswith("error: limit is many, wanted a whole number")
    with pytest.raises(SystemExit):
        main(["--config=" + str(path), "--top_k", "many"])
    assert "error: top_k is many" in capsys.readouterr().err
