"""Let a target answer prompts itself: text of the kind that a drafter meets when it drafts.

    stree answers --target checkpoints/python-docs-hybrid \\
        --drafter runs/quickstart/drafter/latest --prompts data/python-docs/train.jsonl \\
        --samples 2 --temperatures 0 1 --out data/own
    stree distil fit --config configs/distill/quickstart.yaml \\
        --data.train data/own --run_dir runs/own

The drafter speeds the target up and does not change its answers. The same command again goes on
where it was stopped. Processes of accelerate, torchrun or srun share the work.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import stree.common.threads  # noqa: F401  (before torch is loaded)

import torch

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.step_timing import context_of, room_to_time
from stree.chat_templates import resolve_template
from stree.checkpoints.configs import load_config
from stree.checkpoints.identity import checkpoint_sha256
from stree.checkpoints.load_save import load_model
from stree.checkpoints.tokenizer import fingerprint, load_tokenizer, tokens_sha256
from stree.common.errors import UsageError
from stree.common.template_dates import template_date
from stree.common.words import dtype_name
from stree.drafters.names import DRAFTERS, DrafterName
from stree.generation import GenerationConfig
from stree.loading import pick_dtype, require_target_dtype
from stree.tree_policy.names import TREE_POLICIES, as_tree_policy
from stree.tree_policy.policy import FixedTree, TreePolicy
from stree.trees.token_tree import TokenTree
from stree.verifiers import named, require_tree
from stree_pipelines.console.command_line import CommandParser, input_path
from stree_pipelines.console.input_checks import drafter as drafter_there
from stree_pipelines.console.input_checks import folder, require_there, source, template
from stree_pipelines.console.input_checks import tree as tree_there
from stree_pipelines.console.progress import EvaluationProgress, measured_step_times
from stree_pipelines.data.answering import Generation, Tally, prompts_sha256, read_prompts, that_fit
from stree_pipelines.data.generated import GenerationSpec, num_answer_tokens
from stree_pipelines.evaluation.context import Workers, describe_code, pick_device
from stree_pipelines.evaluation.options import DEFAULTS, add_options
from stree_pipelines.evaluation.plan import DrafterIdentity, require_fillable, tree_of
from stree_pipelines.evaluation.sampling import OFF, sampling_of
from stree_pipelines.resources.disk import disk_shortage, require_disk, require_writable
from stree_pipelines.resources.estimates import (
    MemoryEstimate,
    decoding_memory,
    model_line,
    models_of,
)

HOW_TO_NEED_LESS_MEMORY = "lower --num_rows or --max_length, or use --dtype bfloat16"


def build_parser() -> CommandParser:
    """Make the parser; each option is also a key of the YAML file given with --config."""
    parser = CommandParser("stree answers", description=__doc__)
    add = parser.add_argument
    add("--config", action="config", help="YAML file with any of these options")
    add("--target", type=str, required=True, help="folder of the target")
    add("--drafter", type=str | None, help=f"{DRAFTERS} (default: plain decoding)")
    add("--prompts", type=str, required=True,
        help="conversations as distill.py reads them (their own answers are left out), or JSONL of "
        "benchmark prompts")
    add("--out", type=str, required=True, help="folder of the answers")
    add("--turn", type=str, choices=["first", "last"], default="first",
        help="which answer of a conversation the target gives")
    add("--limit", type=int | None, help="number of prompts, from the first on (default: all)")
    add("--samples", type=int, default=1, help="answers to each prompt")
    add("--temperatures", type=float, nargs="+", default=[1.0],
        help="of the samples of a prompt, in turn; 0 is greedy")
    add_options(
        parser, DEFAULTS, ["verifier", "chat_template", "dtype", "target_dtype", "device", *OFF]
    )
    add("--max_new_tokens", type=int, default=512, help="an answer")
    add("--max_length", type=int, default=2048,
        help="tokens of prompt and answer; longer prompts are left out")
    add("--tree", type=str, default="paper", help=f"that the drafter fills: {TREE_POLICIES}")
    add("--num_rows", type=int, default=16, help="answers decoded at once")
    add("--seed", type=int, default=0, help="of sampling, together with prompt and sample")
    add("--shard_samples", type=int, default=1024,
        help="answers in a shard: what a kill loses at most")
    add("--compare", type=int, default=16,
        help="answers on which the drafter's gain in speed is measured first, or 0")
    add("--dry_run", action="store_true", help="say what it would take, and exit")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments).as_dict()
    for name in ("target", "drafter", "prompts", "chat_template"):
        options[name] = options[name] and input_path(options[name])
    workers = Workers.unconnected()
    progress = EvaluationProgress(enabled=workers.is_main)
    generation = plan(options, progress)
    spec, missing = generation.spec, generation.missing()
    progress.say(
        f"{options['out']}: {spec.num_prompts:,} prompts, {spec.samples} answers each; "
        f"{spec.num_shards - len(missing)} of {spec.num_shards} shards are there"
    )
    device = pick_device(options["device"])
    dtype = pick_dtype(options["dtype"], device, options["target"])
    if options["dry_run"]:
        require_writable(options["out"])
        describe(options, generation, device.type == "cuda", dtype)
        return
    if not missing:
        return

    waiting = f"waiting for another command that fills {options['out']}"
    with workers.locked(generation.folder, lambda: EvaluationProgress().say(waiting)):
        generation.require_same_data()  # as the other command left it
        if generation.missing():
            fill(options, generation, workers, progress)


def fill(
    options: dict[str, Any], generation: Generation, workers: Workers, progress: EvaluationProgress
) -> None:
    """Load the models and write this worker's share of what is missing in the folder."""
    spec = generation.spec
    device = pick_device(options["device"])
    dtype = pick_dtype(options["dtype"], device, options["target"])
    tokenizer = load_tokenizer(options["target"])
    target = load_model(options["target"], device, dtype, bool(options["target_dtype"]))
    drafter = None
    if options["drafter"] is not None:
        name = DrafterName.parse(options["drafter"])
        drafter = name.make(name.load(options["target"], device, dtype), tokenizer, target)
    sizes: dict[str, Any] = dict(
        num_rows=options["num_rows"], max_length=options["max_length"], tokenizer=tokenizer
    )
    decoder = BatchDecoder(target, drafter, generation.tree_policy, verifier=spec.verifier, **sizes)
    progress.say(str(decoder.room))
    if shortage := disk_shortage(options["out"], generation.disk()):
        progress.say(f"warning: {shortage}")
    made_with: dict[str, Any] = {
        **{name: options[name] for name in ("target", "drafter", "prompts")}, **describe_code(),
        "template_date": template_date(resolve_template(tokenizer, options["chat_template"])),
    }
    if decoder.tree_policy.needs_step_times:
        hottest = max(range(spec.samples), key=spec.temperature)
        settings = generation.request(hottest).generation
        costs = measured_step_times(decoder, str(decoder.tree_policy), settings, progress.say)
        made_with["measuring_costs_s"] = costs.took_s
    if drafter is not None and options["compare"] > 0 and workers.is_main:
        plain = BatchDecoder(target, **sizes)
        ways = generation.compare(decoder, plain, options["compare"])
        del plain
        progress.say(comparison_line(*ways))
        made_with["compared"] = {
            name: asdict(each) for name, each in zip(("speculation", "plain"), ways, strict=True)
        }
    tally = generation.write(decoder, workers, made_with, progress)
    share = f" by process {workers.rank} of {workers.count}" if workers.count > 1 else ""
    made = (
        f"{options['out']}: {tally.num_tokens:,} tokens in {tally.seconds:.0f} s{share}, "
        f"{tally.tokens_per_second:,.0f} a second, τ {tally.acceptance_length:.2f}"
    )
    if left := len(generation.missing()):
        progress.say(f"{made}; {left} shards are others', the last of whom tells the whole")
        return
    # The last process to end, which need not be the one that shows progress
    EvaluationProgress().say(
        f"{made}; all {spec.num_shards} shards are there, of "
        f"{num_answer_tokens(generation.folder, spec):,} tokens"
    )


