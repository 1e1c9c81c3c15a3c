"""Measure the memory that target and drafter hold at most while they read a prompt.

    python pipelines/stree_lab/studies/prompt_memory.py \\
        configs/compare/documents-75m.yaml OUT/memory.jsonl

The file is one of compare.py. For each benchmark, plain decoding and each arm load their models in
a process of their own, and read the longest prompt up to its first new token. A row has the most
bytes that PyTorch held at once while it was read: weights, caches and the workspaces of libraries
(Mamba Drafters' Table 3). On a CPU they are not counted. A tuned chain is chain-1 here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.common.errors import exit_with_reason, naming_what_does_not_fit
from stree.decoder import Decoder
from stree.generation import GenerationConfig
from stree_kernels import ops
from stree_lab.benches.command import require_results_file
from stree_lab.benches.timing import Row, write_rows
from stree_pipelines.console.command_line import PlainParser
from stree_pipelines.evaluation.answering.decoders import Decoders
from stree_pipelines.evaluation.arms import Arm, read_comparison
from stree_pipelines.evaluation.benchmarks import Benchmark, load_benchmark
from stree_pipelines.evaluation.context import pick_device
from stree_pipelines.evaluation.plan import (
    AUTOREGRESSIVE,
    DrafterIdentity,
    EvaluationSettings,
    make_job,
)

LESS = "benchmarks with shorter prompts need less"


def peaks(settings: EvaluationSettings, arms: Sequence[Arm]) -> Iterator[Row]:
    """Yield a row for each benchmark of plain decoding, and one of each arm."""
    # What a process has loaded before, and the workspaces of its libraries, would count or not
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as anew:
        for name in settings.benchmarks:
            benchmark = load_benchmark(name, settings.benchmark_dir, settings.limit)
            prompts = Decoders(settings, [benchmark])
            lengths = {prompt: len(prompts.prompt_ids(prompt)) for prompt in benchmark.prompts}
            longest = max(lengths, key=lengths.__getitem__)
            alone = Benchmark(benchmark.name, (longest,))
            for arm in (None, *arms):
                peak = anew.submit(read_alone, settings, alone, arm).result()
                yield {
                    "what": "prompt_memory", "method": arm.name if arm else AUTOREGRESSIVE,
                    "drafter": arm.drafter if arm else None, "benchmark": benchmark.name,
                    "num_tokens": lengths[longest],
                    **({} if peak is None else {"peak_bytes": peak}),
                }


def read_alone(settings: EvaluationSettings, benchmark: Benchmark, arm: Arm | None) -> int | None:
    """Load an arm's models, and read the benchmark's only prompt.

    Returns the most bytes that PyTorch has held at once while the prompt was read; None on a CPU.
    """
    made = Decoders(settings, [benchmark], make_decoder=Decoder)
    (prompt,) = benchmark.prompts
    tokens = made.prompt_ids(prompt)
    drafter = None if arm is None else DrafterIdentity.at(arm.drafter)
    method = settings.method(AUTOREGRESSIVE) if arm is None else arm.method(arm.trees[0])
    job = make_job(settings, method, drafter, benchmark, 0.0, "", "", made.device.type)
    with ops.current(made.device):
        decoder = made.decoder(job, len(tokens))
        is_counted = made.device.type == "cuda"
        if is_counted:  # what loading has held for a while is gone
            torch.cuda.reset_peak_memory_stats(made.device)
        decoder.generate(tokens, GenerationConfig(max_new_tokens=1))
    return torch.cuda.max_memory_allocated(made.device) if is_counted else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("prompt_memory.py", description=__doc__)
    add = parser.add_argument
    add("config", help="YAML file of a comparison")
    add("out", help="JSONL file to write")
    add("--benchmarks", nargs="+", help="names or files (default: the file's)")
    add("--device", help="auto, cpu, cuda or cuda:N (default: the file's, or auto)")
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    settings, arms = read_comparison(options.pop("config"), options)
    require_results_file(out)
    with naming_what_does_not_fit(LESS):
        write_rows(out, peaks(settings, arms), pick_device(settings.device))


if __name__ == "__main__":
    exit_with_reason(main)
