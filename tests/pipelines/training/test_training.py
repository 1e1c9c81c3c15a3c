"""Distillation and target training run as a user runs them, and their parts match cases by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from dry_runs import architecture_options
from families import random_reference
from in_8_bits import write
from tiny_run import ARCHITECTURE, VOCAB_SIZE, distill_arguments, metric_rows
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import stree
from stree.checkpoints.configs import load_config
from stree.checkpoints.load_save import load_model, save_model
from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.errors import CannotWrite, InvariantBroken, UsageError
from stree.models.config import HybridConfig
from stree.models.layers import mamba
from stree.models.model import HybridModel
from stree_pipelines.commands import distill, train_target
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.hidden_states import FeatureConfig
from stree_pipelines.training.losses import distillation_loss as losses
from stree_pipelines.training.module import TargetTraining, real_tokens, shift_left
from stree_pipelines.training.optimization import OptimizerConfig, learning_rate
from stree_pipelines.training.parallel.precision import supported_precision
from stree_pipelines.training.run.callbacks import LogMetrics

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = HybridConfig(**ARCHITECTURE)


def random_drafter(**changes) -> list[str]:
    """Return options of a drafter with random weights: the tiny target's kind, but narrower."""
    values = {**ARCHITECTURE, "num_layers": 2, "attn_layers": [], "d_model": 24, **changes}
    options: list[str] = []
    for key, value in values.items():
        options += [f"--model.drafter.{key}", json.dumps(value)]
    return options


# Parts


def test_learning_rate_warms_up_then_falls_to_the_floor():
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(step, 104, config) for step in (0, 1, 3, 4, 54, 104, 500)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1])


def test_predictions_are_counted_where_the_token_before_stands():
    assert shift_left(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, 0]]
    segments = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    mask = torch.tensor([[0, 0, 1, 0, 1, 0, 0]], dtype=torch.bool)
    assert real_tokens(segments, mask).tolist() == [[True] * 5 + [False] * 2]


def test_loss_on_all_skips_padding_and_the_first_token_of_a_segment():
    module = TargetTraining(TINY, loss_on="all")
    batch = {
        "tokens": torch.zeros(1, 7, dtype=torch.long),
        "segment_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2]]),
        "loss_mask": torch.tensor([[0, 0, 1, 0, 1, 0, 0]], dtype=torch.bool),
    }
    assert module.counted_mask(batch).tolist() == [[False, True, True, False, True, False, False]]
    module.loss_on = "assistant"
    assert module.counted_mask(batch) is batch["loss_mask"]


def test_a_target_goes_on_from_another_s_weights(tmp_path, workspace):
    module = TargetTraining(TINY, start_from=str(workspace / "target"))
    wanted, found = load_model(workspace / "target").state_dict(), module.exported.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    stored, plain = (tmp_path / name for name in ("stored", "plain"))
    write(random_reference("llama", 0).save_pretrained, tmp_path, "fp8-small-blocks")
    module = TargetTraining(load_config(stored), start_from=str(stored))
    wanted, found = load_model(plain).state_dict(), module.exported.state_dict()
    assert all(torch.allclose(tensor, wanted[name]) for name, tensor in found.items())
    wider = TINY.replace(intermediate_size=2 * TINY.intermediate_size)
    with pytest.raises(UsageError, match=r"another architecture .*size mismatch for model"):
        TargetTraining(wider, start_from=str(workspace / "target"))


def test_the_loss_predicts_the_next_token(workspace):
    """The loss equals the definition, token by token, from full logits."""
    module = Distillation(str(workspace / "target"))
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE, (2, 9))
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 9])
    mask = torch.rand(2, 9) < 0.5
    mask[:, 0] = mask[0, 4] = False
    batch = {"tokens": tokens, "segment_ids": segments, "loss_mask": mask}
    p = module.target(tokens, segments).softmax(-1)
    log_q = module.exported(tokens, segments).log_softmax(-1)
    terms = [(p[b, t - 1] * (p[b, t - 1].log() - log_q[b, t - 1])).sum() for b, t in mask.nonzero()]
    loss = module.loss_terms(module.on_before_batch_transfer(batch, 0)).loss
    torch.testing.assert_close(loss, torch.stack(terms).mean())


