"""Drafters that read their target's hidden states: the same tokens come out as without, and each
token has the same features as in training, whatever was accepted and however prompts were read.

Everything is fp64: what is computed in another order differs by rounding alone.
"""

import itertools

import pytest
import torch
from eager import by_fused_kernels, by_graphs
from lanes import costly, quick_first
from toys import (
    FEATURE_LAYERS,
    TableTarget,
    answered_as_plain,
    mixed_requests,
    reading,
    recurrent,
    tiny_model,
)
from watched import watch

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import UsageError
from stree.drafters import Drafter
from stree.drafters.model import ModelDrafter
from stree.drafters.ngram import NGram
from stree.models.hidden_states import HiddenStateTap
from stree.models.layers.part import TrainingPass
from stree.models.model import HybridModel
from stree.tree_policy.adaptive import AdaptiveTrees
from stree.tree_policy.step_times import StepTimes
from stree.trees.dynamic import DynamicTreeBatch
from stree.trees.token_tree import as_tree, balanced

TREES = [TokenTree.chain(1), TokenTree.chain(4), TokenTree.paper(), balanced([3, 2])]
PROMPT = [7, 3, 9, 1, 5, 5, 2]


@pytest.fixture(scope="module")
def target():
    return tiny_model(1)


@pytest.fixture(scope="module")
def drafter(target):
    return reading(target)


def features_of(target, tokens):
    features = HiddenStateTap(FEATURE_LAYERS)
    target.hidden_states(torch.tensor([tokens]), features=features)
    return features.values


def training_logits(drafter, target, tokens, num_known):
    """Return logits (T, V) as in training, with the features of the first `num_known` tokens."""
    known = torch.arange(len(tokens))[None] < num_known
    with torch.no_grad():
        read = features_of(target, tokens)
        hidden = drafter.hidden_states(torch.tensor([tokens]), read=read, known=known)
        return drafter.logits(hidden)[0]


def require_drafts_as_in_training(drafts, drafter, target, texts):
    checked = 0
    for row, at, tree, tokens, drawn_by, logits in drafts:
        for node in range(tree.num_nodes):
            if tree.children[node]:
                path = [tokens[each] for each in tree.path_to(node)]
                text = texts[row][:at] + path
                wanted = training_logits(drafter, target, text, at + 1)[-1]
                assert torch.allclose(logits[drawn_by[node]], wanted, atol=1e-9)
                checked += 1
    assert checked > 20


@pytest.mark.quick(2)
@pytest.mark.parametrize("backtracking", ["replay", "joint"])
@pytest.mark.parametrize("tree", [TREES[1], TREES[2]], ids=str)
def test_drafts_are_those_of_training(tree, backtracking, target, drafter):
    watched = watch(drafter, 1, 64, tree.num_nodes)
    decoder = Decoder(target, watched, tree, max_length=64, backtracking=backtracking)
    out = decoder.generate(PROMPT, GenerationConfig(20))
    assert len(set(out.stats.accepted_per_call)) > 2
    require_drafts_as_in_training(watched.drafts, drafter, target, [PROMPT + out.tokens])


@pytest.mark.quick(1)
def test_rows_of_a_batch_have_their_own_features(target, drafter, either_way, monkeypatch):
    """Rows are taken again, and prompts are read in chunks between steps of others."""
    monkeypatch.setattr("stree.batching.batch_decoder.LONGEST_CHUNK", 5)
    monkeypatch.setattr("stree.engine.worker.FEATURES_CHUNK", 3)
    watched, texts = watch(drafter, 3, 64, 13), []
    decoder = BatchDecoder(target, watched, TREES[2], num_rows=3, max_length=64)
    requests = mixed_requests(7, TREES, seed=4)
    waiting, served = list(requests), {}
    while waiting or served:
        while waiting and decoder.num_free_rows:
            request = waiting.pop()
            served[decoder.admit(request)] = request
        for report in decoder.step():
            if report.finish_reason:
                request = served.pop(report.row)
                text = request.prompt_ids + decoder.release(report.row).tokens
                texts.append(text)
                mine = [each for each in watched.drafts if each[0] == report.row]
                watched.drafts = [each for each in watched.drafts if each[0] != report.row]
                if mine and not request.generation.temperature:
                    for _, at, _, tokens, _, logits in mine:
                        wanted = training_logits(drafter, target, [*text[:at], tokens[0]], at + 1)
                        assert torch.allclose(logits[0], wanted[-1], atol=1e-9)
    assert len(texts) == 7


