"""Small stand-ins with known answers: tables of logits, tiny hybrids, an enumerating chooser."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from stree.draft import Draft, SamplingRule, grow
from stree.models.config import HybridConfig
from stree.models.hybrid import HybridModel
from stree.sampling import Chooser
from stree.tree import TokenTree


def tiny_config(**changes: object) -> HybridConfig:
    """A hybrid that exercises every kind of grouping; a few thousand parameters."""
    values: dict = dict(
        vocab_size=61, d_model=32, num_layers=3, attn_layers=(1,), intermediate_size=40,
        num_heads=4, num_kv_heads=2, head_dim=8,
        num_ssm_heads=4, ssm_head_dim=8, d_state=8,
        num_x_groups=2, num_b_groups=2, num_c_groups=4, gated_norm_groups=4, chunk_size=8,
    )  # fmt: skip
    return HybridConfig(**(values | changes))


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: object) -> HybridModel:
    """A random model whose logits differ enough from token to token to be worth comparing."""
    torch.manual_seed(seed)
    model = HybridModel(tiny_config(**changes)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


class TableTarget:
    """A target whose logits are a table over the last two tokens."""

    device = torch.device("cpu")

    def __init__(self, table: Tensor, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.table = table  # (V, V, V)
        self.config = HybridConfig(
            vocab_size=table.shape[-1], d_model=1, num_layers=1, attn_layers=(0,),
            num_heads=1, num_kv_heads=1, head_dim=2, eos_token_ids=eos_token_ids,
        )  # fmt: skip

    def new_cache(self, max_length: int, max_nodes: int) -> TableCache:
        return TableCache()

    def after(self, context: Sequence[int]) -> Tensor:
        return self.table[context[-2], context[-1]]

    def prefill(self, tokens: Tensor, cache: TableCache) -> Tensor:
        cache.committed += tokens[0].tolist()
        return self.after(cache.committed)[None]

    def tree_forward(self, tokens: Tensor, tree: TokenTree, cache: TableCache) -> Tensor:
        cache.tree = tokens[0].tolist()
        rows = []
        for node in range(tree.num_nodes):
            path = [cache.tree[each] for each in tree.path_to(node)]
            rows.append(self.after(cache.committed + path))
        return torch.stack(rows)[None]


class TableCache:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.committed: list[int] = []
        self.tree: list[int] = []

    def commit(self, path: Sequence[int]) -> None:
        self.committed += [self.tree[node] for node in path]


class TableDrafter:
    """Grows trees with the product's own code, from a table over the last two tokens."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def reset(self) -> None: ...

    def catch_up(self, sequence: list[int]) -> None: ...

    def draft(
        self, sequence: list[int], tree: TokenTree, rule: SamplingRule, choose: Chooser
    ) -> Draft:
        past = {0: (sequence[-2], sequence[-1])}

        def advance(tokens: Tensor, nodes: tuple[int, ...]) -> Tensor:
            for node in nodes:
                past[node] = (past[tree.parents[node]][1], int(tokens[node]))
            return torch.stack([self.table[past[node]] for node in nodes])

        tokens = torch.zeros(tree.num_nodes, dtype=torch.long)
        tokens[0] = sequence[-1]
        return grow(advance, self.table[past[0]][None], tokens, tree, rule, choose)


def exact_law(run: Callable[[Chooser], Hashable]) -> dict[Hashable, float]:
    """The law of run(choose) over all its random choices, each weighted by its probability."""
    law: dict[Hashable, float] = defaultdict(float)
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
        law[outcome] += weight
    return dict(law)


def total_variation(
    blocks: dict[tuple[int, ...], float],
    after: Callable[[int, int], list[float]],
    start: tuple[int, ...],
    vocabulary: int,
    length: int,
) -> float:
    """Between the first `length` tokens after `start` by a step's blocks, and by the target alone.

    after(before, last) is the target's law after two tokens. A block shorter than that goes on with
    the target itself: if each block is right given its context, so is any sequence of them.
    """
    after = functools.cache(after)

    def going_on(context: tuple[int, ...], rest: tuple[int, ...]) -> float:
        prob = 1.0
        for token in rest:
            prob *= after(*context[-2:])[token]
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