def test_decay_is_on_projection_matrices_only(workspace):
    module = Distillation(str(workspace / "target"))
    decayed, kept = module.configure_optimizers().param_groups
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert all("_proj" in names[id(parameter)] for parameter in decayed["params"])
    suffixes = {names[id(parameter)].rsplit(".", 2)[-2] for parameter in kept["params"]}
    assert {"embed_tokens", "norm", "conv1d"} <= suffixes
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_the_target_is_frozen_and_not_a_submodule(workspace):
    module = Distillation(str(workspace / "target"))
    assert not any(parameter.requires_grad for parameter in module.target.parameters())
    assert all(name.startswith("exported.") for name, _ in module.named_parameters())
    module.train()
    assert not module.target.training


@pytest.mark.costly
@pytest.mark.parametrize("breaks_off", [pytest.param(False, marks=pytest.mark.long), True])
def test_layers_of_a_kind_are_compiled_once(breaks_off, monkeypatch):
    """More layers make no more graphs, also where the compiler breaks off at mamba-ssm's scan."""
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compiled(self, **options, backend="eager")
    )
    monkeypatch.setattr(losses, "_compiled", lambda function: function)  # layers are counted here
    if breaks_off:
        monkeypatch.setattr(mamba, "chunk_scan", torch.compiler.disable(mamba.chunk_scan))
    tokens = torch.randint(VOCAB_SIZE, (1, 8))
    batch = {
        "tokens": tokens, "segment_ids": torch.zeros_like(tokens),
        "loss_mask": torch.ones_like(tokens, dtype=torch.bool), "number": (0, 0, 0),
    }
    graphs = []
    for num_layers in (4, 10):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        attention = tuple(range(1, num_layers, 2))
        target = TINY.replace(num_layers=num_layers, attn_layers=attention)
        module = Distillation.from_model(
            HybridModel(target), features=FeatureConfig([0, num_layers - 1]), compile_layers=True
        )
        module.prepare_layers()
        for _ in range(2):
            module.loss_terms(module.on_before_batch_transfer(batch, 0)).loss.backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_a_drafter_of_another_vocabulary_is_refused(workspace):
    architecture = TINY.replace(vocab_size=VOCAB_SIZE + 64)
    with pytest.raises(UsageError, match=r"set model\.drafter\.vocab_size"):
        Distillation(str(workspace / "target"), drafter=architecture)
    with pytest.raises(UsageError, match="one of them"):
        Distillation(str(workspace / "target"), TINY, drafter_layers=[0])


# Runs


def test_a_target_that_is_not_finite_is_what_is_blamed(workspace, tmp_path):
    target = load_model(workspace / "target")
    with torch.no_grad():
        target.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
    tokenizer = load_tokenizer(workspace / "target")
    save_model(target, tmp_path / "target", tokenizer)
    more = ("--model.target", str(tmp_path / "target"))
    with pytest.raises(InvariantBroken, match=r"step 0.*the target's model\.layers\.1\..*o_proj"):
        distill.main(distill_arguments(workspace, tmp_path / "run", *more))


def test_distilling_lowers_the_loss_and_writes_the_run_folder(workspace, tmp_path, capsys):
    run_dir = tmp_path / "run"
    more = (*random_drafter(), "--model.optimizer.lr", "0.02", "--export.steps", "[10]")
    distill.main(distill_arguments(workspace, run_dir, *more, steps=30))
    rows = metric_rows(run_dir)
    steps = [row for row in rows if row["loss"]]
    assert [int(row["step"]) for row in steps] == list(range(1, 31))
    first, last = (float(steps[i]["loss"]) for i in (0, -1))
    assert last < 0.5 * first
    assert float(steps[-1]["simulated_acceptance"]) > float(steps[0]["simulated_acceptance"])
    assert all(float(row["grad_norm"]) > 0 and float(row["lr"]) > 0 for row in steps)
    validated = [int(row["step"]) for row in rows if row["val_loss"]]
    assert validated == [4, 8, 12, 16, 20, 24, 28]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["model"]["optimizer"]["lr"] == 0.02
    command = json.loads((run_dir / "command.json").read_text())
    assert command["target"] == str(workspace / "target") and "torch" in command["versions"]
    assert {"argv", "git_sha", "seed"} <= command.keys()
    assert list((run_dir / "tensorboard").glob("events.*"))
    output = capsys.readouterr().out
    assert "step 30/30  loss " in output and "tok/s  ETA 0:00" in output


