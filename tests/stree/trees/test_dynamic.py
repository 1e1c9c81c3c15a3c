"""Dynamic trees: the best by the drafter, and what comes out is the target's own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from eager import by_graphs
from enumerated import (
    CONTEXT,
    RELATIONS,
    TREES,
    distance,
    random_case,
    related_case,
    row_distribution,
)
from growing import Growing, GrowingInTurn
from toys import (
    TableTarget,
    right_now_and_then,
    tiny_model,
)

from stree import AdaptiveTrees, BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.batching.state import BatchState
from stree.batching.step import Step
from stree.common.errors import UsageError
from stree.drafters import Proposal, SiblingSampling
from stree.drafters.model import ModelDrafter
from stree.drafters.ngram import NGram
from stree.speculation_profile import Tree
from stree.tree_policy.adaptive import PLAIN
from stree.tree_policy.step_times import StepTimes
from stree.trees.build import make_tree_batch
from stree.trees.dynamic import dynamic_tree_batch
from stree.trees.token_tree import BeamSearchTree, BeamTree
from stree.verifiers import require_tree
from stree.verifiers.rejection import Block, MultiStep, Naive, Traversal
from stree_kernels import naive

NAMES = ["beam-1-3-4", "beam-3-1-4", "beam-2-4-7", "beam-3-4-13", "beam-4-2-12"]
SEARCHES = ["beam-1-3", "beam-3-1", "beam-2-4", "beam-3-4"]  # STree's: M tokens a level
CPU = torch.device("cpu")


def best_first(model, context, tree: BeamTree, generation: GenerationConfig):
    """Return tokens and parents by the model's whole-sequence logits.

    The best node comes first, or those of a beam search level by level.
    """

    def children(path: list[int]) -> list[tuple[float, int]]:
        logits = model(torch.tensor([context + path]))[0, -1].double()
        scores, scale = logits, generation.temperature or 1.0
        if generation.temperature:
            place = torch.tensor([[len(context) + len(path)]])
            noise = naive.token_noise(torch.tensor([generation.seed]), place, len(logits))[0, 0]
            scores = logits / scale + noise
        best = scores.topk(tree.width).indices
        shares = (scores * scale).log_softmax(-1)
        return [(float(shares[token]), int(token)) for token in best]

    nodes = [(0.0, [], -1)]  # value, path, parent
    level, kept = [0], [0]
    for _ in range(tree.depth):
        start = len(nodes)
        for parent in level:
            value, path, _ = nodes[parent]
            nodes += [(value + share, [*path, token], parent) for share, token in children(path)]
        ranked = sorted(range(start, len(nodes)), key=lambda node: (-nodes[node][0], node))
        level = sorted(ranked[: tree.width])
        kept += level
    if not isinstance(tree, BeamSearchTree):
        ranked = sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))
        kept = ranked[: tree.num_nodes]
    parents = [-1] + [kept.index(nodes[node][2]) for node in kept[1:]]
    return [nodes[node][1][-1] for node in kept[1:]], parents


@pytest.mark.parametrize(
    ("name", "layers"),
    list(zip(NAMES + SEARCHES, [(1,), (), (), (1,), (1,), (), (1,), (1,), ()], strict=True)),
    ids=NAMES + SEARCHES,
)
def test_the_tree_is_the_best_by_the_drafter(name, layers):
    """Two rows have other prompts and settings, and the drafter has states along the beams."""
    tree = BeamTree.named(name)
    model = tiny_model(3, num_layers=2, attn_layers=layers)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.1)  # unsure, or all trees were chains
    settings = [GenerationConfig(temperature=0.0), GenerationConfig(temperature=1.3, seed=5)]
    texts = [[4, 9, 2, 7], [8, 1, 3]]
    everyone = BatchState.new(2, tree.num_nodes)
    drafter = ModelDrafter(model, 2, 64, max(tree.num_nodes, tree.num_inner))
    tree_batch, shapes = make_tree_batch([tree, TokenTree.chain(0)], CPU), []
    for turn in range(2):  # in the second, what the first has left must not matter
        for row, text in enumerate(texts):
            everyone.set(row, settings[row])
            drafter.clear(row)
            drafter.read(row, torch.tensor(text[: -1 - turn]))
            everyone.begin(row, len(text) - 1, text[-1])
            everyone.block[row, : 2 + turn] = torch.tensor([1 + turn, *text[-1 - turn :]])
        with torch.no_grad():
            rows = everyone.narrow(0, 2, settings)
            proposal = drafter.draft(rows, tree_batch, 1 + turn, 32, False)
            for row, text in enumerate(texts):
                tokens, parents = best_first(model, text, tree, settings[row])
                assert proposal.tokens[row].tolist() == [text[-1], *tokens]
                assert tree_batch.parents[row].tolist() == parents
                shapes.append(tuple(parents))
                grown = tree_batch.trees[row]
                assert tree_batch.depths[row].tolist() == list(grown.depths)
                children = [[n for n in row if n >= 0] for row in tree_batch.children[row].tolist()]
                assert children == [list(nodes) for nodes in grown.children]
    assert proposal.finite.all()
    assert tree.width == 1 or tree.depth == 1 or len(set(shapes)) > 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("verifier", ["coupled", "naive"])
def test_what_comes_out_is_plain_decodings(verifier, monkeypatch, captured_on_cpu):
    """Batches have rows of all lengths and settings, with graphs and without."""
    target = tiny_model(1)
    drafter, rng = right_now_and_then(target), random.Random(2)
    served = [
        Request(
            [rng.randrange(61) for _ in range(rng.randint(1, 9))],
            GenerationConfig(
                rng.randint(5, 14), rng.choice([0.0, 0.7, 1.3]), seed=seed, top_k=rng.choice([0, 9])
            ),
        )
        for seed in range(4)
    ]
    plain = BatchDecoder(target, num_rows=4, max_length=64).generate(served)
    accepted = 0
    for name in ("beam-2-4-7", "beam-3-3-13", "beam-3-3"):
        tree, options = BeamTree.named(name), dict(num_rows=3, verifier=verifier)
        outputs = by_graphs(monkeypatch, served, target, drafter, tree, **options)
        for got, wanted in zip(outputs, plain, strict=True):
            if verifier == "coupled":
                assert got.tokens == wanted.tokens
            assert got.stats.num_nodes == tree.num_nodes * got.stats.num_calls
            depths = [tree.shape.depths[end] for end in got.stats.end_node_per_call]
            assert depths == got.stats.accepted_per_call
            accepted += sum(got.stats.accepted_per_call)
    assert accepted > 20 or verifier == "naive"


def test_the_depth_that_each_step_grew_is_recorded(monkeypatch):
    target, drafter = tiny_model(1), tiny_model(7)
    with torch.no_grad():
        drafter.model.norm.weight.mul_(0.1)  # unsure, or all trees were chains
    grown, verify = [], Step.verify

    def watched(step, rows, tree_batch, *arguments, **options):
        report = verify(step, rows, tree_batch, *arguments, **options)
        grown.append([tree.max_depth for tree in tree_batch.trees])
        return report

    monkeypatch.setattr(Step, "verify", watched)
    tree = BeamTree.of(4, 3, 5)
    batch = BatchDecoder(target, drafter, tree, num_rows=2, max_length=64)
    asked = [Request(prompt, GenerationConfig(24, ignore_eos=True)) for prompt in ([1, 2], [9])]
    for row, output in enumerate(batch.generate(asked)):
        stats = output.stats
        wanted = [depths[row] for depths in grown[: stats.num_calls]]
        if stats.num_new_tokens == sum(stats.accepted_per_call) + stats.num_calls:
            assert stats.depth_per_call == wanted
        else:  # the last is cut
            assert stats.depth_per_call[:-1] == wanted[:-1]
        assert set(wanted) - {tree.depth}, "no tree was less deep than its limit"


def tables(seed: int):
    torch.manual_seed(seed)
    size = 4 + seed % 5
    table = 2 * torch.randn(size, size, size, dtype=torch.float64)
    return TableTarget(table), Growing(table + torch.randn_like(table))


def test_drafts_change_nothing_of_what_is_sampled():
    rng, accepted, calls = random.Random(7), 0, 0
    for seed in range(15):
        target, drafter = tables(seed)
        setting = GenerationConfig(
            20, rng.choice([0.2, 0.6, 1.0, 1.7]), rng.choice([0, 2, 3]), rng.choice([1.0, 0.8]),
            seed=rng.randrange(2**50),
        )
        wanted = Decoder(target).generate([seed % 3, 1], setting).tokens
        names = NAMES + SEARCHES
        decoder = Decoder(target, drafter, BeamTree.named(names[seed % len(names)]))
        got = decoder.generate([seed % 3, 1], setting)
        assert got.tokens == wanted, seed
        accepted += sum(got.stats.accepted_per_call)
        calls += got.stats.num_calls
    assert accepted > 0.6 * calls


class InTurn(GrowingInTurn):
    """Gives its drafts the values of their own probabilities."""

    def choose(self, tree_batch, rows, level, logits, finite) -> None:
        super().choose(tree_batch, rows, level, logits, finite)
        shares = rows.distribution(logits).log().gather(2, tree_batch.pool.gather(
            1, level.places.flatten(1)).view_as(level.places))
        paths = tree_batch.values.gather(1, level.nodes)[..., None] + shares.float()
        tree_batch.values.scatter_(1, level.places.flatten(1), paths.flatten(1))


def block_distribution(
    table, drafter_of, tree: BeamTree, setting: GenerationConfig, verifier, points: bool = False
) -> dict:
    """Return the distribution of a row's step, over all draws and coins.

    The verifier is given the drafts in a static tree batch of the shape that has grown, or with
    `points`, which have no logits, in the one that grew.
    """

    def static_one(drafter, rows, grown, proposal):
        static = make_tree_batch(grown.trees, CPU)
        logits = torch.zeros(1, static.num_drawn_from, len(table), dtype=torch.float64)
        for node, children in enumerate(static.trees[0].children):
            if children:
                path = [int(proposal.tokens[0, n]) for n in static.trees[0].path_to(node)]
                after = drafter.table[tuple([CONTEXT[-2], *path][-2:])]
                logits[0, static.drawn_by[0, node]] = rows.processed(after[None, None])[0, 0]
        return static, Proposal(proposal.tokens.clone(), proposal.finite, logits)

    return row_distribution(
        table, drafter_of, lambda: dynamic_tree_batch(tree, 1, CPU).own(), setting, verifier,
        None if points else static_one,
    )


@pytest.mark.quick(2)
@pytest.mark.parametrize("relation", RELATIONS)
def test_naive_keeps_the_targets_distribution_whatever_grew(relation):
    """Given any drafts of real noise, tokens have the target's distribution."""
    for seed, name in enumerate(["beam-2-2-4", "beam-2-1-2", "beam-3-1-3", "beam-2-2"]):
        target, drafter, _, setting = related_case(seed, relation, TREES[:1])
        tree = BeamTree.named(name)
        distribution = block_distribution(
            target, lambda choose, q=drafter: Growing(q), tree, setting, Naive
        )
        assert distance(distribution, target, setting, tree.max_depth + 1) <= 1e-10


