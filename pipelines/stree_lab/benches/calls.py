"""Time single calls of random weights: target calls, drafts, unrolled trees, and their memory.

Rows are those of `bench_decode.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.state import BatchState
from stree.batching.step_timing import tokens_of_row
from stree.drafters.model import ModelDrafter
from stree.logits.asked import Asked
from stree.models.cache import HybridCache
from stree.models.model import HybridModel, read_row
from stree.models.offload import stream_layers
from stree.trees.build import make_tree_batch
from stree.trees.dynamic import DynamicTreeBatch
from stree.trees.token_tree import MAX_CHILDREN, StepTree, TokenTree, as_tree, balanced
from stree_kernels import ops
from stree_lab.benches.floor import Floor, product_sizes
from stree_lab.benches.profiles import profile_call
from stree_lab.benches.timing import Row, interleave, peak_field, side_by_side, us_fields
from stree_lab.papers.copied_states import CopyingDrafter
from stree_lab.papers.draft_rows import copy_first_row

PAPER = "paper"  # the tree whose drafts the bars are about; its rows do not name it
REMEMBERED = ("keys", "values", "state")  # fields of a cache's layers for committed tokens
MORE = 64  # tokens that a drafter's cache has room for beyond the context
UNROLLED_DEPTH = 5  # of the largest binary tree, and of its 32 paths
BEAMS, BEAM_STEPS = (2, 3, 4, 5), (4, 8, 16)  # of STree's Table 2


def calls(target: HybridModel, nodes: list[int], context: int, repeats: int) -> Iterator[Row]:
    """Time a target call over N nodes, one step and the floor, in µs.

    With kernels, a chain of N nodes by the multi-step update, too: STree's t1 (Eq. 7 and 8).
    """
    floor = Floor(target, max(nodes))
    for num_nodes in nodes:
        functions = {
            "floor": floor.products(num_nodes),
            "step_floor": floor.products(1),
            "step": _tree_call(target, TokenTree.chain(0), context),
            "tree": _tree_call(target, _star(num_nodes), context),
        }
        if ops.fused(target.device, target.dtype):
            chain = _tree_call(target, TokenTree.chain(num_nodes - 1), context)
            functions["chain"] = _by_multi_step_updates(chain)
        times = side_by_side(functions, target.device, repeats)
        medians = {name: each["median"] for name, each in times.items()}
        yield dict(
            what="target call", num_nodes=num_nodes, context=context,
            over_step=medians["tree"] / medians["step"],
            over_floor=medians["tree"] / medians["floor"],
            step_over_floor=medians["step"] / medians["step_floor"], **us_fields(times),
        )


def offloaded(target: HybridModel, nodes: list[int], context: int, repeats: int) -> Iterator[Row]:
    """Time target calls whose layers all come from the CPU's memory, in µs.

    Also time the same calls without copies, and the copies without calls. The model streams its
    layers from then on.
    """
    streamed = stream_layers(target, target.config.num_layers, target.device)
    for num_nodes in nodes:
        call = _tree_call(target, _star(num_nodes), context)

        def compute(call: Callable[[], object] = call) -> None:
            with streamed.without_copies():
                call()

        functions = {"copies": streamed.copy_all, "compute": compute, "call": call}
        times = side_by_side(functions, target.device, repeats)
        medians = {name: each["median"] for name, each in times.items()}
        longer, shorter = sorted((medians["copies"], medians["compute"]))[::-1]
        yield dict(
            what="offloaded call", num_nodes=num_nodes, context=context, bytes=streamed.num_bytes,
            overlap=1 - (medians["call"] - longer) / shorter, **us_fields(times),
        )


def profiles(target: HybridModel, nodes: list[int], context: int, repeats: int) -> Iterator[Row]:
    """Profile a target call over N nodes by kernel; CUDA only."""
    for num_nodes in nodes:
        measured = profile_call(_tree_call(target, _star(num_nodes), context), repeats)
        yield dict(what="profile", num_nodes=num_nodes, context=context, **measured)


def draft(
    drafter: HybridModel, trees: Sequence[str], context: int, repeats: int
) -> Iterator[Row]:
    """Time one draft of each tree in µs, greedy and sampled; rows have the bytes that a level
    reads, and of trees that grow the µs of choosing their nodes without the drafter's calls."""
    config = drafter.config
    for name in trees:
        tree = as_tree(name)
        functions = _drafts(drafter, tree, context)
        del functions["read"]
        times = side_by_side(functions, drafter.device, repeats)
        row: Row = dict(
            what="draft", num_nodes=tree.num_nodes, num_levels=tree.max_depth, context=context,
            num_layers=config.num_layers, width=config.d_model, head_size=config.head_size,
            head_rank=config.head_rank, level_bytes=level_bytes(drafter), **us_fields(times),
        )
        yield row if name == PAPER else {**row, "tree": name}