@pytest.mark.costly
def test_a_transformer_is_distilled_likewise_and_is_a_llama_of_transformers(workspace, tmp_path):
    """Samples of a packed row see nothing of each other. Tolerances are of fp32 sums in another
    order."""
    more = (*random_drafter(attn_layers=[0, 1]), "--model.optimizer.lr", "0.02")
    distill.main(distill_arguments(workspace, tmp_path, *more, steps=20))
    losses = [float(row["loss"]) for row in metric_rows(tmp_path) if row["loss"]]
    assert losses[-1] < 0.7 * losses[0]
    drafter = tmp_path / "drafter/latest"
    assert not (drafter / "mamba_config.json").exists()
    ours, theirs = load_model(drafter), AutoModelForCausalLM.from_pretrained(drafter)
    assert type(theirs) is LlamaForCausalLM
    lengths = (5, 1, 40, 18)
    samples = [torch.randint(VOCAB_SIZE, (length,)) for length in lengths]
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    with torch.no_grad():
        packed = ours(torch.cat(samples)[None], segments[None])[0]
        alone = torch.cat([theirs(sample[None]).logits[0] for sample in samples])
    assert alone.std() > 0.1
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    decoder = stree.load(workspace / "target", drafter, tree="expand-3-2")
    plain = stree.load(workspace / "target")
    one, other = (
        each.generate(samples[2].tolist(), max_new_tokens=12) for each in (decoder, plain)
    )
    assert one.tokens == other.tokens


def test_a_sliced_drafter_starts_from_the_chosen_layers(workspace, tmp_path):
    arguments = distill_arguments(workspace, tmp_path, "--model.drafter_layers", "[0,3]", steps=1)
    distill.main(arguments)
    config = load_config(tmp_path / "drafter/latest")
    assert config.num_layers == 2 and config.attn_layers == (1,)


def test_a_target_is_trained_with_its_own_tokenizer(workspace, tmp_path, capsys):
    run_dir = tmp_path / "run"
    arguments = [
        "fit", "--run_dir", str(run_dir), *architecture_options(),
        "--tokenizer.vocab_size", str(VOCAB_SIZE),
        "--data.train", str(workspace / "train.jsonl"),
        "--data.sequence_length", "64", "--data.batch_size", "4",
        "--model.optimizer.lr", "0.01", "--trainer.accelerator", "cpu",
        "--trainer.max_steps", "20", "--trainer.log_every_n_steps", "1",
        "--trainer.enable_progress_bar", "false", "--export.dtype", "bfloat16",
    ]
    train_target.main(arguments)
    printed = capsys.readouterr().out
    assert "step 20/20  loss" in printed and "acceptance" not in printed  # there is no drafter
    rows = metric_rows(run_dir)
    assert float(rows[0]["loss"]) == pytest.approx(math.log(VOCAB_SIZE), rel=0.1)
    assert float(rows[-1]["loss"]) < 0.7 * float(rows[0]["loss"])
    exported = run_dir / "target/latest"
    tokenizer = load_tokenizer(exported)
    config = load_config(exported)
    assert config.eos_token_ids == (tokenizer.eos_token_id,)
    assert config.attn_layers == (1, 3)
    assert load_model(exported).num_parameters() > 0
    assert json.loads((exported / "provenance.json").read_text())["step"] == 20


# What goes wrong


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_an_unwritable_run_folder_is_refused_before_anything_is_loaded(place, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CannotWrite, match="choose a folder that you may write to"):
        distill.main(distill_arguments(tmp_path / "no workspace", tmp_path / place))


def test_a_tokenizer_larger_than_the_model_is_refused(workspace, tmp_path):
    with pytest.raises(UsageError, match=r"320 ids, the model 256"):
        train_target.main([
            "fit", "--run_dir", str(tmp_path), *architecture_options(vocab_size=256),
            "--data.tokenizer", str(workspace / "target"),
            "--data.train", str(workspace / "train.jsonl"), "--trainer.accelerator", "cpu",
        ])


def test_a_target_needs_one_tokenizer(workspace, tmp_path):
    with pytest.raises(UsageError, match=r"data\.tokenizer .* or tokenizer\.vocab_size"):
        train_target.main(
            ["fit", "--run_dir", str(tmp_path), *architecture_options(), "--data.train", "x"]
        )


def test_show_mask_prints_a_sample_and_trains_nothing(workspace, tmp_path, capsys):
    distill.main(distill_arguments(workspace, tmp_path / "run", "--show-mask"))
    assert "counts for the loss" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config", ["distill/llama3.1-8b", "distill/quickstart"])
