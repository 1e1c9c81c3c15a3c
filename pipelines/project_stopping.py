"""Work out whether it pays to stop a tree by the drafter's probabilities of this very step.

python pipelines/project_stopping.py checkpoints/python-docs-hybrid DRAFTER \\
    --times "8B on an H200=4.23,0.141,0.011"
Answers prompts on the CPU with trees all of whose drafts are verified, and prints what the best
fixed number of levels and nodes would make of such steps, and who stops in the step: computed, not
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import stree.threads

import stree
from stree.errors import exit_with_reason
from stree.files import write_atomically
from stree.tree import BeamTree
from stree_pipelines.evaluation.benchmarks import load_benchmark
from stree_pipelines.reports.stopping import Recorder, Times, table
from stree_pipelines.terminal.command_line import PlainParser, input_path
from stree_pipelines.terminal.progress import EvaluationProgress


def main(arguments: Sequence[str] | None = None) -> None:
    parser = PlainParser("project_stopping.py", description=__doc__)
    add = parser.add_argument
    add("target", help="its folder")
    add("drafter", help="its folder")
    add("--times", nargs="+", required=True,
        help="NAME=PLAIN,LEVEL,NODE: ms of a plain step, of a level of drafts, and of each further "
        "node of a call")  # fmt: skip
    add("--benchmark", default="data/python-docs/prompts.jsonl", help="its first turns are asked")
    add("--limit", type=int, default=40, help="how many prompts")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--repetition_penalty", type=float, default=1.0, help="1: none")
    add("--max_new_tokens", type=int, default=64, help="of an answer")
    add("--width", type=int, default=4, help="of the trees")
    add("--levels", type=int, default=6, help="of the trees")
    add("--out", help="file to write the table to, too")
    options = parser.parse_args(arguments)
    all_times = [Times.named(each) for each in options.times]
    all_drawn = BeamTree.of(options.width, options.levels, options.levels + 1).num_drawn
    tree = BeamTree.of(options.width, options.levels, all_drawn)
    prompts = load_benchmark(input_path(options.benchmark), limit=options.limit).prompts
    recorder = Recorder()
    decoder = stree.load(
        input_path(options.target), input_path(options.drafter), tree=tree, device="cpu",
        verifier=recorder,
    )  # fmt: skip
    with EvaluationProgress().task("prompts", len(prompts)) as task:
        for recorder.prompt, prompt in enumerate(prompts):
            answer = decoder.chat(
                prompt.turns[0], temperature=options.temperature, seed=recorder.prompt,
                repetition_penalty=options.repetition_penalty,
                max_new_tokens=options.max_new_tokens,
            )  # fmt: skip
            task.advance(f"τ {answer.stats.acceptance_length:.2f}")
    title = f"Stopped in the step or not, T = {options.temperature:g}"
    made = table(recorder.steps, all_times, options.width, title).to_markdown()
    print(made)
    if options.out:
        write_atomically(Path(options.out), made)


if __name__ == "__main__":
    exit_with_reason(main)
