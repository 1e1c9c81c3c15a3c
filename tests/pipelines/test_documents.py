"""Commands in documents run, or are at least understood by the program that they call."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from documented import Command, commands_in, lines_written_in, require_parse, script_of
from families import random_reference
from tiny_run import write_conversations
from toys import TableTarget
from transformers import GraniteConfig, GraniteForCausalLM

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.__main__ import COMMANDS
from stree.checkpoints import configs as checkpoint_configs
from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.shared_weights import shared_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.models.model import HybridModel
from stree.models.slicing import drafter_config_from, slice_drafter
from stree_pipelines.evaluation.benchmarks import CORPUS_PREFIX
from stree_pipelines.evaluation.result_store import ResultStore

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
PYTHON, TRANSFORMERS = REPOSITORY / "docs/python.md", REPOSITORY / "docs/transformers.md"
# What a new reader types, in this order
GUIDES = (README, REPOSITORY / "docs/commands.md", REPOSITORY / "docs/your-own.md")
TARGET = "checkpoints/python-docs-hybrid"
TEXTS = (  # with command lines in blocks, prose, comments or docstrings
    "*.md", "slurm/*.md", "slurm/*.sh", "docs/**/*.md", "docs/**/*.py", f"{TARGET}/*.md",
    "kernels/*.md", "tests/*.md", "configs/**/*.yaml", "pipelines/**/*.md", "pipelines/**/*.py",
    "stree/**/*.py",
)
FEWER = ("stree COMMAND", "python -m stree COMMAND", "--help")  # no command in full
PAGES = [  # written by hand, and about the code as it is
    README, *(REPOSITORY / name for name in ("CONTRIBUTING.md", "tests/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
SMALL = ["--limit", "1", "--max_new_tokens", "6", "--temperatures", "0"]
# The guides' cheap commands, and what makes some of them cheap: these run, in this order.
RUN = {
    "pipelines/distill.py": ["--dry_run"],
    "pipelines/eval_spec.py": SMALL,
    "pipelines/profile_drafter.py": [],
    "pipelines/report.py": [],
    "pipelines/suggest_tree.py": [],
    "pipelines/benchmark_checkpoint.py": SMALL,
    "pipelines/fetch_benchmarks.py": ["--dry_run"],
}
ELSEWHERE = (  # their own tests run them
    "pipelines/corpus.py", "pipelines/doctor.py", "pipelines/ask_conversations.py",
    "stree",  # serve
)


def is_about_the_quickstart(command: Command) -> bool:
    return "8b" not in str(command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a clone as after the quickstart's training, with its corpus and a run's exports."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("pipelines", "checkpoints", "slurm", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(REPOSITORY / name)
    shutil.copytree(REPOSITORY / "configs", folder / "configs")
    own = folder / "configs/eval/mine.yaml"  # what documents call a config of the reader's
    shutil.copy(folder / "configs/eval/chat-75m.yaml", own)
    data, run = folder / "data/python-docs", folder / "runs/quickstart"
    data.mkdir(parents=True)
    for name in ("train.jsonl", "valid.jsonl"):
        write_conversations(data / name)
    prompt = {"id": f"{CORPUS_PREFIX}json.loads", "turns": ["What does `json.loads` do?"]}
    (data / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    target = REPOSITORY / TARGET
    for step in (101, 320):
        torch.manual_seed(step)
        drafter = HybridModel(drafter_config_from(load_config(target)))
        save_model(
            drafter, run / f"drafter/step-{step:08d}", load_tokenizer(target),
            extra_files={"provenance.json": json.dumps({"step": step})},
        )
    (run / "drafter/latest").symlink_to("step-00000320")
    (run / "command.json").write_text(json.dumps({"target": TARGET}))
    return folder


@pytest.fixture(scope="module")
def evaluated(folder):
    """Every command of the guides' about the quickstart that is in `RUN` was run."""
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in (each for guide in GUIDES for each in commands_in(guide)):
            if command.script in RUN and is_about_the_quickstart(command):
                command.main([*command.arguments, *RUN[command.script]])
                said[command.script] = command
    assert set(said) == set(RUN)
    return folder


@pytest.mark.costly
def test_readme_s_commands_run(evaluated):
    run = evaluated / "runs/quickstart"
    rows = ResultStore(run / "eval").results()
    assert {(row.step, row.method) for row in rows} == {
        (None, "autoregressive"),
        *((step, method) for step in (101, 320) for method in ("vanilla_sd", "stree")),
    }
    for made in (
        "report.html",
        "drafter/step-00000320/speculation_profile.json",
        "gate/summary.md",
    ):
        assert (run / made).is_file(), made
    assert (evaluated / "tree.yaml").is_file()


@pytest.mark.costly
def test_readme_s_python_runs(evaluated, monkeypatch, capsys):
    monkeypatch.chdir(evaluated)
    names: dict = {}
    for guide, opening in (
        (README, "from Python:\n"), (PYTHON, "From two checkpoints:\n"),
        (PYTHON, "With a decoder from above:\n"), (PYTHON, "while others\ngo on:\n"),
    ):
        text = guide.read_text(encoding="utf-8").partition(opening)[2]
        code = re.match(r"\n((?:    .*\n|\n)+)", text)[1]
        code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", code)
        exec(re.sub(r"^    ", "", code, flags=re.MULTILINE), names)
        assert capsys.readouterr().out.strip()


