"""Take an evaluation's settings and command line, or refuse them by one clear error."""

from __future__ import annotations

import inspect
import io
import re
from pathlib import Path

import pytest
import torch
import toys
from tiny_evaluation import export, quiet, settings_for, tiny_model

import stree
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CheckpointRefused, InvariantBroken, UsageError
from stree_pipelines.commands import chat, generate_data
from stree_pipelines.commands.eval_spec import build_parser
from stree_pipelines.commands.eval_spec import main as eval_spec
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.evaluation import plan
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import EvaluationSettings, resolve
from stree_pipelines.evaluation.result_store import ResultStore

REPOSITORY = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_target_of_which_no_eos_is_known_is_refused_unless_eos_is_ignored(world, tmp_path):
    """Its rows would say that answers end at EOS."""
    model, tokenizer = load_model(world / "target"), load_tokenizer(world / "target")
    model.config = model.config.replace(eos_token_ids=())
    save_model(model, tmp_path / "asked", tokenizer)
    tokenizer.eos_token = None
    save_model(model, tmp_path / "endless", tokenizer)
    quiet(settings_for(world, tmp_path / "out", target=str(tmp_path / "asked"), ignore_eos=False))
    settings = {"target": str(tmp_path / "endless"), "chat_template": "stree-chat"}
    quiet(settings_for(world, tmp_path / "out", **settings))
    with pytest.raises(UsageError, match=r"neither the config of .*/endless nor its tokenizer"):
        quiet(settings_for(world, tmp_path / "out", **settings, ignore_eos=False))


def test_without_the_baseline_nothing_is_relative(world, tmp_path):
    settings = settings_for(world, tmp_path, methods=("stree",), limit=1)
    (row,) = quiet(settings).evaluate(export(world, 10))
    assert row.speedup is None and row.lossless is None
    assert row.acceptance_length >= 1


def test_without_a_checkpoint_only_the_baseline_runs(world, tmp_path):
    (row,) = quiet(settings_for(world, tmp_path, limit=1)).evaluate(None)
    assert row.method == "autoregressive"


def test_a_drafter_of_another_tokenizer_is_refused(world, tmp_path):
    other = train_tokenizer(["entirely different words"] * 3, 384, tmp_path / "tokenizer")
    save_model(tiny_model(0, vocab_size=384), tmp_path / "drafter", other)
    with pytest.raises(CheckpointRefused, match="tokenizer"):
        quiet(settings_for(world, tmp_path / "out")).evaluate(tmp_path / "drafter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("medusa",)}, "wanted some of plain, chain, tree"),
        ({"methods": ("tree", "stree")}, r"methods are .*, wanted each once"),
        ({"temperatures": (-1.0,)}, r"temperature is -1\.0, wanted 0 \(greedy\) or"),
        ({"temperatures": (0.0, float("nan"))}, "temperature is nan"),
        ({"temperatures": (1e-9,)}, "temperature is 1e-09"),
        ({"benchmarks": ()}, "at least one"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"methods": ("stree", "stree")}, "each once"),
        ({"temperatures": (0.0, 0.0)}, "each once"),
    ],
)
def test_settings_that_make_no_sense_are_refused(world, tmp_path, changes, message):
    """Methods have the names of tables and those of rows."""
    with pytest.raises(UsageError, match=message):
        settings_for(world, tmp_path, **changes)
    given = settings_for(world, tmp_path, methods=("plain", "stree"))
    assert given.methods == ("autoregressive", "stree")


def test_what_may_go_beyond_the_target_s_positions_is_refused_at_start(world, tmp_path):
    """Two turns of 2,048 tokens and the questions exceed 4,096 positions; without attention there
    are none."""
    quiet(settings_for(world, tmp_path, max_new_tokens=2048))
    attending = tmp_path / "attending"
    tokenizer = load_tokenizer(world / "target")
    save_model(toys.tiny_model(1, torch.float32, vocab_size=320), attending, tokenizer)
    refusal = r"talk prompt b has \d+ tokens, and answers of up to 4096: the target was made"
    with pytest.raises(UsageError, match=refusal):
        quiet(settings_for(world, tmp_path, max_new_tokens=2048, target=str(attending)))


