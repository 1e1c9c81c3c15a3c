"""Make the models and prompts that evaluations through the real engine are tested with.

The target is tiny; the drafters are the target itself (all drafts accepted), a stranger (hardly
any), and the target with noise (some).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from stree.checkpoints.load_save import save_model
from stree.decoder import Decoder
from stree.generation import GenerationConfig
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree_pipelines.console.progress import EvaluationProgress
from stree_pipelines.data.tokenizer_training import train_tokenizer
from stree_pipelines.evaluation.answering import decoders
from stree_pipelines.evaluation.context import Workers
from stree_pipelines.evaluation.evaluate import Evaluation
from stree_pipelines.evaluation.plan import EvaluationSettings
from stree_pipelines.evaluation.result_store import ResultStore

TIMINGS = {
    "tokens_per_second", "tokens_per_second_e2e", "speedup", "speedup_prompt_median",
    "speedup_per_tau", "num_stalled", "time_ms", "baseline_time_ms", "measuring_costs_s", "costs",
    "confidence_intervals", "environment",
}
PROMPTS = [
    {"id": "a", "category": "one", "turns": ["What is a tree?"]},
    {"id": "b", "category": "two", "turns": ["Say one.", "Say two."]},
    {"id": "c", "category": "one", "turns": ["Name a colour."]},
    {"id": "d", "category": "one", "turns": ["And now?"]},
]


def tiny_model(seed: int, vocab_size: int = 320) -> HybridModel:
    torch.manual_seed(seed)
    return HybridModel(HybridConfig(
        vocab_size=vocab_size, d_model=32, num_layers=2, num_ssm_heads=2, ssm_head_dim=16,
        d_state=8, num_x_groups=2, num_b_groups=1, num_c_groups=1, eos_token_ids=(1,),
    ))


def make_world(root: Path) -> Path:
    """Write target/, drafter/step-*/ and prompts into `root`, and return it."""
    tokenizer = train_tokenizer(["some text to learn from"] * 3, 320, root / "tokenizer")
    target = tiny_model(0)
    save_model(target, root / "target", tokenizer)
    noisy = tiny_model(0)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.003 * torch.randn_like(parameter)
    drafters = {1: tiny_model(5), 10: noisy, 100: target}
    for step, model in drafters.items():
        save_model(
            model, root / f"drafter/step-{step:08d}", tokenizer,
            extra_files={"provenance.json": json.dumps({"step": step})},
        )
    (root / "talk.jsonl").write_text("".join(json.dumps(p) + "\n" for p in PROMPTS))
    (root / "command.json").write_text(json.dumps({"target": str(root / "target")}))
    return root


def settings_for(world: Path, out: Path, **changes) -> EvaluationSettings:
    benchmarks = (str(world / "talk.jsonl"),)
    defaults = {
        "target": str(world / "target"), "out": str(out), "benchmarks": benchmarks,
        "temperatures": (0.0,), "max_new_tokens": 12, "device": "cpu", "ignore_eos": True,
    }
    return EvaluationSettings(**{**defaults, **changes})


def quiet(settings: EvaluationSettings, **parts) -> Evaluation:
    return Evaluation(
        settings, workers=parts.pop("workers", Workers()),
        progress=EvaluationProgress(enabled=False), **parts,
    )


def export(world: Path, step: int) -> Path:
    return world / f"drafter/step-{step:08d}"


def without_timings(rows) -> list[dict]:
    return [row.model_dump(exclude=TIMINGS) for row in rows]


def samples_without_timings(store: ResultStore) -> list[dict]:
    timings = {"prefill_s", "decode_s", "time_ms", "is_stalled", "baseline"}
    return [s.model_dump(exclude=timings) for row in store.results() for s in store.samples(row)]


def row_of(store: ResultStore, step, method, temperature=0.0):
    (row,) = (
        r
        for r in store.results()
        if (r.step, r.method, r.temperature) == (step, method, temperature)
    )
    return row


class Lies:
    """A decoder whose speculative answers are wrong from position 3 on."""

    def __init__(self, *args, **kwargs) -> None:
        self.tree = kwargs["tree"]
        self.decoder = Decoder(*args, **kwargs)
        self.batch, self.num_reusable = self.decoder.batch, self.decoder.num_reusable

    def generate(self, *args, **kwargs):
        output = self.decoder.generate(*args, **kwargs)
        if self.tree is not None:
            output.tokens[3:] = [token + 1 for token in output.tokens[3:]]
        return output


def heard_by(listen):
    """A decoder that lets `listen(tree, prompt_ids, generation, output)` hear of each call."""

    def make(*args, **kwargs):
        decoder = Decoder(*args, **kwargs)
        generate = decoder.generate

        def heard(prompt_ids, generation):
            output = generate(prompt_ids, generation)
            listen(kwargs["tree"], prompt_ids, generation, output)
            return output

        decoder.generate = heard
        return decoder

    return make


class WarmUp(GenerationConfig):
    """Settings of a warm-up, by which tests know it."""


decoders.GenerationConfig = WarmUp  # nothing else there has settings


def is_warm_up(generation) -> bool:
    """Return whether a generation is a warm-up's."""
    return isinstance(generation, WarmUp)