def plan(options: dict[str, Any], progress: EvaluationProgress) -> Generation:
    """Plan the generation; everything that can be refused is refused here, before a model loads."""
    if options["compare"] < 0:
        raise UsageError(f"compare is {options['compare']}, wanted 0 or more")
    require_target_dtype(options["target_dtype"])
    if options["limit"] is not None and options["limit"] < 1:
        raise UsageError(f"limit is {options['limit']}, wanted at least 1 prompt")
    target, drafter = options["target"], options["drafter"]
    require_there([
        folder("--target", target),
        *([] if drafter is None else drafter_there("--drafter", drafter)),
        source("--prompts", options["prompts"]), tree_there("--tree", options["tree"]),
        template("--chat_template", options["chat_template"]),
    ])
    config = load_config(target)
    dtype = pick_dtype(options["dtype"], pick_device(options["device"]), target)
    tokenizer = load_tokenizer(target)
    tree_policy: TreePolicy = FixedTree(TokenTree.chain(0, "root"))
    identity, verifier = None, "coupled"
    if drafter is not None:
        identity, verifier = DrafterIdentity.at(drafter), options["verifier"]
        identity.require_fit(target)
        for remark in identity.remarks(target, options["max_length"]):
            progress.say(remark)
        tree_policy = as_tree_policy(options["tree"], input_path)
        tosses = not named(verifier).any_dynamic_tree
        if tree_policy.needs_step_times and tosses and max(options["temperatures"]) > 0:
            raise UsageError(
                f"--verifier {verifier} tosses coins by the tree of a step, which "
                f"--tree {tree_policy} chooses by what other rows do, so answers would "
                "differ by --num_rows: take the verifier coupled, or name one tree"
            )
        for each in tree_policy.trees:
            require_tree(named(verifier), each, identity.name.siblings)
        require_fillable(tree_of(tree_policy), identity.name)
    deepest = tree_policy.deepest
    prompts = read_prompts(
        options["prompts"], tokenizer, options["turn"], options["limit"], options["chat_template"],
        progress.say,
    )
    room = min(options["max_length"], config.num_positions or options["max_length"])
    kept = that_fit(prompts, room, options["max_new_tokens"], deepest.max_depth)
    if tree_policy.needs_step_times and room_to_time(
        deepest, room, context_of(deepest, room)
    ) < 1:
        raise UsageError(
            f"--tree {tree_policy} is chosen by measured costs, and {room} tokens "
            f"are too few to time steps of {deepest} in: raise --max_length, "
            "or name one tree or shallower ones"
        )
    if len(kept) < len(prompts):
        progress.say(f"{len(prompts) - len(kept):,} prompts are left out, too long for max_length")
    tree = tree_of(tree_policy)
    spec = GenerationSpec(
        model_sha256=checkpoint_sha256(target, tokenizer=False),
        drafter_sha256=None if identity is None else identity.sha256,
        tokens_sha256=tokens_sha256(tokenizer),
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=config.vocab_size,
        prompts_sha256=prompts_sha256(kept),
        num_prompts=len(kept),
        temperatures=tuple(options["temperatures"]),
        tree=f"{tree.name} {tree.parents}",
        verifier=verifier,
        dtype=", target in ".join(filter(None, [dtype_name(dtype), options["target_dtype"]])),
        **{name: options[name] for name in (
            "samples", *OFF, "max_new_tokens", "seed", "shard_samples"
        )},
    )
    generation = Generation(options["out"], spec, kept, tree_policy)
    sampling = sampling_of(spec)
    for temperature in spec.temperatures:
        settings = GenerationConfig(temperature=temperature, **sampling)  # refuses what none takes
    if not any(spec.temperatures):
        settings.warn_of_unread()
    return generation


