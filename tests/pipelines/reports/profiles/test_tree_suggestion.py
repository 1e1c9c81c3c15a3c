"""Suggested trees: the best by the model, and the model's τ is the one that comes out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hand_made_run import make_row, make_run, make_sample

from stree.common.errors import UsageError
from stree.speculation_profile import Tree
from stree.tree_policy.names import as_tree_policy
from stree.trees.token_tree import TokenTree, balanced
from stree_pipelines.commands.suggest_tree import main
from stree_pipelines.evaluation.result_store import RESULTS_NAME, ResultStore, write_rows
from stree_pipelines.reports.profiles.tree_suggestion import (
    Acceptance,
    AcceptanceRates,
    MeasuredTimes,
    best_tree,
    fastest,
    suggest,
)

# By depth (deeper ones are as the last) and rank: a draft's chance once its parent is accepted.
TRUTH = np.array([[0.55, 0.15, 0.08], [0.6, 0.14, 0.05], [0.62, 0.1, 0.05], [0.5, 0.2, 0.1]])


def certain(truth) -> AcceptanceRates:
    """Return rates of enough calls to make the prior irrelevant."""
    reached = np.full(truth.shape, 10**9)
    return AcceptanceRates(reached, (truth * reached).astype(np.int64))


def walk(tree: TokenTree, rng: np.random.Generator) -> int:
    """Draw the node at which a call's accepted path ends."""
    node = 0
    while tree.children[node]:
        chances = TRUTH[min(tree.depths[node], 3)][: len(tree.children[node])]
        rank = np.searchsorted(chances.cumsum(), rng.random(), side="right")
        if rank == len(chances):
            break
        node = tree.children[node][rank]
    return node