def copied(
    drafter: HybridModel, trees: Sequence[str], context: int, repeats: int
) -> Iterator[Row]:
    """Time one greedy draft of each tree in µs, by tree calls and as batch generation.

    The latter copies states to children (`copied_states`); rows have the bytes of these states.
    Drafters that read features of the target have no rows.
    """
    for name in trees if not drafter.config.feature_layers else ():
        tree = as_tree(name)
        levels = make_tree_batch([tree], drafter.device).levels
        width = max(level.nodes.shape[1] for level in levels)
        copying = CopyingDrafter(drafter, 1, context + MORE, tree.num_nodes, width)
        functions = {
            "draft": _drafts(drafter, tree, context)["draft"],
            "draft_copied": _drafts(drafter, tree, context, copying)["draft"],
        }
        times = side_by_side(functions, drafter.device, repeats)
        yield dict(
            what="copied", tree=name, num_nodes=tree.num_nodes, num_levels=tree.max_depth,
            width=width, context=context, copied_bytes=cache_bytes(copying.copies),
            **us_fields(times),
        )


def draft_lengths(
    drafters: Mapping[str, HybridModel], trees: Sequence[str], lengths: Sequence[int], repeats: int
) -> Iterator[Row]:
    """Time a greedy draft and a level of it, in µs, after contexts of several lengths.

    All drafters and trees are interleaved, one length after the other. Rows also have the time in
    µs to read that context, host time included, the bytes of the drafter's cache for one sequence,
    and on CUDA the peak of memory of reading and drafting, with the drafter's weights.
    """
    for context in lengths:
        functions: dict[str, Callable[[], object]] = {}
        reads: dict[str, Callable[[], object]] = {}
        rows: dict[str, Row] = {}
        for (kind, drafter), name in itertools.product(drafters.items(), trees):
            tree, each = as_tree(name), f"{kind}, {name}"

            def read_and_draft(
                drafter: HybridModel = drafter, tree: StepTree = tree, context: int = context
            ) -> None:
                _drafts(drafter, tree, context)["draft"]()

            device = drafter.device
            drafter.pack()
            peak = peak_field("peak_bytes", read_and_draft, device, weight_bytes(drafter))
            made = _drafts(drafter, tree, context)
            functions[each], reads[each] = made["draft"], made["read"]
            levels = make_tree_batch([tree], drafter.device).levels
            # The same size as the cache of the timed draft
            cache = _model_drafter(drafter, tree, context).cache
            rows[each] = dict(
                what="draft_lengths", drafter=kind, tree=name, context=context,
                num_nodes=tree.num_nodes, num_levels=tree.max_depth,
                level_nodes=max(level.nodes.shape[1] for level in levels),
                cache_bytes=cache_bytes(cache), level_bytes=level_bytes(drafter), **peak,
            )
        times = side_by_side(functions, device, repeats)
        read_times = interleave(reads, device, max(3, repeats // 10))
        for each, row in rows.items():
            us_level = times[each]["median"] / row["num_levels"]
            yield dict(row, us_draft=times[each], us_level=us_level, us_read=read_times[each])


def prompts(target: HybridModel, lengths: Sequence[int], repeats: int) -> Iterator[Row]:
    """Time reading a prompt, in µs from an empty row to the logits; CUDA only.

    Prompts are read by graphs, and one operation after the other, host time included. Rows also
    have the peak of memory of the latter, with a cache of the prompt's length.
    """
    decoder = BatchDecoder(target, num_rows=1, max_length=max(lengths) + 1)
    for num_tokens in lengths:
        tokens = _tokens(target, 1, num_tokens)[0]
        peak = peak_field(
            "peak_bytes", partial(_read_anew, target, tokens), target.device, weight_bytes(target)
        )

        def reading(read: Callable[..., Tensor], tokens: Tensor = tokens) -> Callable[[], Tensor]:
            def call() -> Tensor:
                decoder.cache.clear(0)
                return read(target, decoder.cache, 0, tokens)

            return call

        by_graphs = decoder.worker.runner.prefiller.read_row
        functions = {"graphs": reading(by_graphs), "operations": reading(read_row)}
        times = interleave(functions, target.device, repeats)
        yield dict(what="prompt", num_tokens=num_tokens, **peak, **us_fields(times))


def _read_anew(model: HybridModel, tokens: Tensor) -> None:
    """Read a prompt (T,) into a cache of its length."""
    model.prefill(tokens[None], model.new_cache(len(tokens), 1))


def _model_drafter(drafter: HybridModel, tree: StepTree, context: int) -> ModelDrafter:
    """Return a drafter with room for all nodes of which a tree's recipe chooses."""
    return ModelDrafter(drafter, 1, context + MORE, max(tree.num_nodes, tree.num_inner))


def _drafts(
    drafter: HybridModel, tree: StepTree, context: int, model: ModelDrafter | None = None
) -> dict[str, Callable[[], object]]:
    """Return calls that draft a tree after `context` tokens, greedy and sampled; "read" reads
    these anew, "growth" chooses the nodes of a tree that grows. A `ModelDrafter` drafts unless
    another `model` is given."""
    model = model or _model_drafter(drafter, tree, context)
    tokens = _tokens(drafter, 1, context)[0]

    def read() -> None:
        model.clear(0)
        model.read(0, tokens)

    read()
    rows = BatchState.new(1, tree.num_nodes, drafter.device)
    tree_batch = make_tree_batch([tree], drafter.device)
    rows.begin(0, context, 1)
    longest, bound = tree.max_depth + 1, model.cache.num_slots
    warm = torch.ones_like(rows.temperature)
    sampled = replace(rows, temperature=warm, asked=Asked(sampled=True))
    drafts: dict[str, Callable[[], object]] = {
        name: partial(model.draft, settings, tree_batch, longest, bound, False)
        for name, settings in (("draft", rows), ("draft_sampled", sampled))
    }
    if isinstance(tree_batch, DynamicTreeBatch):
        drafts["growth"] = partial(_grow, tree_batch, drafter.config.d_conv)
    return {"read": read, **drafts}


def _grow(tree_batch: DynamicTreeBatch, width: int) -> None:
    """Choose the nodes of a tree and of each level of it, and build what calls over them read.

    The values of the nodes, which come with the tokens' choice, are there already.
    """
    for level in range(1, tree_batch.max_depth):
        tree_batch.grow(level)
        tree_batch.inner_topology(width)
    tree_batch.finish(tree_batch.pool)
    tree_batch.topology(width)


def level_bytes(drafter: HybridModel) -> int:
    """Count the bytes of the weights that each level of a draft reads."""
    sizes = product_sizes(drafter, 1)
    head = 0
    if (eighth := drafter.head_in_8_bits) is not None:
        sizes, head = sizes[:-1], eighth.values.nbytes + eighth.scale.nbytes
    return head + drafter.dtype.itemsize * sum(rows * columns for rows, columns in sizes)


def unrolled(target: HybridModel, context: int, repeats: int) -> Iterator[Row]:
    """Time a call over full binary trees, and over each leaf's path as a sequence of its own.

    In µs, as the paper's Figure 3: by the tree scan, by the multi-step update (if the kernels are
    there), and by chunk scan as in prefill.
    """
    for depth in range(1, UNROLLED_DEPTH + 1):
        tree = balanced([2] * depth, f"binary-{depth}")
        leaves = 2**depth
        functions = {
            "tree": _tree_call(target, tree, context),
            "unrolled": _tree_call(target, TokenTree.chain(depth), context, batch=leaves),
            "unrolled_chunk_scan": _prefill_call(target, depth + 1, context, batch=leaves),
        }
        if ops.fused(target.device, target.dtype):
            functions["unrolled_multi_step"] = _by_multi_step_updates(functions["unrolled"])
        times = side_by_side(functions, target.device, repeats)
        yield dict(
            what="unrolled", num_nodes=tree.num_nodes, leaves=leaves, context=context,
            **us_fields(times),
        )


def kept_beams(num_beams: int, num_steps: int) -> StepTree:
    """Make a tree of M beams and N steps as in STree's Table 2: M tokens per level.

    All tokens of a level are children of the first one above, which gives the most leaves that a
    beam search can leave.
    """
    parents = [-1, *(max(0, 1 + (step - 1) * num_beams) for step in range(num_steps)
                     for _ in range(num_beams))]
    return TokenTree(tuple(parents), f"beams-{num_beams}-{num_steps}")


def beams(
    target: HybridModel, drafter: HybridModel, context: int, repeats: int
) -> Iterator[Row]:
    """Yield a row per number of beams and steps: µs of a call over the tree, and over unrolled
    paths.

    Unrolled, each leaf's path is a sequence of its own, by the multi-step update if the kernels are
    there, and then one sequence's state is copied to the others. Rows also have the µs of that copy
    and of a greedy draft by beam search, the bytes of weights and of each cache, and on CUDA the
    peak of memory of either call, from reading the prompt to its end.
    """
    for num_beams, num_steps in itertools.product(BEAMS, BEAM_STEPS):
        tree = kept_beams(num_beams, num_steps)
        leaves = tree.num_nodes - len(set(tree.parents[1:]))
        chain = TokenTree.chain(num_steps)
        makers = {
            "tree": partial(_tree_call, target, tree, context),
            "unrolled": partial(_tree_call, target, chain, context, batch=leaves),
        }
        target.pack()
        peaks: dict[str, int] = {}
        for way, make in makers.items():
            peaks |= peak_field(
                f"peak_bytes_{way}", partial(_made_and_run, make), target.device,
                weight_bytes(target),
            )
        made = {way: make() for way, make in makers.items()}
        if ops.fused(target.device, target.dtype):
            made["unrolled"] = _by_multi_step_updates(made["unrolled"])
        caches = {
            "tree": target.new_cache(context + tree.num_nodes, tree.num_nodes),
            "unrolled": target.new_cache(context + chain.num_nodes, chain.num_nodes, leaves),
        }
        drafted = as_tree(f"beam-{num_beams}-{num_steps}")
        functions: dict[str, Callable[[], object]] = {
            **made, "copy": partial(copy_first_row, caches["unrolled"]),
            "draft": _drafts(drafter, drafted, context)["draft"],
        }
        times = side_by_side(functions, target.device, repeats)
        yield dict(
            what="beams", num_beams=num_beams, num_steps=num_steps, num_nodes=tree.num_nodes,
            leaves=leaves, context=context, weight_bytes=weight_bytes(target),
            **{f"cache_bytes_{name}": cache_bytes(each) for name, each in caches.items()},
            **peaks, **us_fields(times),
        )
        del functions, made, caches


def _made_and_run(make: Callable[[], Callable[[], object]]) -> None:
    make()()


def memory(target: HybridModel, num_nodes: int) -> Iterator[Row]:
    """Count the bytes that a tree needs in recurrent layers apart from the state, per state and
    node.

    The row also has the bytes under `joint`, which feeds the accepted path again.
    """
    kept = [kept_bytes(target.new_cache(16, size)) for size in (1, num_nodes)]
    joint = target.new_cache(16, num_nodes, backtracking="joint")
    states = sum(layer.state.nbytes for layer in joint.layers if hasattr(layer, "state"))
    yield dict(
        what="memory", num_nodes=num_nodes, kept_bytes=kept[1], kept_bytes_joint=kept_bytes(joint),
        kept_bytes_of_one_node=kept[0], state_bytes=states,
        over_a_state_a_node=kept[1] / (num_nodes * states),
    )


def kept_bytes(cache: HybridCache) -> int:
    """Count a cache's bytes for trees in layers with a conv: all but states, keys and values."""
    remembered = {
        id(tensor): tensor.nbytes
        for layer in cache.layers
        for name, tensor in vars(layer).items()
        if name in REMEMBERED
    }
    return cache_bytes(cache) - sum(remembered.values())


def cache_bytes(cache: HybridCache) -> int:
    """Count a cache's bytes for all its sequences, without the rotary angles, which they share."""
    return len(cache.length) * sum(cache.sequence_bytes().values())


def weight_bytes(model: HybridModel) -> int:
    return sum(each.nbytes for each in model.parameters())


def _star(num_nodes: int) -> StepTree:
    """Make the widest possible tree: as many children below the root as allowed, then a further
    level."""
    parents = (max(0, node - MAX_CHILDREN) for node in range(1, num_nodes))
    return TokenTree((-1, *parents), f"star-{num_nodes}")


def _filled_cache(model: HybridModel, context: int, num_nodes: int, batch: int) -> HybridCache:
    """Make a cache after a prompt; all sequences hold the first one's, as times do not depend on
    it."""
    cache = model.new_cache(context + num_nodes, num_nodes, batch)
    one = model.new_cache(context + num_nodes, num_nodes)
    model.prefill(_tokens(model, 1, context), one)
    for mine, theirs in zip(cache.layers, one.layers, strict=True):
        for name, tensor in vars(mine).items():
            if name in REMEMBERED:
                tensor.copy_(vars(theirs)[name].expand_as(tensor))
    cache.path.copy_(torch.arange(num_nodes))
    cache.num_committed = context
    return cache


def _tokens(model: HybridModel, batch: int, num_tokens: int) -> Tensor:
    """Return different tokens (batch, num_tokens), so that they choose different experts."""
    rows = [tokens_of_row(row, num_tokens, model.config.vocab_size) for row in range(batch)]
    return torch.tensor(rows, device=model.device)


def _tree_call(
    model: HybridModel, tree: StepTree, context: int, batch: int = 1
) -> Callable[[], Tensor]:
    num_nodes = tree.num_nodes
    cache = _filled_cache(model, context, num_nodes, batch)
    tokens = _tokens(model, batch, num_nodes)

    def call() -> Tensor:
        cache.length.fill_(context)  # the same in every run
        cache.path_length.fill_(min(3, num_nodes))  # a path of usual length is replayed
        return model.tree_forward(tokens, tree.shape, cache, cache.num_slots, wide=False)

    return call


def _prefill_call(
    model: HybridModel, num_tokens: int, context: int, batch: int
) -> Callable[[], Tensor]:
    cache = _filled_cache(model, context, num_tokens, batch)
    tokens = _tokens(model, batch, num_tokens)

    def call() -> Tensor:
        cache.num_committed = context
        return model.logits(model.model.norm(model.model.extend(tokens, cache)))

    return call


def _by_multi_step_updates(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Wrap a call over chains, with the multi-step update in place of the tree scan."""
    from stree_kernels.mamba.tree_scan import mamba_tree

    chain = partial(mamba_tree, as_chain=True)

    def swapped() -> Tensor:
        own = vars(ops)["mamba_tree"]
        vars(ops)["mamba_tree"] = chain
        try:
            return call()
        finally:
            vars(ops)["mamba_tree"] = own

    return swapped
