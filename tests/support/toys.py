"""Make small stand-ins with known answers: tables of logits, tiny hybrids, choices to enumerate."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

import stree
from stree.batching.sequences import Request
from stree.batching.state import BatchState
from stree.drafters import Drafter, Proposal, SiblingSampling
from stree.engine.row_store import SavedRow
from stree.generation import GenerationConfig
from stree.models.config import HybridConfig
from stree.models.model import HybridModel
from stree.models.slicing import take_head, with_random_head
from stree.trees.token_tree import TokenTree
from stree.trees.tree_batch import TreeBatch
from stree_kernels import naive, ops
from stree_kernels.naive.sampling import top

FEATURE_LAYERS = (0, 2)  # that drafters here read of a target


def tiny_config(**changes: object) -> HybridConfig:
    """Make a hybrid's config with every kind of grouping; a few thousand parameters."""
    values: dict = dict(
        vocab_size=61, d_model=32, num_layers=3, attn_layers=(1,), intermediate_size=40,
        num_heads=4, num_kv_heads=2, head_dim=8,
        num_ssm_heads=4, ssm_head_dim=8, d_state=8,
        num_x_groups=2, num_b_groups=2, num_c_groups=4, gated_norm_groups=4, chunk_size=8,
    )
    return HybridConfig(**(values | changes))


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> HybridModel:
    """Make a random model whose logits differ enough from token to token to be worth comparing."""
    torch.manual_seed(seed)
    model = HybridModel(tiny_config(**changes)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def right_now_and_then(target: HybridModel) -> HybridModel:
    """Make a drafter that is right now and then: the target's weights with noise."""
    drafter = HybridModel(target.config).to(target.device, target.dtype).eval()
    drafter.load_state_dict(target.state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.numel() > 1:
                parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    return drafter


def reading(target: HybridModel) -> HybridModel:
    """Make a drafter that reads features: the target's weights with noise, and a feature reader.

    The reader's weights are large enough that features change the drafts.
    """
    drafter = right_now_and_then(target)
    config = drafter.config.reading(FEATURE_LAYERS, target.config)
    torch.manual_seed(5)
    model = HybridModel(config).to(drafter.dtype).eval()
    model.load_state_dict(drafter.state_dict(), strict=False)
    size = drafter.model.embed_tokens.weight.std()
    with torch.no_grad():
        model.model.features.begin(0.3 * size)
        model.model.features.unknown.normal_(std=0.3 * size)
    return model


def recurrent(own: bool = True, **changes: object) -> tuple[HybridModel, HybridModel]:
    """Make a target without attention, and a drafter that reads its features.

    With `own`, the drafter reads its own features too.
    """
    target = tiny_model(1, attn_layers=(), **changes)
    drafter = reading(target)
    model = HybridModel(drafter.config.replace(own_features=own)).to(drafter.dtype).eval()
    model.load_state_dict(drafter.state_dict(), strict=False)
    if own:
        model.model.features.own_gain.weight.data.copy_(drafter.model.features.gain.weight)
    return target, model


def random_tree(num_nodes: int, seed: int = 0) -> TokenTree:
    """Make a tree in which each node hangs below any earlier one, with equal probability."""
    rng = random.Random(seed)
    parents = (-1, *(rng.randrange(node) for node in range(1, num_nodes)))
    return TokenTree(parents, f"random-{num_nodes}")


def mixed_requests(count: int, trees: Sequence[TokenTree], seed: int) -> list[Request]:
    """Make `count` requests of all lengths and settings, each with one of the trees."""
    rng = random.Random(seed)
    return [
        Request(
            [rng.randrange(61) for _ in range(rng.randint(1, 12))],
            GenerationConfig(
                rng.randint(1, 30), temperature=rng.choice([0.0, 0.7, 1.2]), seed=rng.randrange(99),
                top_k=rng.choice([0, 20]),
            ),
            rng.choice(trees),
        )
        for _ in range(count)
    ]


def answered_as_plain(
    target: HybridModel, drafter: Any, served: Sequence[Request], verifier: str
) -> list[stree.GenerationOutput]:
    """Return what three rows answer, and assert that it is plain decoding's.

    Sampled answers are compared for the verifier coupled alone.
    """
    decoder = stree.BatchDecoder(
        target, drafter, num_rows=3, max_length=64, max_nodes=13, verifier=verifier
    )
    outputs = decoder.generate(served)
    for each, out in zip(served, outputs, strict=True):
        if verifier == "coupled" or not each.generation.temperature:
            plain = stree.Decoder(target, max_length=64).generate(each.prompt_ids, each.generation)
            assert out.tokens == plain.tokens
    return outputs


def load_quietly(*arguments: Any, **options: Any) -> stree.Decoder:
    """Return what `stree.load` gives on the CPU, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return stree.load(*arguments, device="cpu", **options)


class TableTarget:
    """A target whose logits are a table over the last two tokens."""

    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(self, table: Tensor, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.table = table  # (V, V, V)
        self.config = HybridConfig(
            vocab_size=table.shape[-1], d_model=1, num_layers=1, attn_layers=(0,),
            num_heads=1, num_kv_heads=1, head_dim=2, eos_token_ids=eos_token_ids,
        )

    def new_cache(self, max_length: int, max_nodes: int, batch: int = 1) -> TableCache:
        return TableCache([TableRow() for _ in range(batch)], max_nodes)

    def after(self, context: Sequence[int]) -> Tensor:
        return self.table[context[-2], context[-1]]

    def prefill(self, tokens: Tensor, cache: TableCache) -> Tensor:
        (row,) = cache.rows
        row.committed += tokens[0].tolist()
        return self.after(row.committed)[None]

    def tree_batch_forward(
        self, tokens: Tensor, tree_batch: TreeBatch, cache: TableCache, bound: int
    ) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.table.shape[-1], dtype=self.table.dtype)
        for at, (row, tree) in enumerate(zip(cache.rows, tree_batch.trees, strict=True)):
            accepted = cache.path[at, : int(cache.path_length[at])].tolist()
            row.committed += [row.tree[node] for node in accepted]
            cache.path_length[at] = 0
            row.tree = tokens[at].tolist()
            if len(row.committed) < 1:
                continue  # an idle row
            for node in range(tree.num_nodes):
                path = [row.tree[each] for each in tree.path_to(node)]
                logits[at, node] = self.after(row.committed + path)
        return logits


class TableRow:
    def __init__(self) -> None:
        self.committed: list[int] = []
        self.tree: list[int] = []


class TableCache:
    def __init__(self, rows: list[TableRow], max_nodes: int) -> None:
        self.rows = rows
        self.path = torch.zeros(len(rows), max_nodes, dtype=torch.long)
        self.path_length = torch.zeros(len(rows), dtype=torch.long)
        self.variant = torch.zeros(len(rows), dtype=torch.long)

    def narrow(self, first: int, count: int) -> TableCache:
        view = copy.copy(self)
        view.rows = self.rows[first : first + count]
        for name in ("path", "path_length", "variant"):
            setattr(view, name, getattr(self, name).narrow(0, first, count))
        return view

    def at(self, row: int) -> TableCache:
        return self.narrow(row, 1)

    def clear(self, row: int) -> None:
        self.path_length[row] = 0
        self.rows[row].committed, self.rows[row].tree = [], []

    def save(self, row: int, most: int) -> SavedRow:
        committed = self.rows[row].committed
        return SavedRow(torch.tensor(len(committed)), tuple(committed))

    def load(self, saved: SavedRow, row: int) -> None:
        self.rows[row].committed = list(saved.parts)


class TableDrafter(Drafter):
    """Grows trees with the product's own op, from a table over the last two tokens."""

    drawn = SiblingSampling.WITHOUT_REPLACEMENT
    capturable = False

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.sequences: dict[int, list[int]] = defaultdict(list)

    def clear(self, row: int) -> None:
        self.sequences[row] = []

    def read(self, row: int, tokens: Tensor) -> None:
        self.sequences[row] += tokens.tolist()

    def read_blocks(self, rows: BatchState) -> None:
        for row, (count, *block) in enumerate(rows.block.tolist()):
            if rows.active[row]:
                self.sequences[row] += block[:count]

    def draft(
        self, rows: BatchState, tree_batch: TreeBatch, longest_block: int, bound: int,
        keep_logits: bool,
    ) -> Proposal:
        self.read_blocks(rows)
        batch = len(rows.active)
        tokens = torch.zeros(batch, tree_batch.num_nodes, dtype=torch.long)
        finite = torch.ones(batch, tree_batch.num_drawn_from, dtype=torch.bool)
        for row in range(batch):
            tokens[row, 0] = self.sequences[row][-1] if rows.active[row] else 0
        drawn_from: list[Tensor] = []
        for number, level in enumerate(tree_batch.levels):
            logits = torch.zeros(*level.nodes.shape, len(self.table), dtype=self.table.dtype)
            for row, tree in enumerate(tree_batch.trees):
                for at, node in enumerate(level.nodes[row].tolist()):
                    if node >= 0 and rows.active[row]:
                        path = tokens[row, tree.path_to(node)[1:]].tolist()
                        before, last = (self.sequences[row] + path)[-2:]
                        logits[row, at] = self.table[before, last]
            paths = tree_batch.paths_at(tokens, number, rows.asked.reads_paths)
            logits = rows.processed(logits, paths)
            self.choose(
                logits, level.noise_at(keep_logits), rows.sampling, level.places,
                tokens, finite[:, : level.nodes.shape[1]],
            )
            drawn_from.append(logits)
        logits = torch.cat(drawn_from, 1) if drawn_from and keep_logits else None
        independent = self.drawn is SiblingSampling.INDEPENDENT
        return Proposal(tokens, finite, logits, independent=independent)

    def choose(self, *given) -> None:
        ops.choose_children(*given)


class Undrawn(TableDrafter):
    """Draws nothing: the best tokens of its table, whatever the rows' settings."""

    drawn = SiblingSampling.DETERMINISTIC

    def draft(self, rows, tree_batch, longest_block, bound, keep_logits) -> Proposal:
        greedy = dataclasses.replace(
            rows, asked=rows.asked._replace(sampled=False, filtered=False)
        )
        proposal = super().draft(greedy, tree_batch, longest_block, bound, False)
        return Proposal(proposal.tokens, proposal.finite)


class Streamer:
    """Keeps what it is given, and how often it is ended; `on_put` is called with each value."""

    def __init__(self, on_put: Callable[[Tensor], object] = lambda value: None) -> None:
        self.values: list = []
        self.tokens: list[int] = []
        self.ended, self.on_put = 0, on_put

    def put(self, value: Tensor) -> None:
        self.values.append(value.tolist())
        self.tokens += value.flatten().tolist()
        self.on_put(value)

    def end(self) -> None:
        self.ended += 1


def choose_by(patch: Any, choose_children: Callable[..., None]) -> None:
    """Let all drafters choose children by this function: by the op, and after a head's product."""
    patch.setattr(ops, "choose_children", choose_children)
    patch.setattr(top, "choose_children", choose_children)


def drawing_in_turn(choose: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Return a stand-in for `ops.choose_children` whose random choices can be enumerated.

    It covers rows that sample: siblings are drawn one after the other with `choose`, without
    replacement, and the first tokens are taken when none is left.
    """

    def choose_children(
        logits, depths, sampling, places, tokens, finite, nodes=None, values=None, ids=None,
        slots=None,
    ) -> None:
        finite.copy_(logits.amax(-1).isfinite())
        if ids is not None:
            whole = torch.full((*logits.shape[:-1], 1 + int(ids[-1])), -torch.inf)
            logits = whole.to(logits.dtype).index_copy(-1, ids, logits)
        for row, at, rank in itertools.product(*map(range, places.shape)):
            place = int(places[row, at, rank])
            if place < 0:
                continue
            taken = tokens[row, places[row, at, :rank]]
            temperature = 0.0 if sampling is None else float(sampling.temperature[row])
            scores = logits[row, at].double().clone()
            if temperature == 0:
                scores[taken] = -torch.inf
                tokens[row, place] = scores.argmax()
                continue
            probs = (scores / temperature).softmax(-1)
            probs[taken] = 0.0
            if probs.sum() == 0:
                free = torch.ones_like(probs).index_fill(0, taken, 0.0)
                tokens[row, place] = free.argmax()
            else:
                tokens[row, place] = choose(probs / probs.sum())
        if slots is not None:
            naive.rate_slots(logits, tokens, nodes, places, values, slots)

    return choose_children


def with_head(
    model: HybridModel, ids: Tensor | None = None, rank: int | None = None
) -> HybridModel:
    """Copy a model with a head over the tokens `ids` (K,), ascending, or of rank `rank`.

    The copy's head has as much of the whole head as that can hold.
    """
    copy = with_random_head(model, None if ids is None else len(ids), rank)
    take_head(copy, model.head_weight, ids)
    return copy


def exact_distribution(
    run: Callable[[Callable[[Tensor], Tensor]], Hashable],
) -> dict[Hashable, float]:
    """Return the distribution of run(choose), by enumerating all its random choices."""
    distribution: dict[Hashable, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        taken: list[int] = []
        weight = 1.0

        def choose(probs: Tensor) -> Tensor:
            nonlocal weight
            drawn = []
            for row in probs.reshape(-1, probs.shape[-1]).tolist():
                possible = [index for index, prob in enumerate(row) if prob > 0]
                if len(taken) < len(script):
                    index = script[len(taken)]
                else:
                    index = possible[0]
                    scripts.extend([*taken, other] for other in possible[1:])
                taken.append(index)
                weight *= row[index]
                drawn.append(index)
            return torch.tensor(drawn).reshape(probs.shape[:-1])

        outcome = run(choose)
        distribution[outcome] += weight
    return dict(distribution)


def total_variation(
    blocks: dict[tuple[int, ...], float], after: Callable[[tuple[int, ...]], list[float]],
    start: tuple[int, ...], vocabulary: int, length: int,
) -> float:
    """Return the total variation between a step's first `length` tokens and the target's own.

    Args:
        blocks: probability of each block of tokens that a step gives after `start`.
        after: gives the target's distribution (V,) after a text. A block shorter than `length`
            goes on with the target itself: if each block is right given its context, so is any
            sequence of them.
    """
    after = functools.cache(after)

    def going_on(context: tuple[int, ...], rest: tuple[int, ...]) -> float:
        prob = 1.0
        for token in rest:
            prob *= after(context)[token]
            context += (token,)
        return prob

    total = 0.0
    for tokens in itertools.product(range(vocabulary), repeat=length):
        got = sum(
            prob * going_on((*start, *block), tokens[len(block) :])
            for block, prob in blocks.items()
            if tokens[: len(block)] == block[:length]
        )
        total += abs(got - going_on(start, tokens))
    return total / 2