def measured_samples(tree: TokenTree, seed: int, num_prompts: int = 40, num_calls: int = 60):
    """Make prompts whose drafts in `tree` are accepted by TRUTH."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num_prompts):
        ends = [walk(tree, rng) for _ in range(num_calls)]
        accepted = tuple(tree.depths[node] for node in ends)
        plain = make_sample("stree", 100, "sums", index, 0.0, 60)
        samples.append(plain.model_copy(update={
            "num_calls": num_calls, "accepted_per_call": accepted, "end_node_per_call": tuple(ends),
            "num_new_tokens": sum(accepted) + num_calls,
            "depth_per_call": (tree.max_depth,) * num_calls,
        }))
    return samples


def measured_row(tree: TokenTree, seed: int, num_prompts: int = 40, samples=None):
    samples = samples or measured_samples(tree, seed, num_prompts)
    shape = Tree(name=tree.name, parents=tree.parents)
    return make_row("stree", 100, "sums", samples, 0.0, tree=shape)


def all_trees(num_nodes: int):
    """Yield every shape of a tree: each parent comes before its children."""
    for parents in itertools.product(*(range(node) for node in range(1, num_nodes))):
        yield TokenTree((-1, *parents))


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_of_its_size_has_more_expected_drafts(seed):
    """No one of all 120 shapes of 6 nodes is better, also where rates rise with the rank."""
    rng = np.random.default_rng(seed)
    rates = certain(rng.dirichlet(np.ones(4), size=3)[:, :3])
    best = best_tree(rates, 6)
    assert best.num_nodes == 6
    most = max(rates.expected_drafts(tree) for tree in all_trees(6))
    assert rates.expected_drafts(best) == pytest.approx(most, abs=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_none_is_deeper_than_allowed_and_none_of_these_is_better(depth):
    rates = certain(TRUTH[:3])
    best = best_tree(rates, 6, depth)
    allowed = [tree for tree in all_trees(6) if tree.max_depth <= depth]
    most = max(rates.expected_drafts(tree) for tree in allowed)
    assert best.max_depth <= depth
    assert rates.expected_drafts(best) == pytest.approx(most, abs=1e-12)


def test_counts_by_depth_and_rank_by_hand():
    """Paths end at the root 5 times, at its second child 2, at a grandchild of the first 3.

    Stops cut two more at the root and one at the first child: these judged none of its children.
    """
    tree = TokenTree((-1, 0, 0, 1, 1))
    rates = AcceptanceRates.of([(tree, {0: 5, 2: 2, 4: 3}, {2: 2, 4: 3})])
    assert rates.reached_DR.tolist() == [[10, 10], [3, 3]]
    assert rates.accepted_DR.tolist() == [[3, 2], [0, 3]]
    table = rates.rates(9)
    assert table.shape == (9, 2)
    assert table[8, 1] == pytest.approx(5 / 13), "deeper than measured: over all depths"
    assert table[1, 0] == pytest.approx((0 + 10 * 3 / 13) / (3 + 10))
    cut = AcceptanceRates.of([(tree, {0: 7, 1: 1, 2: 2, 4: 3}, {0: 2, 1: 1, 2: 2, 4: 3})])
    assert cut.reached_DR.tolist() == [[11, 11], [3, 3]]
    assert cut.accepted_DR.tolist() == [[4, 2], [0, 3]]
    wider = TokenTree((-1, 0, 0, 0))
    first_two = rates.expected_drafts(TokenTree((-1, 0, 0)))
    assert rates.expected_drafts(wider) == first_two, (
        "a rank that was never tried counts for nothing"
    )


def test_the_prediction_for_the_measured_tree_is_the_measured_length():
    row = measured_row(TokenTree.paper(), seed=1)
    (check,) = suggest([row], 0.0, 13).checks
    low, high = row.confidence_intervals["acceptance_length"]
    assert check.measured_acceptance_length == pytest.approx(row.acceptance_length)
    assert low < check.predicted_acceptance_length < high


@pytest.mark.parametrize("num_nodes", [8, 13, 24])
def test_the_prediction_for_another_tree_is_what_it_then_achieves(num_nodes):
    suggestion = suggest([measured_row(TokenTree.paper(), seed=2)], 0.0, num_nodes)
    tree = suggestion.tree.to_token_tree()
    row = measured_row(tree, seed=3)
    low, high = row.confidence_intervals["acceptance_length"]
    assert low < suggestion.predicted_acceptance_length < high
    if num_nodes == 13:
        paper = suggestion.checks[0].predicted_acceptance_length
        assert suggestion.predicted_acceptance_length >= paper


def test_the_interval_of_a_prediction_is_that_of_the_prompts():
    """The measured tree's is as wide as its τ's; without prompts to resample there is none."""
    paper = TokenTree.paper()
    samples = measured_samples(paper, seed=6)
    row = measured_row(paper, 6, samples=samples)
    suggestion = suggest([row], 0.0, 13, lambda _: samples)
    low, high = suggestion.predicted_acceptance_length_interval
    assert low < suggestion.predicted_acceptance_length < high
    measured = np.ptp(row.confidence_intervals["acceptance_length"])
    assert high - low == pytest.approx(measured, rel=0.2)
    alike = [sample.model_copy(update={"prompt_id": f"q{i}"}) for i, sample in
             enumerate(samples[:1] * 5)]
    low, high = suggest(
        [measured_row(paper, 6, samples=alike)], 0.0, 13, lambda _: alike
    ).predicted_acceptance_length_interval
    assert high == pytest.approx(low)
    assert suggest([row], 0.0, 13).predicted_acceptance_length_interval is None


def test_a_stop_inside_a_path_is_no_token_of_the_targets_own():
    """Every call is cut: τ is the accepted drafts alone, and the prediction says so."""
    row = measured_row(TokenTree.paper(), seed=4)
    cut = row.model_copy(update={"acceptance_length": row.acceptance_length - 1})
    whole, shorter = (suggest([each], 0.0, 13) for each in (row, cut))
    difference = whole.predicted_acceptance_length - shorter.predicted_acceptance_length
    assert difference == pytest.approx(1)


def test_nodes_beyond_what_was_measured_are_counted():
    chain = measured_row(TokenTree.chain(3), seed=5)
    suggestion = suggest([chain], 0.0, 6)
    assert suggestion.tree.parents == (-1, 0, 1, 2, 3, 4)  # no second choice was ever tried
    assert suggestion.num_extrapolated == 2


def test_sizes_and_rows_that_cannot_be_used_are_one_clear_line():
    row = measured_row(TokenTree.paper(), seed=1, num_prompts=2)
    for size in (0, 1, 769):
        with pytest.raises(UsageError, match=f"tree of {size} nodes"):
            suggest([row], 0.0, size)
    with pytest.raises(UsageError, match=r"T = 0\.7 .*--overwrite"):
        suggest([row], 0.7, 13)
    with pytest.raises(UsageError, match="tree of depth 0"):
        suggest([row], 0.0, 13, max_depth=0)


def timed(row, draft: float, call: float, plain: float = 1.0):
    """Return the row with these ms of a step's draft, of its rest, and of a plain step."""
    phases = {"verify": 0.8, "accept": 0.15, "host": 0.05}
    step, baseline = (
        {"draft": first} | {phase: rest * part for phase, part in phases.items()}
        for first, rest in ((draft, call), (0.1, plain))
    )
    return row.model_copy(update={"time_ms": step, "baseline_time_ms": baseline})