class Best(Growing):
    """Grows trees of its best tokens, which are not drawn."""

    drawn = SiblingSampling.DETERMINISTIC

    def draft(self, rows, *given) -> Proposal:
        return super().draft(replace(rows, asked=rows.asked._replace(sampled=False)), *given)


@pytest.mark.parametrize(
    ("name", "verifier"),
    [("beam-2-2", MultiStep), ("beam-2-2", Traversal), ("beam-2-2", Naive), ("beam-1-2", Block),
     ("beam-2-2-4", MultiStep)],
)
def test_every_verifier_judges_trees_of_best_tokens(name, verifier):
    """What a tree keeps depends on no random number if its drafts are not drawn."""
    for seed, relation in enumerate(RELATIONS):
        target, drafter, _, setting = related_case(seed, relation, TREES[:1])
        tree = BeamTree.named(name)
        require_tree(verifier(), tree, SiblingSampling.DETERMINISTIC)
        distribution = block_distribution(
            target, lambda choose, q=drafter: Best(q), tree, setting, verifier, points=True
        )
        assert distance(distribution, target, setting, tree.max_depth + 1) <= 1e-10


def test_coins_would_be_biased_by_trees_that_look_at_what_they_keep():
    """A verifier that tosses coins is biased if the less probable of two drafts is left out."""
    setting, tree = GenerationConfig(temperature=1.0), BeamTree.of(2, 1, 2)
    for seed in range(3):
        target, drafter, _, _ = random_case(seed, TREES[:1])
        distribution = block_distribution(
            target, lambda choose, q=drafter: InTurn(q, choose), tree, setting, MultiStep
        )
        assert sum(distribution.values()) == pytest.approx(1, abs=1e-12)
        assert distance(distribution, target, setting, 2) > 1e-3


