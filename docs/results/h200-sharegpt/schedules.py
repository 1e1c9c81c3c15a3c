"""Writes schedules.md: what a decay before each export brings, what the recipe after it, and how
much of τ is of answers that repeat themselves.

python docs/results/h200-sharegpt/schedules.py

No two of these runs have the same training of the target. What the targets differ by is taken from
drafters of one recipe, "today" of h200-drafters, for each of two of them. Dims: S sides, Q prompts,
R resamples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stree.metrics import bootstrap_interval
from stree_pipelines.evaluation.result_store import ResultStore

HERE = Path(__file__).parent
MUON, DECAYS, COSINE, SCRATCH = (
    HERE / name for name in ("ba8f615", "5237370", "c156214", "879b639")
)
STUDIES = {MUON: "muon", DECAYS: "more-tokens", COSINE: "seeds"}  # on the same targets
STEPS, BENCHMARKS = (16, 50, 160, 500, 1600), ("mt_bench", "humaneval", "gsm8k")
SEEN = 8  # tokens that come again ahead of one that does
Counts = dict[tuple[str, str], NDArray[np.float64]]  # of a prompt: new tokens and calls


def counts(folder: Path, step: int, temperature: float, method: str = "stree") -> Counts:
    """Of the prompts of all benchmarks; summed over seeds, where there are several."""
    store, found = ResultStore(folder), defaultdict[tuple[str, str], NDArray](lambda: np.zeros(2))
    for row in store.results():
        if row.step == step and row.temperature == temperature and row.method.startswith(method):
            for answer in store.samples(row):
                key = answer.benchmark, answer.prompt_id
                found[key] += answer.num_new_tokens, answer.num_calls
    return found


def only(answers: Counts, *benchmarks: str) -> Counts:
    return {key: each for key, each in answers.items() if key[0] in benchmarks}


def targets(temperature: float, *runs: Path) -> list[Counts]:
    """Of today's recipe, for the target of each run."""
    folders = (HERE.parent / "h200-drafters" / STUDIES[run] for run in runs)
    found = (counts(folder, 800, temperature, "today, ") for folder in folders)
    return [only(each, *BENCHMARKS) for each in found]


def gain(sides: Sequence[Counts]) -> str:
    """τ of the first side over the second's, in %, of four sides over that of the other two, with
    its interval; all over the prompts that the sides share, drawn together."""
    shared = [key for key in sides[0] if all(key in side for side in sides)]
    counts_SQ2 = np.array([[side[key] for key in shared] for side in sides])

    def percent(draws_RQ: NDArray[np.int64]) -> NDArray[np.float64]:
        tokens, calls = np.moveaxis(counts_SQ2[:, draws_RQ].sum(axis=2), -1, 0)
        tau = tokens / calls
        others = tau[2] / tau[3] if len(tau) > 2 else 1.0
        return 100 * (tau[0] / tau[1] / others - 1)

    (value,) = percent(np.arange(len(shared))[None])
    low, high = bootstrap_interval(percent, len(shared)) or (value, value)
    return f"{value:+.1f} % [{low:+.1f}, {high:+.1f}]".replace("-", "−")


def tau(answers: Counts, prompts: Counts) -> str:
    tokens, calls = np.sum([answers[key] for key in prompts], axis=0)
    return f"{tokens / calls:.2f}"


def by_step(temperature: float) -> list[list[str]]:
    decays, cosines = (
        [counts(folder, step, temperature) for step in STEPS] for folder in (DECAYS, COSINE)
    )
    control = targets(temperature, DECAYS, COSINE)
    pairs = list(zip(decays, cosines, strict=True))
    return [
        [f"T = {temperature:g}", *(f"step {step}" for step in STEPS)],
        ["τ, a decay before each export", *(tau(mine, mine) for mine, _ in pairs)],
        ["τ, a cosine of 1,600 steps", *(tau(other, mine) for mine, other in pairs)],
        ["the first over the second", *(gain(pair) for pair in pairs)],
        ["without what the targets differ by", *(gain([*pair, *control]) for pair in pairs)],
    ]


def recipes(temperature: float) -> list[list[str]]:
    mine, other = counts(MUON, 3200, temperature), counts(DECAYS, 1600, temperature)
    control = targets(temperature, MUON, DECAYS)
    heads = [f"T = {temperature:g}", "ba8f615", "5237370", "over it", "of the targets", "without"]
    lines = [heads]
    for title, names in (("all", BENCHMARKS), *((name, (name,)) for name in BENCHMARKS)):
        sides = [only(each, *names) for each in (mine, other, *control)]
        taus = tau(sides[0], sides[0]), tau(sides[1], sides[0])
        lines.append([title, *taus, gain(sides[:2]), gain(sides[2:]), gain(sides)])
    return lines