def test_what_a_step_takes_by_hand():
    """A level takes 0.5 and 0.7 ms, calls of 1, 5 and 13 nodes 1, 1.4 and 2.2 ms."""
    chain, paper = (measured_row(tree, 7, 2) for tree in (TokenTree.chain(4), TokenTree.paper()))
    beam = TokenTree.load("beam-4-5-32")
    shape = Tree(name=beam.name, parents=beam.parents)
    grown = timed(paper.model_copy(update={"tree": shape}), draft=99.0, call=3.0)
    times = MeasuredTimes.of([timed(chain, 2.0, 1.4), timed(paper, 2.8, 2.2), grown])
    assert times.level == pytest.approx(0.6)
    assert times.calls == pytest.approx({1: 1.0, 5: 1.4, 13: 2.2, 32: 3.0})
    assert times.step_ms(TokenTree.chain(8)) == pytest.approx(8 * 0.6 + 1.8)
    with pytest.raises(UsageError, match="no row has the drafting time of a static tree"):
        MeasuredTimes.of([grown])


@pytest.mark.parametrize(("level", "node"), [(0.02, 0.3), (0.6, 0.02), (0.3, 0.1), (2.0, 1.0)])
def test_no_tree_of_as_many_levels_is_faster(level, node):
    """No one of all 154 shapes of up to 6 nodes is faster."""
    tree = balanced([2, 1, 1])
    row = timed(measured_row(tree, seed=8), level * tree.max_depth, 1 + node * 6)
    model, times = Acceptance.of([row]), MeasuredTimes.of([row])

    def speed(tree):
        return 1e3 * model.length(tree) / times.step_ms(tree)

    by_levels = fastest([row], 0.0, num_nodes=6)
    for each in by_levels:
        assert each.tokens_per_second == pytest.approx(speed(each.tree))
        assert each.acceptance_length == pytest.approx(model.length(each.tree))
    most: dict[int, float] = {}
    for size in range(2, 7):
        for other in all_trees(size):
            most[other.max_depth] = max(most.get(other.max_depth, 0.0), speed(other))
    found = {each.tree.max_depth: each.tokens_per_second for each in by_levels}
    assert found == pytest.approx({depth: most[depth] for depth in (1, 2, 3)})


def test_cheap_levels_make_the_fastest_tree_deep_and_cheap_nodes_make_it_wide():
    def best(draft, call):
        row = timed(measured_row(TokenTree.paper(), seed=9), draft, call)
        return max(fastest([row], 0.0), key=lambda each: each.tokens_per_second).tree

    assert best(draft=0.01, call=1.2).max_depth == 4
    assert best(draft=8.0, call=1.01).max_depth == 1
    assert best(draft=0.01, call=30.0).num_nodes < best(draft=0.01, call=1.1).num_nodes == 13


