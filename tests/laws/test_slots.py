"""DySpec's trees: chosen by slots, so that coins may judge them; and SpecInfer's expansion."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
import torch
from eager import by_fused_kernels, by_graphs
from enumerated import (
    CONTEXT,
    RELATIONS,
    assert_targets,
    distance,
    random_case,
    related_case,
    row_distribution,
)
from growing import Growing, Telling
from lanes import costly, quick_first
from planted import edited
from toys import right_now_and_then, tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.common.errors import UsageError
from stree.drafters.model import ModelDrafter
from stree.trees import dynamic
from stree.trees.build import make_tree_batch
from stree.trees.dynamic import SlotTreeBatch
from stree.trees.token_tree import SlotTree, balanced
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal
from stree_kernels import naive, ops

CPU = torch.device("cpu")


def block_distribution(
    tables, tree: SlotTree, setting: GenerationConfig, verifier=MultiStep
) -> dict:
    """Return the distribution of what one step gives a row, over all draws and coins."""
    return row_distribution(
        tables[0], lambda choose: Telling(tables[1], choose), lambda: SlotTreeBatch(tree, 1, CPU),
        setting, verifier,
    )


CASES = [
    ("dyspec-2-1-2", MultiStep), ("dyspec-3-1-3", MultiStep), ("dyspec-1-2-3", MultiStep),
    ("dyspec-2-1-3", Traversal), ("dyspec-1-2-3", Traversal), ("dyspec-1-2-3", Block),
    ("dyspec-3-1-3", Naive), ("dyspec-2-1-3-0.4", MultiStep), ("dyspec-2-1-3-0.4", Traversal),
    pytest.param("dyspec-2-2-4-0.3", MultiStep, marks=pytest.mark.long),
    pytest.param("dyspec-2-2-3", MultiStep, marks=pytest.mark.long),
    pytest.param("dyspec-1-3-4", Block, marks=pytest.mark.long),
    *(pytest.param(name, verifier, marks=pytest.mark.long)
      for name in ("dyspec-2-2-4", "dyspec-2-2-5", "dyspec-1-3-4", "dyspec-2-2-5-0.2")
      for verifier in (MultiStep, Traversal, Naive)),
]


@pytest.mark.quick(5)
@pytest.mark.parametrize(("name", "verifier"), CASES)
def test_output_distribution_is_the_targets(name, verifier):
    """Slots of one value, as ties make them, are in the order of their depths."""
    tree = TokenTree.load(name)
    target, drafter, _, other = random_case(len(name) + tree.num_nodes, [balanced([3])])
    for table, setting in ((drafter, GenerationConfig(temperature=1.0)), (drafter.round(), other)):
        distribution = block_distribution((target, table), tree, setting, verifier)
        assert_targets(distribution, target, setting, tree)


RELATED = [("dyspec-2-1-3", MultiStep), ("dyspec-1-2-3", Traversal)]


@pytest.mark.parametrize(
    ("name", "verifier", "relation", "seed"),
    quick_first(
        [(*case, relation, 0) for case in RELATED for relation in RELATIONS[1:]],
        [
            *(("dyspec-1-2-3", Block, relation, seed)
              for relation in RELATIONS[1:] for seed in range(4)),
            *((name, verifier, relation, seed)
              for name in ("dyspec-2-1-3", "dyspec-3-1-3", "dyspec-1-2-3")
              for verifier in (MultiStep, Traversal, Naive)
              for relation in RELATIONS[1:] for seed in range(4)),
            *(("dyspec-2-2-4", verifier, relation, 0)
              for verifier in (MultiStep, Traversal) for relation in RELATIONS[1:]),
        ],
    ),
)
def test_so_it_is_of_distributions_that_are_related(name, verifier, relation, seed):
    tree = TokenTree.load(name)
    target, drafter, _, setting = related_case(seed, relation, [balanced([3])])
    distribution = block_distribution((target, drafter), tree, setting, verifier)
    assert_targets(distribution, target, setting, tree)


@pytest.mark.parametrize(
    ("name", "verifier"), [("dyspec-1-2-3", MultiStep), ("dyspec-2-1-3", Traversal)]
)
def test_so_it_is_with_a_penalty_that_each_slot_has_of_its_own(name, verifier, monkeypatch):
    tree = TokenTree.load(name)
    target, drafter, _, _ = random_case(2, [balanced([3])])
    setting = GenerationConfig(temperature=1.0, repetition_penalty=1.8)
    distribution = block_distribution((target, drafter), tree, setting, verifier)
    assert distance(distribution, target, setting, tree.max_depth + 1) <= 1e-10
    monkeypatch.setattr(SlotTreeBatch, "paths_of", lambda self, tokens, penalised: None)
    distribution = block_distribution((target, drafter), tree, setting, verifier)
    assert distance(distribution, target, setting, tree.max_depth + 1) > 1e-4


MISTAKES = {
    "a slot is as good as what it holds": (
        naive.rate_slots, "worth.flatten(1)", "reached.flatten(1)",
    ),
    "others' distributions": (naive.pick_tree, "drawn_at.gather(1, picks)", "0 * picks"),
    "a draft is left out for its own token": (
        naive.pick_tree, "picks) < least",
        "picks).lt(least) | ((tokens == 1) & (picks == picks[:, -1:]))",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_caught(mistake, monkeypatch):
    function = edited(*MISTAKES[mistake])
    name = function.__name__
    monkeypatch.setattr(ops if hasattr(ops, name) else naive, name, function)
    setting = GenerationConfig(temperature=1.0)

    def is_wrong(name):
        tree = TokenTree.load(name)
        target, drafter, _, _ = random_case(3, [balanced([3])])
        distribution = block_distribution((target, drafter), tree, setting)
        return distance(distribution, target, setting, tree.max_depth + 1) > 1e-4

    # The cheapest that shows it is enough
    assert any(map(is_wrong, ("dyspec-2-1-2", "dyspec-1-2-3", "dyspec-2-2-4-0.3")))


def by_heap(shares_of, size: int, depth: int, threshold: float = 0.0) -> Counter:
    """Return the paths of a tree's drafts by DySpec's Algorithm 1, to a depth.

    shares_of(path) returns the tokens that would be drawn after it, and their probabilities. Slots
    of less value than a threshold are those that its Algorithm 2 leaves out.
    """
    heap, order, paths = [(-1.0, 0, (), 0)], 1, Counter()
    while len(paths) < size and heap and -heap[0][0] >= threshold:
        value, _, parent, rank = heapq.heappop(heap)
        tokens, probs = shares_of(parent)
        token, residual = tokens[rank], 1.0 - sum(probs[:rank])
        share = probs[rank] / residual  # R[y]
        paths[*parent, token] += 1
        if rank + 1 < len(tokens):
            heapq.heappush(heap, (value * (1 - share), order, parent, rank + 1))
        if len(parent) + 1 < depth:
            heapq.heappush(heap, (value * share, order + 1, (*parent, token), 0))
        order += 2
    return paths


@pytest.mark.parametrize(
    "name",
    ["dyspec-4-3-5", "dyspec-5-4-6", "dyspec-6-3-7", "dyspec-9-2-60-0.08", "dyspec-9-3-12-0.1"],
)
def test_the_tree_is_dyspecs(name):
    """The draws are wide enough that no slot is missing."""
    tree = TokenTree.load(name)
    setting, shapes = GenerationConfig(temperature=1.2, seed=5), set()
    for seed in range(6):
        torch.manual_seed(seed)
        table = 2 * torch.randn(9, 9, 9, dtype=torch.float64)
        rows = BatchState.new(1, tree.num_nodes)
        rows.set(0, setting)
        rows.begin(0, 1, CONTEXT[-1])
        drafter, tree_batch = Growing(table), SlotTreeBatch(tree, 1, CPU)
        drafter.read(0, torch.tensor(CONTEXT[:-1]))
        drafter.draft(rows.narrow(0, 1, [setting]), tree_batch, 1, 8, True)
        pool, children = tree_batch.pool[0].tolist(), {}
        nodes = torch.cat([level.nodes[0] for level in tree_batch.levels]).tolist()
        places = [each for level in tree_batch.levels for each in level.places[0].tolist()]
        paths = {0: ()}
        for node, there in zip(nodes, places, strict=True):
            children[paths[node]] = [pool[place] for place in there]
            paths |= {place: (*paths[node], pool[place]) for place in there}

        def shares_of(path, children=children, table=table):
            probs = (table[tuple([*CONTEXT, *path][-2:])] / setting.temperature).softmax(-1)
            return children[path], probs[children[path]].tolist()

        (grown,) = tree_batch.trees
        got = Counter(
            tuple(int(tree_batch.tokens[0, each]) for each in grown.path_to(node)[1:])
            for node in range(1, grown.num_nodes)
        )
        assert got == by_heap(shares_of, tree.num_nodes - 1, tree.depth, tree.threshold)
        assert tree_batch.sizes.tolist() == [grown.num_nodes] == [1 + got.total()]
        assert (tree_batch.parents[0, grown.num_nodes :] == -2).all()
        shapes.add(grown.parents)
    assert len(shapes) > 1


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("verifier", "name"),
    [("coupled", "dyspec-3-3-8-0.2"), ("traversal", "dyspec-3-3-8"),
     ("coupled", "dyspec-3-3-9 depth first"), ("multi_step", "dyspec-3-3-9-0.02 depth first"),
     costly("coupled", "dyspec-3-3-8"), costly("multi_step", "dyspec-3-3-8"),
     costly("multi_step", "dyspec-3-3-8-0.2")],
)
def test_steps_of_models_as_graphs_and_without(verifier, name, monkeypatch, captured_on_cpu):
    """With `coupled` the tokens of a batch of several settings are plain decoding's."""
    target = tiny_model(1)
    name, *reordered = name.split(maxsplit=1)
    monkeypatch.setattr(dynamic, "NUM_NODES_REORDERED", 2 if reordered else 256)
    drafter, tree = right_now_and_then(target), TokenTree.load(name)
    served = [
        Request([3, 1, 4], GenerationConfig(12, temperature, seed=seed, top_k=top_k))
        for seed, (temperature, top_k) in enumerate([(0.0, 0), (0.7, 9), (1.3, 0)])
    ]
    plain = BatchDecoder(target, num_rows=3, max_length=64).generate(served)
    options = dict(num_rows=3, verifier=verifier)
    outputs = by_graphs(monkeypatch, served, target, drafter, tree, **options)
    exact = 3 if verifier == "coupled" else 1
    assert [e.tokens for e in outputs][:exact] == [e.tokens for e in plain][:exact]
    assert sum(sum(each.stats.accepted_per_call) for each in outputs) > 12


