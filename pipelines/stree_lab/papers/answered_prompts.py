"""Answer a benchmark's first prompts with a pair, and write what was seen as JSON and figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stree import Decoder
from stree.chat_encoding import chat_encoder
from stree.common.files import make_directory, write_atomically
from stree.generation import GenerationConfig
from stree.models.model import HybridModel
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.evaluation.context import describe_environment
from stree_pipelines.reports.plots import to_svg


def add_options(parser: PlainParser, drafter: str, limit: int, temperature: float) -> None:
    """Add the pair, the folder to write, and how prompts are answered.

    drafter: help text of the drafter. limit, temperature: defaults.
    """
    add = parser.add_argument
    add("target", help="folder of the target")
    add("drafter", help=drafter)
    add("out", help="folder to write")
    add("--prompts", default="mt_bench", help="a benchmark's name or file")
    add("--limit", type=int, default=limit, help="number of prompts, from the first on")
    add("--num_tokens", type=int, default=128, help="of each answer, at most")
    add("--temperature", type=float, default=temperature, help="of answers")
    add("--device", default="auto")
    add("--seed", type=int, default=0)


def answers(options: Any, decoder: Decoder) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield each prompt's tokens, its answer's, and the seed, one more than that before."""
    encoder = chat_encoder(decoder.tokenizer)
    benchmark = load_benchmark(input_path(options.prompts), limit=options.limit)
    for seed, prompt in enumerate(benchmark.prompts, start=options.seed):
        tokens = encoder.encode_prompt([("user", prompt.turns[0])])
        generation = GenerationConfig(options.num_tokens, options.temperature, seed=seed)
        yield tokens, decoder.generate(tokens, generation).tokens, seed


def write(
    out: str, name: str, target: HybridModel, content: Mapping[str, Any],
    figures: Mapping[str, Figure],
) -> None:
    """Write NAME.json, with the machine and the code, and each figure as an SVG into a folder."""
    types = {"weights": str(target.dtype).removeprefix("torch.")}
    made_by = describe_environment(target.device, types, 1).model_dump(mode="json")
    content = {**content, "environment": made_by}
    folder = Path(out)
    make_directory(folder)
    write_atomically(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")
    for title, figure in figures.items():
        write_atomically(folder / f"{title}.svg", to_svg(figure, title))