@pytest.mark.parametrize(
    ("verifier", "graphs", "own"),
    quick_first(
        [("coupled", True, False)],
        list(itertools.product(
            ("coupled", "naive", "multi_step", "traversal"), (False, True), (False, True)
        )),
        [("coupled", True, True), ("multi_step", False, False)],
    ),
)
def test_features_change_no_token_of_the_output(verifier, graphs, own, target, drafter, request):
    if own:
        target, drafter = recurrent()
    if graphs:
        request.getfixturevalue("captured_on_cpu")
    served = mixed_requests(5, TREES, seed=1)
    answered_as_plain(target, drafter, served, verifier)


@pytest.mark.parametrize(
    ("tree", "backtracking"),
    quick_first(
        [("beam-3-3-8", "replay")],
        [("paper", "replay"), ("beam-3-3-8", "joint")],
        [("paper", "joint")],
    ),
)
def test_graphs_draft_as_eager_steps_do(
    tree, backtracking, target, drafter, captured_on_cpu, monkeypatch
):
    served = mixed_requests(4, [as_tree(tree)], seed=2)
    options = dict(num_rows=2, backtracking=backtracking)
    outputs = by_graphs(monkeypatch, served, target, drafter, tree, **options)
    assert len({each for out in outputs for each in out.stats.accepted_per_call}) > 2


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_state_after_commit_is_that_of_the_accepted_path(tree, target, drafter):
    """The drafter's states are those of the accepted tokens, as if it had never drafted."""
    own = ModelDrafter(drafter, 1, 64, tree.num_nodes)
    decoder = Decoder(target, own, tree, max_length=64)
    row = decoder.batch.admit(Request(PROMPT, GenerationConfig(30)))
    for _ in range(9):
        decoder.batch.step()
    text = PROMPT + decoder.batch.tokens_of(row)
    drafter.apply_path(own.cache)
    length = int(own.cache.length)
    assert len(text) - 7 < length < len(text)
    read = features_of(target, text)[:, :length]
    again = drafter.new_cache(64, tree.num_nodes)
    with torch.no_grad():
        inputs = drafter.model.features(read)
    drafter.prefill(torch.tensor([text[:length]]), again, inputs=inputs)
    for got, wanted in zip(own.cache.layers, again.layers, strict=True):
        for mine, theirs in zip(got.save(length), wanted.save(length), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-9)


def test_features_of_another_node_are_noticed(target, drafter, monkeypatch):
    take = ModelDrafter.take_features

    def mistaken(self, features, rows, path):
        take(self, features, rows, (path + 1) % features.shape[1])

    monkeypatch.setattr(ModelDrafter, "take_features", mistaken)
    with pytest.raises(AssertionError):
        test_drafts_are_those_of_training(TREES[2], "replay", target, drafter)
    with pytest.raises(AssertionError):
        test_state_after_commit_is_that_of_the_accepted_path(TREES[2], target, drafter)


def conversation(target, drafter, num_prefixes, tree):
    watched = watch(drafter, 1, 128, tree.num_nodes)
    decoder = Decoder(target, watched, tree, max_length=128, num_prefixes=num_prefixes)
    prompt, drafts = PROMPT, []
    for turn in range(3):
        out = decoder.generate(prompt, GenerationConfig(12))
        text = prompt + out.tokens
        drafts.append((watched.drafts, text, out.stats))
        watched.drafts, prompt = [], [*text, 11 + turn, 4]
    return drafts


@pytest.mark.costly
@pytest.mark.parametrize("tree", [TREES[0], TREES[2]], ids=str)
def test_prefixes_keep_the_features(tree, target, drafter, either_way):
    """Tokens that are read again after a kept prefix have their earlier features."""
    alone, kept = (conversation(target, drafter, each, tree) for each in (0, 3))
    for (drafts, text, _), (_, wanted, _) in zip(kept, alone, strict=True):
        assert text == wanted
        if tree is not TREES[0]:  # of which some last tokens are read again, without features
            require_drafts_as_in_training(drafts, drafter, target, [text])
    assert kept[1][2].num_reused_tokens > len(PROMPT)


