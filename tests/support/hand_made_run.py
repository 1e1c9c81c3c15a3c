"""Write an evaluated run's records by hand, so that every number in it is known."""

from __future__ import annotations

from small_rows import ALONE, UNFILTERED

from stree import metrics
from stree_pipelines.evaluation.evaluate import summarise_lossless
from stree_pipelines.evaluation.records import (
    BaselineTiming,
    Environment,
    ResultRow,
    SampleRow,
    Tree,
    Turn,
    config_hash,
)
from stree_pipelines.evaluation.result_store import (
    RESULTS_NAME,
    ResultStore,
    packed_samples,
    write_rows,
)

STEPS = (100, 1000, 10000)
NUM_PROMPTS = 6
# Calls of a prompt's 60 new tokens, by method and position in STEPS; a call takes 10 ms in all.
CALLS = {"vanilla_sd": (50, 40, 30), "stree": (40, 30, 20)}
CALL_S = {"autoregressive": 0.010, "vanilla_sd": 0.012, "stree": 0.013}
TREES = {
    "vanilla_sd": Tree(name="chain-4", parents=(-1, 0, 1, 2, 3)),
    "stree": Tree(name="paper", parents=(-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7)),
}


def first_choices(tree):
    """List the nodes that the drafter's first choices alone reach, root first."""
    parents = tree.parents if tree else (-1,)
    nodes = [0]
    while nodes[-1] in parents:
        nodes.append(parents.index(nodes[-1]))
    return nodes


def make_sample(method, step, benchmark, index, temperature, num_calls, divergence=None):
    call_s = CALL_S[method] * (1 + 0.01 * index)
    parts = ("draft", "verify", "accept") if method in TREES else ("verify", "accept")
    baseline = None
    if method != "autoregressive":
        spent_s = 60 * CALL_S["autoregressive"] * (1 + 0.01 * index)
        baseline = BaselineTiming(num_new_tokens=60, prefill_s=0.01, decode_s=spent_s)
    accepted = [60 // num_calls - 1] * num_calls
    for extra in range(60 - sum(accepted) - num_calls):
        accepted[extra] += 1
    turn = Turn(
        user=f"Question {index}?", num_prompt_tokens=5, tokens=(1,), text="<b>answer</b> ünï",
        finish_reason="length",
    )
    return SampleRow(
        checkpoint_sha256=step and str(step), step=step, method=method,
        tree=TREES[method].name if method in TREES else None, benchmark=benchmark,
        prompt_id=f"q{index}", category="", temperature=temperature, seed=0, **UNFILTERED,
        decoding_hash=f"{method}{temperature}", turns=(turn,), num_new_tokens=60,
        num_calls=num_calls, num_nodes=num_calls, accepted_per_call=tuple(accepted),
        end_node_per_call=tuple(first_choices(TREES.get(method))[each] for each in accepted),
        depth_per_call=(4 if method in TREES else 0,) * num_calls, prefill_s=0.01,
        decode_s=num_calls * call_s,
        time_ms=dict.fromkeys(parts, 900.0 / len(parts) * num_calls * call_s),
        baseline=baseline, divergence=divergence,
        lossless=None if temperature or baseline is None else divergence is None,
    )


def make_row(method, step, benchmark, answers, temperature, **changes):
    baselines = [s.baseline for s in answers] if step else answers
    values = {
        "step": step, "checkpoint": step and f"run/drafter/step-{step:08d}",
        "checkpoint_sha256": step and str(step), "target": "target", "target_sha256": "7a",
        "method": method, "tree": TREES.get(method), "verifier": None, "benchmark": benchmark,
        "prompts_hash": "p", "temperature": temperature, "num_prompts": len(answers),
        "max_new_tokens": 61, "ignore_eos": True, "seed": 0, **UNFILTERED, **ALONE,
        "decoding_hash": f"{method}{temperature}", "lossless": summarise_lossless(answers),
        "environment": Environment(
            git_sha="abc", device="Test device", dtypes={"weights": "float32"},
            versions={"torch": "2"}, command_line="eval_spec.py", num_processes=1, num_threads=1,
        ),
        "samples": packed_samples(f"{step}_{method}_{benchmark}_{temperature:g}"),
        **metrics.summarise(answers, baselines),
    }
    return ResultRow(**{**values, **changes})


def make_run(folder, benchmarks=("mt_bench", "gsm8k"), temperatures=(0.0, 1.0), divergence=None):
    store = ResultStore(folder / "eval")
    for benchmark in benchmarks:
        for temperature in temperatures:
            plans = [("autoregressive", None, 60)]
            plans += [
                (m, s, CALLS[m][i]) for i, s in enumerate(STEPS) for m in ("vanilla_sd", "stree")
            ]
            for method, step, calls in plans:
                samples = [
                    make_sample(method, step, benchmark, i, temperature, calls,
                                divergence if (step, method, i) == (100, "stree", 0) else None)
                    for i in range(NUM_PROMPTS)
                ]
                store.publish(make_row(method, step, benchmark, samples, temperature), samples)
    lines = ["step,loss,simulated_acceptance,val_loss,lr"]
    lines += [f"{step},{5 / step:.4f},0.{step % 7},,0.1" for step in range(10, 200, 10)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


LABELS = (
    "checkpoint_sha256", "step", "method", "benchmark", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "batch_size", "seed", "decoding_hash",
)


def labelled(samples, row):
    """Return samples with the labels of the row that they are kept for."""
    labels = {name: getattr(row, name) for name in LABELS}
    labels["tree"] = row.tree and row.tree.name
    return [sample.model_copy(update=labels) for sample in samples]


def relabelled(store, row, **changes):
    """Return a row with other labels; its samples have them, too, in a file of their own."""
    changed = row.model_copy(update=changes)
    changed = changed.model_copy(update={
        "samples": packed_samples(config_hash({"key": changed.key, "was": row.samples}))
    })
    write_rows(store.directory / changed.samples, labelled(store.samples(row), changed))
    return changed


def change_rows(run, change):
    """Write a run's rows anew, each as `change` returns it, and return its store."""
    store = ResultStore(run / "eval")
    write_rows(store.directory / RESULTS_NAME, map(change, store.results()))
    return store


def slower(timing, factor, **changes):
    """Return a sample, or plain decoding's timing, that took this many times as long."""
    times = {part: factor * ms for part, ms in timing.time_ms.items()}
    seconds = {name: factor * getattr(timing, name) for name in ("prefill_s", "decode_s")}
    return timing.model_copy(update={**seconds, "time_ms": times, **changes})


def slow_down(run, factors):
    """Let a loaded machine take this many times as long, {step: factor}, at all that it timed."""
    store = ResultStore(run / "eval")
    for row in store.results():
        if row.step in factors:
            factor = factors[row.step]
            samples = [
                slower(each, factor, baseline=slower(each.baseline, factor))
                for each in store.samples(row)
            ]
            figures = metrics.summarise(samples, [each.baseline for each in samples])
            store.publish(row.model_copy(update=figures), samples)


def add_row(run, method, step, calls, **changes):
    """Publish one more row of gsm8k at T = 0; its samples take these calls and have its labels."""
    samples = [make_sample(method, step, "gsm8k", i, 0.0, calls) for i in range(NUM_PROMPTS)]
    row = make_row(method, step, "gsm8k", samples, 0.0, samples="samples/more.jsonl.gz", **changes)
    ResultStore(run / "eval").publish(row, labelled(samples, row))