@pytest.mark.long
@pytest.mark.parametrize("verifier", ["multi_step", "traversal"])
def test_steps_of_fused_kernels_give_the_same_tokens(verifier, monkeypatch, captured_on_cpu):
    target = tiny_model(1, torch.float32, num_layers=2)
    drafter, tree = right_now_and_then(target), TokenTree.load("dyspec-3-3-8")
    served = [
        Request([5, 6, 7], GenerationConfig(6, temperature=1.0, seed=seed)) for seed in (3, 4)
    ]
    assert any(by_fused_kernels(monkeypatch, served, target, drafter, tree, verifier=verifier))


def test_a_drafter_of_a_model_says_what_its_drafts_were_drawn_from():
    """`drawn_by` names, for each node with children, the row of logits after its path."""
    model, tree = tiny_model(3, attn_layers=()), SlotTree.of(3, 3, 8)
    setting, drafter = GenerationConfig(temperature=1.3, seed=5), ModelDrafter(model, 1, 64, 9)
    rows, tree_batch, text = BatchState.new(1, 8), make_tree_batch([tree], CPU).own(), [4, 9, 2, 7]
    rows.set(0, setting)
    drafter.read(0, torch.tensor(text[:-1]))
    rows.begin(0, len(text) - 1, text[-1])
    with torch.no_grad():
        proposal = drafter.draft(rows.narrow(0, 1, [setting]), tree_batch, 1, 32, True)
        (grown,) = tree_batch.trees
        for node, children in enumerate(grown.children):
            if children:
                path = proposal.tokens[0, grown.path_to(node)[1:]].tolist()
                wanted = model(torch.tensor([text + path]))[0, -1]
                got = proposal.logits[0, tree_batch.drawn_by[0, node]]
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_names_lead_to_trees_and_back():
    tree = TokenTree.load("dyspec-3-4-13")
    assert isinstance(tree, SlotTree) and tree.name == "dyspec-3-4-13"
    above = TokenTree.load("dyspec-3-4-13-0.01")
    assert isinstance(above, SlotTree) and above.name == "dyspec-3-4-13-0.01"
    assert above.threshold == 0.01 and above != tree and above.parents == tree.parents
    assert TokenTree.load("expand-3-2-1").parents == balanced([3, 2, 1]).parents
    assert TokenTree.load("expand-3-2-1").name == "expand-3-2-1"
    for name, reason in (
        ("expand-3-0", "at least one child"), ("expand-20-20-20", "has 8421 nodes"),
        ("dyspec-3-4-4", "wanted 5"), ("dyspec-3-4-13-0.0", "threshold of slots is 0.0"),
        ("dyspec-3-4-13-1.5", "between 0 and 1"),
    ):
        with pytest.raises(UsageError, match=reason):
            TokenTree.load(name)