@pytest.mark.costly
def test_rows_that_share_a_prefix_have_its_features(target, drafter, either_way):
    """A prefix of one row gives its features to other rows."""
    tree = TREES[2]
    watched = watch(drafter, 3, 64, tree.num_nodes)
    decoder = BatchDecoder(target, watched, tree, num_rows=3, max_length=64, num_prefixes=1)
    first = decoder.admit(Request(PROMPT, GenerationConfig(1)))
    decoder.step()
    decoder.release(first, keep=True)
    watched.drafts = []
    prompts = [[*PROMPT, *more] for more in ([8], [3, 4], [8, 1, 9])]
    rows = [decoder.admit(Request(prompt, GenerationConfig(12))) for prompt in prompts]
    left, texts = set(rows), [[]] * 3
    while left:
        left -= {report.row for report in decoder.step() if report.finish_reason}
    for row, prompt in zip(rows, prompts, strict=True):
        out = decoder.release(row)
        assert out.stats.num_reused_tokens == len(PROMPT)
        texts[row] = prompt + out.tokens
        plain = Decoder(target, max_length=64).generate(prompt, GenerationConfig(12))
        assert out.tokens == plain.tokens
    require_drafts_as_in_training(watched.drafts, drafter, target, texts)


def test_a_drafter_that_was_left_behind_goes_on_without_features(target, drafter):
    """Plain steps keep no features for the drafter."""
    watched = watch(drafter, 1, 64, 5)
    plain, tree = TokenTree.chain(0, "plain"), TREES[1]
    adaptive_trees = AdaptiveTrees([tree], StepTimes({(1, plain): 1.0, (1, tree): 1e9}))
    decoder = Decoder(target, watched, adaptive_trees, max_length=64)
    row = decoder.batch.admit(Request(PROMPT, GenerationConfig(24)))
    for _ in range(8):
        decoder.batch.step()
    assert not watched.drafts
    adaptive_trees.costs = StepTimes({(1, plain): 1e9, (1, tree): 1.0})
    while not decoder.batch.scheduler.sequences[row].finish_reason:
        decoder.batch.step()
    text = PROMPT + decoder.batch.release(row).tokens
    assert text == PROMPT + Decoder(target).generate(PROMPT, GenerationConfig(24)).tokens
    _, at, _, tokens, _, logits = watched.drafts[0]
    known = torch.ones(1, at + 1, dtype=torch.bool)
    known[:, len(PROMPT) :] = False
    with torch.no_grad():
        sequence = [*text[:at], tokens[0]]
        hidden = drafter.hidden_states(
            torch.tensor([sequence]), read=features_of(target, sequence), known=known
        )
    assert torch.allclose(logits[0], drafter.logits(hidden)[0, -1], atol=1e-9)


def test_n_grams_on_a_model_that_reads_features(target, drafter):
    generation = GenerationConfig(20)
    got = Decoder(target, NGram(2, model=drafter), TREES[2]).generate(PROMPT, generation)
    assert got.tokens == Decoder(target).generate(PROMPT, generation).tokens
    assert got.stats.acceptance_length > 1.3


def test_packed_sequences_see_no_features_of_each_other(target, drafter):
    first, second = [3, 1, 4, 1, 5], [9, 2, 6]
    packed = torch.tensor([first + second])
    segments = torch.tensor([[0] * 5 + [1] * 3])
    features = HiddenStateTap(FEATURE_LAYERS)
    target.hidden_states(packed, segments, features=features)
    with torch.no_grad():
        hidden = drafter.hidden_states(packed, segments, read=features.values)
        for part, tokens in ((hidden[0, :5], first), (hidden[0, 5:], second)):
            alone = training_logits(drafter, target, tokens, len(tokens))
            assert torch.allclose(drafter.logits(part), alone, atol=1e-9)


def test_checkpoints_say_what_is_read(target, drafter, tmp_path):
    save_model(drafter, tmp_path / "drafter")
    again = load_model(tmp_path / "drafter", dtype=torch.float64)
    assert again.config == drafter.config
    generation = GenerationConfig(12)
    outputs = [
        Decoder(target, each, TREES[2], max_length=64).generate(PROMPT, generation)
        for each in (drafter, again)
    ]
    assert outputs[0].stats.accepted_per_call == outputs[1].stats.accepted_per_call


def test_other_targets_are_refused(drafter):
    for changes in ({"num_layers": 4}, {"d_model": 16}):
        with pytest.raises(UsageError, match="3 layers of width 32, this one has"):
            Decoder(tiny_model(1, **changes), drafter, TREES[0])
    with pytest.raises(UsageError, match="HybridModel, the target is a TableTarget"):
        Decoder(TableTarget(torch.zeros(61, 61, 61)), drafter, TREES[0])
    with pytest.raises(UsageError, match="feature_layers"):
        drafter.config.replace(feature_layers=(0, 3))
    with pytest.raises(UsageError, match="target_width"):
        drafter.config.replace(target_width=0)


