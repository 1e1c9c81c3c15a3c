"""Write a tiny target and a little chat data, and give the arguments of a distillation of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import torch

from stree.checkpoints.load_save import save_model
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree_pipelines.data.tokenizer_training import train_tokenizer

VOCAB_SIZE = 320
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "d_model": 32, "num_layers": 4, "attn_layers": [1, 3],
    "intermediate_size": 48, "tie_embeddings": True,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "num_ssm_heads": 4, "ssm_head_dim": 8, "d_state": 8,
    "num_x_groups": 2, "num_b_groups": 2, "num_c_groups": 4, "gated_norm_groups": 4,
}


def write_conversations(path: Path, count: int = 40) -> None:
    rows = [
        {
            "id": str(i),
            "conversations": [
                {"from": "human", "value": f"What is {i} plus {i % 7}?"},
                {"from": "gpt", "value": f"{i} plus {i % 7} is {i + i % 7}. " * (1 + i % 3)},
            ],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_workspace(folder: Path) -> Path:
    """Write train.jsonl, valid.jsonl and target/ (weights and tokenizer) into `folder`."""
    write_conversations(folder / "train.jsonl")
    write_conversations(folder / "valid.jsonl", count=8)
    texts = [f"What is {i} plus {j}? {i} plus {j} is {i + j}." for i in range(30) for j in range(7)]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE, folder / "tokenizer")
    torch.manual_seed(0)
    config = HybridConfig(**ARCHITECTURE, eos_token_ids=(tokenizer.eos_token_id,))
    model = HybridModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)  # logits that differ enough for a loss to fall
    save_model(model, folder / "target", tokenizer)
    return folder


def distill_arguments(workspace: Path, run_dir: Path, *more: str, steps: int = 8) -> list[str]:
    """List arguments of distill.py with which it logs and saves at every step."""
    return [
        "fit", "--run_dir", str(run_dir),
        "--model.target", str(workspace / "target"),
        "--data.train", str(workspace / "train.jsonl"),
        "--data.valid", str(workspace / "valid.jsonl"),
        "--data.sequence_length", "64", "--data.batch_size", "2",
        "--data.num_valid_batches", "2",
        "--model.optimizer.warmup_steps", "3",
        "--trainer.accelerator", "cpu",
        "--trainer.max_steps", str(steps), "--trainer.val_check_interval", "4",
        "--trainer.log_every_n_steps", "1", "--trainer.enable_progress_bar", "false",
        "--checkpoint.every_n_steps", "1", "--checkpoint.keep_last", "100",
        *more,
    ]


def metric_rows(run_dir: Path) -> list[dict[str, str]]:
    """Read the rows of metrics.csv without the column that depends on the clock."""
    with open(run_dir / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("tokens_per_second")
    return rows