def describe(
    options: dict[str, Any], generation: Generation, on_cuda: bool, dtype: torch.dtype
) -> None:
    """Print the memory and disk it takes; raises CannotWrite or OutOfMemory when there is too
    little."""
    target = load_config(options["target"])
    drafters = models_of([DrafterName.parse(options["drafter"] or "ngram")], options["target"])
    print(model_line("target", target))
    for config in drafters.values():
        print(model_line("drafter", config))
    trees = {"drafting": generation.tree_policy.largest.num_nodes}
    if options["drafter"] and options["compare"]:
        trees["plain"] = 1
    parts = decoding_memory(
        target, drafters, dtype, options["max_length"], trees, options["num_rows"],
        in_8_bits=bool(options["target_dtype"]), folder=options["target"],
    )
    memory = MemoryEstimate(parts, on_cuda)
    print(memory)
    print(require_disk(options["out"], generation.disk()), flush=True)
    memory.require(HOW_TO_NEED_LESS_MEMORY)


def comparison_line(speculation: Tally, plain: Tally) -> str:
    ratio = speculation.tokens_per_second / plain.tokens_per_second
    line = (
        f"on a sample: {speculation.tokens_per_second:,.0f} tokens/s with the drafter (τ "
        f"{speculation.acceptance_length:.2f}), {plain.tokens_per_second:,.0f} without, "
        f"{ratio:.2f}×"
    )
    if ratio < 1:
        return f"{line}: leave --drafter out, plain decoding is faster here"
    return line