def hidden_one_by_one(drafter, tokens, read, ahead):
    """Return hidden states of each token as the last of drafts of 0 … `ahead` tokens."""
    reader = drafter.model.features
    wanted = torch.zeros(1 + ahead, len(tokens), drafter.config.d_model, dtype=drafter.dtype)
    own = torch.zeros_like(wanted)
    inputs = reader(read)
    for depth in range(1 + ahead):
        for at in range(depth, len(tokens)):
            drafted = inputs[:, : at + 1].clone()
            for back in reversed(range(depth)):
                drafted[:, at - back] = reader.of_drafts(own[depth - back - 1, at - back - 1])
            first = at and reader.skips_first
            x, beside = drafter.model.begin(torch.tensor([tokens[: at + 1]]), drafted)
            x, beside = x[:, first:], beside[:, first:]
            rotary = drafter.model.rotary(torch.arange(x.shape[1])[None])
            for layer in drafter.model.layers:
                x = layer(x, TrainingPass(rotary, embedded=beside))
            wanted[depth, at] = drafter.model.norm(x)[0, -1]
            own[depth, at] = x[0, -1] if reader.reads_stream else wanted[depth, at]
    return wanted


@pytest.mark.quick(2)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("changes", [{}, {"repeat_before_conv": True}], ids=["", "repeated"])
def test_passes_ahead_are_drafts_from_every_token(changes, own):
    require_passes_ahead(*recurrent(own, **changes))


def test_passes_ahead_of_attention(target, drafter):
    """A drafter with attention and Mamba-2, and MTP and EAGLE heads, which read no first token."""
    own = HybridModel(drafter.config.replace(own_features=True)).double().eval()
    own.load_state_dict(drafter.state_dict(), strict=False)
    own.model.features.own_gain.weight.data.copy_(drafter.model.features.gain.weight)
    assert own.config.has("attention") and own.config.has("mamba")
    require_passes_ahead(target, own)
    head = HybridModel(target.config.mtp_head(["attention mlp"])).double().eval()
    require_passes_ahead(target, head, 1)
    for norms in ((), ("residual", "own")):
        config = target.config.eagle_head((0, 1, 2)).replace(eagle_norms=norms)
        require_passes_ahead(target, HybridModel(config).double().eval(), 1)


def require_passes_ahead(target, drafter, skipped=0):
    torch.manual_seed(6)
    ahead, first, second = 5, torch.randint(61, (13,)).tolist(), torch.randint(61, (9,)).tolist()
    features = HiddenStateTap(drafter.config.feature_layers)
    packed, segments = torch.tensor([first + second]), torch.tensor([[0] * 13 + [1] * 9])
    target.hidden_states(packed, segments, features=features)
    with torch.no_grad():
        passes = drafter.hidden_ahead(packed, segments, features.values, None, ahead)
        for start, tokens in ((0, first), (13, second)):
            part = slice(start, start + len(tokens))
            wanted = hidden_one_by_one(drafter, tokens, features.values[:, part], ahead)
            for depth, (got, want) in enumerate(zip(passes, wanted, strict=True)):
                begin = depth + skipped
                assert torch.allclose(got[0, part][begin:], want[begin:], atol=1e-9)


def paths_of(tree_batch, row, tokens):
    """Return the tokens from the root to each node that others were drawn from."""
    if isinstance(tree_batch, DynamicTreeBatch):
        drawn, by = tree_batch._drawn[row].tolist(), tree_batch._drawn_by.tolist()
        tokens = tree_batch.pool[row].tolist()
        paths = []
        for node in drawn:
            path = [node]
            while path[0]:
                path.insert(0, drawn[by[path[0]]])
            paths.append([tokens[each] for each in path])
        return paths
    tree, nodes = tree_batch.trees[row], torch.cat([each.nodes for each in tree_batch.levels], 1)
    return [[tokens[each] for each in tree.path_to(node)] for node in nodes[row].tolist()]