def test_show_mask_takes_a_config_and_data_alone(config, workspace, capsys):
    """No run folder is needed, and only the target's tokenizer is read, as the README has it."""
    distill.main([
        "fit", "--config", str(CONFIGS / f"{config}.yaml"),
        "--data.train", str(workspace / "train.jsonl"),
        "--model.target", str(workspace / "tokenizer"), "--show-mask",
    ])
    assert "counts for the loss" in capsys.readouterr().out


def test_show_mask_of_a_target_without_a_tokenizer_yet(workspace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = str(workspace / "train.jsonl")
    train_target.main([
        "fit", *architecture_options(), "--tokenizer.vocab_size", "320", "--data.train", train,
        "--show_mask",
    ])
    assert "counts for the loss" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_without_show_mask_a_run_folder_is_needed(workspace):
    arguments = distill_arguments(workspace, workspace / "unused")
    del arguments[1:3]
    with pytest.raises(UsageError, match="--run_dir is missing"):
        distill.main(arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(((f"--{name}", "0"), rf"{name} is 0, wanted") for name in (
            "trainer.accumulate_grad_batches", "trainer.log_every_n_steps",
            "trainer.val_check_interval", "trainer.max_steps",
        )),
        (("--trainer.max_steps", "-1"), r"max_steps is -1"),
        (("--seed_everything", "-1"), r"seed_everything is -1"),
        # In 16-mixed the loss's gradients reach fp16 before the loss scale, and clipping comes
        # before it is taken out again.
        *((("--trainer.precision", name), "wanted 32-true or bf16-mixed: weights, moments")
          for name in ("16-mixed", "16", "16-true", "bf16-true", "64-true")),
        (("--model.drafter.attn_layers", "[5]", *random_drafter(attn_layers=[5])),
         r"attn_layers \(5,\) must be distinct layer indices"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_settings_that_no_run_can_have_are_refused_before_data_is_read(
    options, message, workspace, tmp_path
):
    more = ("--data.train", str(tmp_path / "absent.jsonl"), *options)
    with pytest.raises(UsageError, match=message):
        distill.main(distill_arguments(workspace, tmp_path / "run", *more))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "name"), [(None, "32-true"), (32, "32-true"), ("bf16", "bf16-mixed")]
)
def test_short_names_of_precisions_are_what_they_stand_for(given, name):
    assert supported_precision(given) == name


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--nonsense", "1"), "there is no option --nonsense; see "),
        (("--model.drafter.blah", "1"), "model.drafter: unknown model keys ['blah']; known: ["),
        (("--model.optimizer.rate", "1"), "rate"),
        (("--model.learning_rate", "1"), "learning_rate"),
        (("--trainer.max_step", "1"), "max_step"),
        (("--trainer.max_steps", "many"), "trainer.max_steps"),
    ],
)
def test_a_wrong_option_is_one_line(options, line, workspace, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        distill.main(distill_arguments(workspace, tmp_path / "run", *options))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and line in error
    assert error.endswith("fit --help\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("dry", [(), ("--dry_run",)])
@pytest.mark.parametrize(
    ("name", "reason"), [("gpu", "No supported gpu backend"), ("gup", "invalid accelerator name")]
)
def test_an_accelerator_that_is_not_here_is_one_reason(name, reason, dry, workspace, tmp_path):
    more = ("--trainer.accelerator", name, *dry)
    with pytest.raises(UsageError, match=rf"trainer: .*{reason}.* see trainer\.accelerator"):
        distill.main(distill_arguments(workspace, tmp_path / "run", *more))


@pytest.mark.gpu
def test_a_step_that_logs_nothing_waits_for_no_device(workspace, tmp_path, monkeypatch):
    """PyTorch raises at any wait for the device between the ends of steps 4 and 5."""
    logged, strict = LogMetrics.on_train_batch_end, []

    def on_train_batch_end(callback, trainer, *others):
        torch.cuda.set_sync_debug_mode("default")
        logged(callback, trainer, *others)
        if trainer.global_step == 4:
            strict.append(4)
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(LogMetrics, "on_train_batch_end", on_train_batch_end)
    distill.main(distill_arguments(
        workspace, tmp_path / "run", "--trainer.accelerator", "gpu",
        "--trainer.precision", "bf16-mixed", "--model.target_dtype", "bfloat16",
        "--trainer.log_every_n_steps", "100", "--trainer.val_check_interval", "100",
        "--checkpoint.every_n_steps", "100", steps=6,
    ))
    assert strict == [4]