def test_a_verifier_that_says_nothing_of_it_refuses_it():
    model = tiny_model(1)

    class Own(MultiStep):
        by_slots = False

    with pytest.raises(UsageError, match="judges trees of one shape, dyspec-2-2-4 is dynamic"):
        Decoder(model, model, TokenTree.load("dyspec-2-2-4"), verifier=Own())


def test_noise_of_each_slot_has_a_position_of_its_own():
    """31 bits hold the positions; trees that draw more are refused."""
    with pytest.raises(UsageError, match="at most 2047 nodes"):
        TokenTree.load("dyspec-16-16-64")
    tree = TokenTree.load("dyspec-16-8-64")
    tree_batch = SlotTreeBatch(tree, 1, torch.device("cpu"))
    tree_batch.levels[1].nodes.fill_(tree.num_drawn - 1)
    assert (tree_batch.levels[1].noise_at(True) > 0).all()


@pytest.mark.parametrize("name", ["dyspec-4-3-20", "dyspec-5-4-30-0.05"])
def test_large_trees_come_depth_first(name, monkeypatch):
    """Each node is followed by all below it; the tree, its siblings' order and tokens are the
    same, and attention's mask has fewer blocks (DySpec, Appendix C)."""
    tree, setting = TokenTree.load(name), GenerationConfig(temperature=1.2, seed=5)
    moved = 0
    for seed in range(4):
        grown = {}
        for least in (tree.num_nodes + 1, tree.num_nodes):
            monkeypatch.setattr(dynamic, "NUM_NODES_REORDERED", least)
            torch.manual_seed(seed)
            rows = BatchState.new(1, tree.num_nodes)
            rows.set(0, setting)
            rows.begin(0, 1, CONTEXT[-1])
            table = 2 * torch.randn(9, 9, 9, dtype=torch.float64)
            drafter, tree_batch = Growing(table), SlotTreeBatch(tree, 1, CPU)
            drafter.read(0, torch.tensor(CONTEXT[:-1]))
            proposal = drafter.draft(rows.narrow(0, 1, [setting]), tree_batch, 1, 8, True)
            grown[least] = tree_batch, proposal.tokens[0].tolist()
        (by_value, tokens), (ordered, moved_tokens) = grown.values()
        (before,), (after,) = by_value.trees, ordered.trees
        walk, left = [], [0]  # the nodes of `before` in the order of `after`
        while left:
            walk.append(left.pop())
            left += before.children[walk[-1]][::-1]
        nodes_of = [walk.index(node) for node in range(before.num_nodes)]
        assert after.parents == (-1, *(nodes_of[before.parents[node]] for node in walk[1:]))
        for node, other in enumerate(nodes_of):
            assert tokens[node] == moved_tokens[other]
            assert by_value.depths[0, node] == ordered.depths[0, other]
            assert by_value.drawn_by[0, node] == ordered.drawn_by[0, other]
        assert (ordered.parents[0, after.num_nodes :] == dynamic.ABSENT).all()
        accepted = torch.tensor([[*nodes_of, -1]])  # statistics know nodes by their ranks
        ordered.report_ranks(accepted)
        assert accepted[0].tolist() == [*range(before.num_nodes), -1]
        moved += before.parents != after.parents
    assert moved


@pytest.mark.long
@pytest.mark.parametrize("verifier", [MultiStep, Traversal])
def test_output_distribution_is_the_targets_depth_first(verifier, monkeypatch):
    monkeypatch.setattr(dynamic, "NUM_NODES_REORDERED", 2)
    test_output_distribution_is_the_targets("dyspec-2-2-4", verifier)