@pytest.mark.parametrize("verifier", ["multi_step", "traversal", "block"])
def test_verifiers_that_toss_coins_refuse_it(verifier):
    model = tiny_model(1)
    with pytest.raises(UsageError, match="cannot judge beam-2-2-4: it tosses coins"):
        Decoder(model, model, BeamTree.of(2, 2, 4), verifier=verifier)


def test_drafters_of_one_shape_refuse_it():
    model = tiny_model(1)
    for drafter in (NGram(2), NGram(2, (), model)):
        with pytest.raises(UsageError, match="needs a model"):
            Decoder(model, drafter, BeamTree.of(2, 2, 4))


def test_a_step_grows_all_trees_alike_or_none():
    model, tree = tiny_model(1), BeamTree.of(2, 2, 4)
    for made, asked in (
        (tree, TokenTree.chain(2)), (TokenTree.chain(3), tree), (AdaptiveTrees([tree]),
        TokenTree.chain(2))
    ):
        decoder = BatchDecoder(model, model, made, num_rows=1, max_length=32)
        with pytest.raises(UsageError, match="dynamic trees are the decoder's"):
            decoder.admit(Request([1], tree=asked))
    decoder = BatchDecoder(model, model, tree, num_rows=1, max_length=32)
    decoder.release(decoder.admit(Request([1], GenerationConfig(4), tree)))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("beam-0-3-4", "at least one level"), ("beam-3-0-1", "at least one level"),
        ("beam-3-4-4", "wanted 5"), ("beam-2-2-8", "to 7"), ("beam-16-16-2049", "to 2048"),
        ("beam-99-9-20", "at most 4096 nodes"), ("beam-0-3", "at least one level"),
        ("beam-3-0", "at least one level"), ("beam-99-9", "at most 4096 nodes"),
    ],
)
def test_numbers_that_no_tree_has_are_refused(name, reason):
    with pytest.raises(UsageError, match=reason):
        TokenTree.load(name)