@pytest.mark.costly
@pytest.mark.parametrize(
    "tree", [costly("paper"), "beam-3-4-9", pytest.param("chain-4", marks=pytest.mark.long)]
)
def test_own_features_are_those_of_the_parent_as_in_training(tree):
    target, drafter = recurrent()
    own, drafts = ModelDrafter(drafter, 1, 64, 13), []
    draft = own.draft

    def watched(rows, tree_batch, longest_block, bound, keep_logits):
        proposal = draft(rows, tree_batch, longest_block, bound, True)
        paths = paths_of(tree_batch, 0, proposal.tokens[0].tolist())
        drafts.append((int(rows.position[0]), paths, proposal.logits[0]))
        return proposal

    own.draft = watched
    out = Decoder(target, own, tree, max_length=64).generate(PROMPT, GenerationConfig(20))
    assert out.stats.acceptance_length > 1.2
    for at, paths, logits in drafts:
        for path, got in zip(paths, logits, strict=True):
            text = (PROMPT + out.tokens)[:at] + path
            with torch.no_grad():
                passes = drafter.hidden_ahead(
                    torch.tensor([text]), None, features_of(target, text), None, len(path) - 1
                )
            assert torch.allclose(got, drafter.logits(passes[-1])[0, -1], atol=1e-9)


@pytest.mark.long
def test_fused_kernels_draft_the_same_from_features(monkeypatch, captured_on_cpu):
    target, drafter = (model.float() for model in recurrent())
    served = [
        Request([5, 6, 7], GenerationConfig(5), TREES[3]),
        Request([9] * 4, GenerationConfig(4, temperature=1.0, seed=4), TREES[1]),
    ]
    assert len(set(by_fused_kernels(monkeypatch, served, target, drafter))) > 1


class Wrapped(Drafter):
    """Drafter of one's own around a `ModelDrafter`: it has the same answers, and no other class."""

    def __init__(self, inner, reads_alongside):
        self.inner, self.read_with, self.reads_alongside = inner, [], reads_alongside
        self.drawn, self.feature_layers = inner.drawn, inner.feature_layers
        if reads_alongside:
            self.model, self.cache = inner.model, inner.cache

    def clear(self, row):
        self.inner.clear(row)

    def read(self, row, tokens, features=None):
        self.read_with.append((len(tokens), None if features is None else len(features)))
        self.inner.read(row, tokens, features)

    def read_padded(self, *chunk):
        self.read_with.append("chunk")
        self.inner.read_padded(*chunk)

    def take_features(self, *given):
        self.inner.take_features(*given)

    def draft(self, *given):
        return self.inner.draft(*given)


@pytest.mark.parametrize("alongside", [False, True])
def test_a_drafter_of_ones_own_gets_the_features_that_it_asks_for(alongside, either_way):
    target = tiny_model(1)
    model, request = reading(target), Request(PROMPT * 3, GenerationConfig(12, ignore_eos=True))
    drafter = Wrapped(ModelDrafter(model, 1, 64, 13), alongside)
    settings = dict(num_rows=1, max_length=64)
    decoder = BatchDecoder(target, drafter, TokenTree.paper(), **settings)
    (out,) = decoder.generate([request])
    (wanted,) = BatchDecoder(target, model, TokenTree.paper(), **settings).generate([request])
    assert out.tokens == wanted.tokens
    assert out.stats.accepted_per_call == wanted.stats.accepted_per_call
    chunked = alongside and decoder.worker.runner.prefiller.reads_both
    assert set(drafter.read_with) == ({"chunk"} if chunked else {(21, 21)})


def test_a_drafter_that_reads_alongside_has_a_model_to_do_so():
    target = tiny_model(1)
    drafter = Wrapped(ModelDrafter(reading(target), 1, 64, 13), True)
    drafter.cache = None
    with pytest.raises(UsageError, match="reads alongside the target without a model and a cache"):
        BatchDecoder(target, drafter, TokenTree.paper(), num_rows=1, max_length=64)


def test_a_drafter_with_a_model_keeps_its_tokens_where_it_likes():
    """It has no cache, or one of a class of its own, whose model nothing is known of."""
    target, request = tiny_model(1), Request(PROMPT, GenerationConfig(5, ignore_eos=True))
    wanted = BatchDecoder(target, num_rows=1, max_length=64).generate([request])[0].tokens
    for cache in (None, {}):
        drafter = Wrapped(ModelDrafter(tiny_model(2), 1, 64, 13), False)
        drafter.model, drafter.cache = drafter.inner.model, cache
        decoder = BatchDecoder(target, drafter, TokenTree.paper(), num_rows=1, max_length=64)
        assert decoder.generate([request])[0].tokens == wanted