def test_python_with_a_model_of_transformers_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(REPOSITORY / TARGET)
    granite = random_reference("granite", 1, vocab=len(tokenizer))
    for saved in (granite, tokenizer):
        saved.save_pretrained("ibm-granite/granite-4.0-h-tiny")
    save_model(slice_drafter(shared_model(granite), [0]), "runs/granite/drafter/latest")
    text = TRANSFORMERS.read_text(encoding="utf-8").partition("with Granite 4 H:\n")[2]
    code = re.match(r"\n((?:    .*\n|\n)+)", text)[1]
    names: dict = {}
    exec(re.sub(r"^    ", "", code, flags=re.MULTILINE), names)
    printed = capsys.readouterr().out
    assert "The json module" in printed and "acceptance length" in printed
    assert names["ids"].shape[0] == 2 and len(code.splitlines()) <= 12


def test_examples_of_parts_of_one_s_own_decode_as_plainly():
    """The page's drafter, verifier and tree policy give the target's output."""
    text = (REPOSITORY / "docs/add-a-verifier.md").read_text(encoding="utf-8")
    table = torch.full((8, 8, 8), -5.0)
    for token in range(8):
        table[:, token, (token + 1) % 8] = 5.0  # counts, and begins anew
    target = TableTarget(table)
    request = Request([5, 6], GenerationConfig(40))
    wanted = Decoder(target, max_length=128).generate(request.prompt_ids, request.generation)
    scope, blocks = {"target": target}, re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, scope)  # this repository's own words
        policy = scope["decoder"].tree_policy
        if policy.needs_step_times:  # what it measured depends on the machine's load
            policy.costs = SimpleNamespace(
                of=lambda num_rows, tree: 1.0, catch_up=0.0
            )
        (output,) = scope["decoder"].generate([request])
        assert output.tokens == wanted.tokens
        longest = max(output.stats.accepted_per_call)
        assert (longest <= 1) == ("AtMostOne" in block)
        if "class Greedy" in block:
            ours = scope["decoder"]
            theirs = BatchDecoder(target, scope["Repeats"](), ours.tree, num_rows=2, max_length=128)
            theirs.generate([request])
            state, other = ours.worker.state, theirs.worker.state
            for name in ("position", "root", "block"):
                assert torch.equal(getattr(state, name), getattr(other, name)), name
            assert torch.equal(ours.cache.path, theirs.cache.path)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_names_that_a_page_places_in_a_file_are_there(page):
    text = page.read_text(encoding="utf-8")
    where = r"`([\w.]+)` \(`((?:stree|kernels|pipelines)/[\w/]+\.py)`\)"
    for name, file in re.findall(where, re.sub(r"\s+", " ", text)):
        source = (REPOSITORY / file).read_text(encoding="utf-8")
        for part in name.split("."):
            assert re.search(rf"^\s*(?:def |class )?{part}\b", source, re.MULTILINE), (name, file)


def test_a_page_has_at_most_2000_words():
    """What is longer has a finding page before it: papers.md has paper-claims.md."""
    words = {
        str(page.relative_to(REPOSITORY)): sum(
            any(map(str.isalnum, word)) for word in page.read_text("utf-8").split()
        )
        for page in PAGES
    }
    assert {name for name, count in words.items() if count > 2000} <= {"docs/papers.md"}