@pytest.mark.parametrize("name", [*NAMES, "beam-8-6-60", "beam-16-2-256", "beam-1-1-2"])
def test_names_say_all_of_it(name):
    """The recorded shape is one that such a tree may have, and leads back to it."""
    tree = TokenTree.load(name)
    assert isinstance(tree, BeamTree) and tree.name == name
    assert f"beam-{tree.width}-{tree.depth}-{tree.num_nodes}" == name
    assert tree.max_depth == tree.depth and max(map(len, tree.shape.children)) <= tree.width
    inner = [sum(bool(tree.shape.children[node]) for node in level) for level in tree.shape.levels]
    assert max(inner) <= tree.width
    assert Tree(name=tree.name, parents=tree.parents).to_token_tree() == tree
    assert [tree.shape.depths[tree.end_of(range(n + 1))] for n in range(tree.depth + 1)] == [
        *range(tree.depth + 1)
    ]


@pytest.mark.parametrize("name", [*SEARCHES, "beam-5-16"])
def test_a_beam_search_has_as_many_tokens_in_each_level(name):
    tree = TokenTree.load(name)
    assert isinstance(tree, BeamSearchTree) and tree.name == name
    assert [len(level) for level in tree.shape.levels] == [1] + [tree.width] * tree.depth
    assert tree.num_nodes == 1 + tree.width * tree.depth
    assert Tree(name=tree.name, parents=tree.parents).to_token_tree() == tree
    with pytest.raises(UsageError, match=f"{name} verifies 4096 nodes, wanted {tree.num_nodes}"):
        BeamSearchTree.of(tree.width, tree.depth, 4096)