def over_scratch(run: Path, step: int, temperature: float) -> list[list[str]]:
    mine, other = counts(run, step, temperature), counts(SCRATCH, 1600, temperature)
    heads = [f"T = {temperature:g}", f"{run.name}, step {step:,}", "from scratch, 1,600", "over it"]
    lines = [["all", tau(mine, mine), tau(other, mine), gain([mine, other])]]
    for name in BENCHMARKS:
        part = only(mine, name)
        lines.append([name, tau(part, part), tau(other, part), gain([part, other])])
    return [heads, *lines]


def repeats(tokens: Sequence[int], at: int) -> bool:
    """Whether an answer has had the token there, behind the same SEEN tokens, before."""
    end = tuple(tokens[at - SEEN : at + 1])
    return at >= SEEN and any(
        end == tuple(tokens[first : first + SEEN + 1]) for first in range(at - SEEN)
    )


def on_new_text(folder: Path, step: int, temperature: float) -> tuple[float, float, float]:
    """The share of the calls of the tree at which the answer goes on as it did before, and τ of
    the other calls and of these."""
    store = ResultStore(folder)
    counts_22 = np.zeros((2, 2))  # calls, new tokens; of new text, of repeats
    for row in store.results():
        if (row.step, row.temperature, row.method) != (step, temperature, "stree"):
            continue
        for answer in store.samples(row):
            accepted = iter(answer.accepted_per_call)
            for turn in answer.turns:
                at = 1  # the first token is the prefill's
                while at < len(turn.tokens):
                    kept = min(next(accepted) + 1, len(turn.tokens) - at)
                    counts_22[int(repeats(turn.tokens, at))] += 1, kept
                    at += kept
    calls, tokens = counts_22.T
    new, again = tokens / np.maximum(calls, 1)
    return calls[1] / calls.sum(), new, again


def split(temperature: float) -> list[list[str]]:
    lines = [[f"T = {temperature:g}", "calls in repeats", "τ on new text", "τ in repeats"]]
    for run, step in ((MUON, 3200), (DECAYS, 1600), (DECAYS, 500), (COSINE, 1600), (SCRATCH, 1600)):
        share, new, again = on_new_text(run, step, temperature)
        named = f"{run.name}, step {step:,}"
        lines.append([named, f"{100 * share:.0f} %", f"{new:.2f}", f"{again:.2f}"])
    return lines


def table(lines: list[list[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], "|:--" + "|--:" * (len(lines[0]) - 1) + "|", *rows[1:]])


def main() -> None:
    control = "; ".join(f"{gain(targets(t, DECAYS, COSINE))} at T = {t:g}" for t in (0.0, 1.0))
    parts = [
        "# Recipes compared",
        "τ of the paper's tree over the 45 prompts of 5237370, and its differences, paired by "
        "prompt; in brackets 95 % bootstrap intervals over prompts. "
        "`python docs/results/h200-sharegpt/schedules.py` writes this from the rows of ba8f615, "
        "5237370, c156214 and 879b639, and from those of h200-drafters.",
        "## A decay before each export",
        "What the targets of 5237370 and c156214 differ by: τ of today's recipe (h200-drafters, "
        f"800 steps), of the former over the latter: {control}.",
        *(table(by_step(temperature)) for temperature in (0.0, 1.0)),
        "Beside two layers from scratch, by a cosine (879b639, a third target, not taken out):",
        *(table(over_scratch(DECAYS, 500, temperature)) for temperature in (0.0, 1.0)),
        "## A head of rank 256, half the batch and Muon",
        "The recipe at ba8f615 after 3,200 steps of 8 rows beside that at 5237370 after 1,600 of "
        "16, both with a decay before each export; then what the targets differ by, and the "
        "difference without that, of the 30 prompts that today's drafters answered, too.",
        *(table(recipes(temperature)) for temperature in (0.0, 1.0)),
        "Beside two layers from scratch, by a cosine (879b639, another target), on as many tokens "
        "and on a third of them:",
        *(
            table(over_scratch(MUON, step, temperature))
            for step in (3200, 1000)
            for temperature in (0.0, 1.0)
        ),
        "## What the target repeats",
        f"A call is in a repeat where the answer has had its first token, behind the same {SEEN} "
        "tokens, before. Greedy answers of this small target often go in circles, which are easy "
        "to draft.",
        *(table(split(temperature)) for temperature in (0.0, 1.0)),
    ]
    (HERE / "schedules.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