def test_what_the_fastest_tree_cannot_be_is_one_clear_line():
    row = timed(measured_row(TokenTree.paper(), seed=1, num_prompts=2), 0.4, 1.2)
    with pytest.raises(UsageError, match=r"trees of 14 nodes .* at most 13 were measured"):
        fastest([row], 0.0, num_nodes=14)
    with pytest.raises(UsageError, match="tree of depth 0"):
        fastest([row], 0.0, max_depth=0)
    with pytest.raises(UsageError, match="tree of 1 nodes"):
        fastest([row], 0.0, num_nodes=1)
    large = TokenTree.load("expand-16-16")  # 273 nodes, more than a suggestion has
    shape = Tree(name=large.name, parents=large.parents)
    both = [row, timed(row.model_copy(update={"tree": shape, "end_nodes": {0: 9}}), 0.4, 1.2)]
    assert max(each.tree.num_nodes for each in fastest(both, 0.0, max_depth=1)) <= 256
    assert len(suggest(both, 0.0, None, max_depth=1).tree.parents) <= 256


def test_the_fastest_trees_are_written_by_levels(tmp_path, capsys):
    make_run(tmp_path)
    folder = tmp_path / "trees"
    with pytest.raises(UsageError, match="--out_levels is for the trees of --fastest"):
        main([str(tmp_path), "--out_levels", str(folder)])
    asked = ["--fastest", "--out", str(tmp_path / "best.yaml"), "--out_levels", str(folder)]
    main([str(tmp_path), *asked])
    printed = capsys.readouterr().out
    trees = {path.name: TokenTree.load(path) for path in folder.iterdir()}
    assert sorted(trees) == [f"{levels}-levels.yaml" for levels in range(1, len(trees) + 1)]
    assert len(trees) >= 3
    for levels in range(1, len(trees) + 1):
        tree = trees[f"{levels}-levels.yaml"]
        assert tree.max_depth == levels and tree.name == f"levels-{levels}-{tree.num_nodes}"
        assert f"# {levels:>8}{tree.num_nodes:>8}" in printed
    assert TokenTree.load(tmp_path / "best.yaml").parents in {
        tree.parents for tree in trees.values()
    }
    adaptive_trees = as_tree_policy(" or ".join(map(str, folder.iterdir())))
    assert adaptive_trees.trees[1:] == tuple(trees.values())


def test_trees_that_grow_say_nothing_of_ranks():
    row = measured_row(TokenTree.paper(), seed=1, num_prompts=2)
    beam = TokenTree.load("beam-3-4-13")
    grown = row.model_copy(update={"tree": Tree(name=beam.name, parents=beam.parents)})
    with pytest.raises(UsageError, match="with --tree paper or another such tree"):
        suggest([grown], 0.0, 13)
    both = suggest([row, grown], 0.0, 13)
    assert [check.tree.name for check in both.checks] == ["paper"]
    assert both.num_calls == suggest([row], 0.0, 13).num_calls


def test_the_command_writes_a_file_that_tree_reads(tmp_path, capsys):
    make_run(tmp_path)
    main([str(tmp_path), "--nodes", "9", "--out", str(tmp_path / "tree.yaml")])
    tree = TokenTree.load(tmp_path / "tree.yaml")
    assert tree.num_nodes == 9 and tree.name == "suggested-9"
    printed = capsys.readouterr().out
    assert printed.startswith((tmp_path / "tree.yaml").read_text())
    assert "# paper: predicted " in printed and "# chain-4: predicted " in printed
    main([str(tmp_path), "--nodes", "9", "--depth", "2", "--out", str(tmp_path / "tree.yaml")])
    shallow = TokenTree.load(tmp_path / "tree.yaml")
    assert shallow.max_depth == 2 < tree.max_depth and shallow.num_nodes <= 9
    plain = [row for row in ResultStore(tmp_path / "eval").results() if row.checkpoint is None]
    write_rows(tmp_path / "eval" / RESULTS_NAME, plain)
    with pytest.raises(UsageError, match="no rows of a drafter: evaluate one first"):
        main([str(tmp_path)])