SIZES = [BeamTree.of(4, 6, size) for size in (8, 16, 32, 64)]
# Of 1 / rank, which modes assume of ranks that they know little of, neither is
STEEP, FLAT = (
    [best * rank**power for rank in range(1, 64)] for best, power in ((0.7, -1.5), (0.6, -0.6))
)


def simulated(rates_of_step, num_steps: int, cost) -> tuple[list[TokenTree], float]:
    """Return the choices where a rank's node is accepted at a rate, and the tokens a second."""
    rng = random.Random(4)
    policy = AdaptiveTrees(
        SIZES, StepTimes({(1, tree): cost(tree) for tree in (PLAIN, *SIZES)})
    )
    chosen, tokens, seconds = [], 0.0, 0.0
    for step in range(num_steps):
        tree = policy.choose(1)
        rates = rates_of_step(step)[: tree.num_nodes - 1]
        accepted = [rank for rank, rate in enumerate(rates, 1) if rng.random() < rate]
        policy.learn_paths(tree, [[0, *accepted][: tree.max_depth + 1]])
        chosen.append(tree)
        tokens, seconds = tokens + 1 + sum(rates), seconds + cost(tree)
    return chosen, tokens / seconds


def speed_of(tree: TokenTree, rates: list[float], cost) -> float:
    return (1 + sum(rates[: tree.num_nodes - 1])) / cost(tree)


@pytest.mark.parametrize("rates", [STEEP, FLAT], ids=["steep", "flat"])
@pytest.mark.parametrize("slope", [0.004, 0.012, 0.05])
def test_the_size_is_the_one_that_pays(slope, rates):
    """Choosing is nearly as fast as the best fixed size, whatever a node costs."""

    def cost(tree):
        return 1.0 + slope * (tree.num_nodes - 1)

    chosen, speed = simulated(lambda step: rates, 800, cost)
    best = max(speed_of(tree, rates, cost) for tree in (PLAIN, *SIZES))
    assert speed > 0.95 * best
    assert chosen.count(SIZES[-1]) >= 2  # which is tried, at least


def test_what_pays_is_found_out_again_when_the_text_changes():
    """A small tree shows nothing of what a larger one would accept: that is tried now and then."""

    def cost(tree):
        return 1.0 + 0.012 * (tree.num_nodes - 1)

    chosen, _ = simulated(lambda step: STEEP if step < 600 else FLAT, 1200, cost)
    mostly = []
    for rates, steps in ((STEEP, chosen[300:600]), (FLAT, chosen[900:])):
        best = max(speed_of(tree, rates, cost) for tree in SIZES)
        near = [tree for tree in steps if speed_of(tree, rates, cost) > 0.95 * best]
        assert len(near) > 0.95 * len(steps)
        mostly.append(max(SIZES, key=steps.count))  # any one step may be a try of another
    assert mostly[0].num_nodes < mostly[1].num_nodes