def test_command_evaluates_a_run_and_goes_on_past_a_broken_export(world, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "drafter").mkdir(parents=True)
    (run / "command.json").write_text((world / "command.json").read_text())
    for step in (1, 10, 100):
        (run / f"drafter/step-{step:08d}").symlink_to(export(world, step))
    broken = tiny_model(3)
    with torch.no_grad():
        broken.head_weight.fill_(float("nan"))
    (run / "drafter/step-00000010").unlink()
    save_model(broken, run / "drafter/step-00000010", load_tokenizer(world / "target"))
    arguments = [
        "--run", str(run), "--benchmarks", str(world / "talk.jsonl"), "--temperatures", "0",
        "--limit", "1", "--max-new-tokens", "4", "--device", "cpu",
    ]
    with pytest.raises(InvariantBroken, match=r"1 of 3 checkpoints failed.*step-00000010"):
        eval_spec(arguments)
    said = capsys.readouterr().err
    assert "3 checkpoints × 3 methods × 1 temperatures × 1 prompts of talk: 9 answers" in said
    assert "plain decoding beside each checkpoint" in said
    steps = {row.step for row in ResultStore(run / "eval").results()}
    assert steps == {None, 1, 100}


def test_command_says_what_is_missing(tmp_path):
    with pytest.raises(UsageError, match="--target"):
        eval_spec(["--out", str(tmp_path)])
    with pytest.raises(UsageError, match="no step-"):
        eval_spec(["--run", str(tmp_path)])
    with pytest.raises(UsageError, match="the methods tree need a drafter: give"):
        eval_spec(["--out", str(tmp_path), "--target", str(tmp_path), "--methods", "stree"])


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs/eval").glob("*.yaml")))
def test_shipped_configs_are_understood(config):
    options = build_parser().parse_args(["--config", str(config), "--out", "o", "--target", "t"])
    settings, checkpoints = resolve(options.as_dict())
    assert settings.methods == ("autoregressive", "vanilla_sd", "stree")
    assert checkpoints == [None]


def test_progress_says_the_tree_s_figures_first(world, tmp_path):
    """The others' figures follow, plain decoding's also where its row exists."""
    settings = settings_for(world, tmp_path, limit=1)
    said = []
    for step in (1, 10):
        stream = io.StringIO()
        Evaluation(
            settings, workers=Workers(), progress=EvaluationProgress(stream)
        ).evaluate(export(world, step))
        lines = stream.getvalue().splitlines()  # a remark on the drafter's weights may come first
        said.append([line for line in lines if line.startswith("step ")])
    for step, (warm_up, measured) in zip((1, 10), said, strict=True):
        assert warm_up.startswith(f"step {step}  warm-up  3/3")
        assert re.sub(r"(τ|,|;|plain|chain τ x,) \d+(\.\d+)?", r"\1 x", measured) == (
            f"step {step}  talk T=0  1/1  tree τ x, x tok/s; chain τ x, x; plain x"
            "  ETA 0:00"
        )


def test_commands_take_the_dtype_of_stree_load(world, monkeypatch):
    """Their default is auto, and the settings of an evaluation name what it stands for."""
    defaults = {
        chat.build_parser().get_default("dtype"), generate_data.build_parser().get_default("dtype")
    }
    assert defaults == {"auto", inspect.signature(stree.load).parameters["dtype"].default}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = dict(target=str(world / "target"), out="out", benchmarks=("b",))
    assert EvaluationSettings(**given).dtype == "float32"
    monkeypatch.setattr(plan, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("stree.loading.stored_dtype", lambda folder: torch.bfloat16)
    assert EvaluationSettings(**given).dtype == "bfloat16"
    assert EvaluationSettings(**given, dtype="float32").dtype == "float32"