def test_a_tree_of_one_s_own_is_the_same_from_yaml_and_in_python(tmp_path):
    text = (REPOSITORY / "docs/your-own.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    (tmp_path / "mine.yaml").write_text(written)
    assert TokenTree.load(tmp_path / "mine.yaml") == scope["tree"]
    assert scope["tree"].children[0] == (1, 2) and scope["tree"].depths == (0, 1, 1, 2, 2, 3)


def test_a_family_as_the_page_adds_one_is_transformers_own(tmp_path, monkeypatch):
    text = (REPOSITORY / "docs/add-a-family.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    monkeypatch.setattr(checkpoint_configs, "FAMILIES", (scope["LAYOUT"],))
    for tied in (True, False):
        torch.manual_seed(tied)
        granite = GraniteForCausalLM(GraniteConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=2, intermediate_size=40,
            num_attention_heads=6, num_key_value_heads=3, embedding_multiplier=1.7,
            attention_multiplier=0.3, residual_multiplier=0.6, logits_scaling=2.5,
            tie_word_embeddings=tied,
        ))
        granite.save_pretrained(tmp_path / str(tied))
        model = load_model(tmp_path / str(tied), torch.device("cpu"), torch.float32)
        tokens = torch.randint(3, 61, (2, 9))
        with torch.no_grad():
            wanted, given = granite(tokens).logits, model(tokens)
        assert (given - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        decoder = Decoder(model, slice_drafter(model, [0]), TokenTree.chain(2), max_length=64)
        prompt, options = tokens[:1], dict(max_new_tokens=8, ignore_eos=True)
        plain = Decoder(model, max_length=64).generate(prompt, **options)
        assert decoder.generate(prompt, **options).tokens == plain.tokens


def test_every_command_of_the_guides_is_known():
    """A new page is in these tests, and none falls out of them unnoticed."""
    commands = [command for guide in GUIDES for command in commands_in(guide)]
    others = {command.words[:2] for command in commands if command.script is None}
    assert others == {
        ("make", "quickstart"), ("make", "test"), ("hf", "download"),
    }
    assert {command.script for command in commands if command.script} == {*RUN, *ELSEWHERE}
    page = (REPOSITORY / "docs/commands.md").read_text(encoding="utf-8")
    for name, entry in COMMANDS.items():
        assert f"| `stree {name}` | `{script_of(entry)}` | {entry.summary} |" in page


@pytest.fixture(scope="module")
def lines():
    """Every command line that a text tells people to type, with one file that has it."""
    files = {path for pattern in TEXTS for path in REPOSITORY.glob(pattern)}
    files.discard(REPOSITORY / "CHANGELOG.md")  # names what is gone
    found = {line: str(path) for path in sorted(files) for line in lines_written_in(path)}
    return {line: path for line, path in found.items() if not any(map(line.count, FEWER))}


@pytest.mark.costly
def test_every_command_line_is_understood_as_it_stands(lines, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len(lines) > 200
    for line, path in lines.items():
        command = Command.of(line)
        assert command.script is not None, (path, line)
        try:
            require_parse(command)
        except SystemExit as refused:
            pytest.fail(f"{path}: {line}: exit {refused.code}")


@pytest.mark.parametrize("line", [
    "torchrun --nproc-per-node 2 pipelines/eval_spec.py --run runs/a",  # --run is ambiguous
    "accelerate launch stree eval --run runs/a",  # no script
    "python pipelines/eval_spec.py --runs runs/a",
])
def test_a_command_line_that_fails_when_typed_is_found(line):
    with pytest.raises((SystemExit, AssertionError)):
        require_parse(Command.of(line))


def test_scripts_named_beside_commands_run_when_called(monkeypatch):
    """A script without a call of its main would end silently."""
    for entry in COMMANDS.values():
        script = script_of(entry)
        source = (REPOSITORY / script).read_text(encoding="utf-8")
        assert '\nif __name__ == "__main__":\n' in source, script


@pytest.mark.parametrize("target", ["quickstart", "chat"])
def test_what_make_runs_is_understood(target, folder, monkeypatch):
    monkeypatch.chdir(folder)
    told = subprocess.run(["make", "-n", target], capture_output=True, text=True, check=True)
    lines = told.stdout.replace("\\\n", " ").splitlines()
    commands = [Command.of(line) for line in lines if "pipelines/" in line]
    assert len(commands) == {"quickstart": 5, "chat": 7}[target]
    assert "../" not in told.stdout  # nothing beside the clone
    for command in commands:
        require_parse(command)


def test_the_workflow_runs_all_that_a_submission_must_pass():
    """One script, which people run as well, and a target where there is a GPU."""
    root = Path(__file__).parents[2]

    def steps(workflow):
        jobs = yaml.safe_load((root / f".github/workflows/{workflow}").read_text())["jobs"]
        return [step.get("run", "") for job in jobs.values() for step in job["steps"]]

    assert ".ci/run" in [step.split(" ")[0] for step in steps("tests.yml")]
    assert "make test-gpu" in steps("gpu.yml")
    script = (root / ".ci/run").read_text()
    assert all(
        name in script for name in ("tests/slurm", "test_compile.py", "deepspeed", "by_libraries")
    )


def test_the_site_s_search_works_in_pages_opened_from_disk():
    """Its index and its worker are scripts of the site: browsers load nothing else from disk."""
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    assert not site["use_directory_urls"] and "offline" in site["plugins"]
    (worker,) = site["extra"]["polyfills"]
    assert "window.Worker=" in (REPOSITORY / "docs" / worker).read_text()


def test_the_site_says_the_language_of_code_blocks(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # docs/ is what mkdocs copies
    hooks = runpy.run_path(str(REPOSITORY / "docs/site_hooks.py"), run_name="site_hooks")
    fenced, language = hooks["fenced"], hooks["language"]
    blocks = (
        "Text:\n\n    python x.py \\\n        --more\n\n    make\n\nMore:\n\n    import stree\n"
    )
    assert fenced(blocks) == (
        "Text:\n\n```bash\npython x.py \\\n    --more\n\nmake\n```\n\nMore:\n\n"
        "```python\nimport stree\n```\n"
    )
    for kept in ("- item\n\n      its code\n\n", "```python\nclass A:\n\n    x = 1\n```\n"):
        assert fenced(kept) == kept
    assert language("name: mine\ntrain: x") == "yaml" and language("h ← a·h (of it)") == "text"
    told = subprocess.run(["make", "-n", "docs"], cwd=REPOSITORY, capture_output=True, text=True)
    (build,) = (line for line in told.stdout.splitlines() if "mkdocs build" in line)
    assert build.startswith("PYTHONDONTWRITEBYTECODE=1 ")
