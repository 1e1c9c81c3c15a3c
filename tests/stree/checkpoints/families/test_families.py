"""Families of hybrids that transformers runs: saved by it, loaded by us, the same logits.

1e-4 of the largest logit in fp32 is the parity that is promised (two orders of summation).
Everything else is measured against our own full forwards in fp64: 1e-9, sums taken in another
order and nothing else.
"""

import functools
import re
import shutil
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from families import LAYOUTS, OF_EACH_KIND, VOCAB, random_reference
from lanes import quick_first
from poisoned import poison
from safetensors.torch import save_file
from toys import right_now_and_then

from stree.checkpoints.load_save import load_model, save_model
from stree.common.errors import CheckpointRefused
from stree.decoder import Decoder
from stree.generation import GenerationConfig
from stree.models.chunk_pass import PrefillScratch
from stree.models.layer_caches import AttentionCache
from stree.models.slicing import slice_drafter
from stree.trees.token_tree import TokenTree, balanced

TREES = [
    TokenTree.chain(0), TokenTree.chain(1), TokenTree.chain(4), balanced([7], "star"),
    balanced([2, 2, 2], "binary"), TokenTree.paper(), TokenTree((-1, 0, 0, 1, 2, 2, 0, 4, 7, 8)),
    balanced([4, 1, 1], "brush"),
]


def cases(more, families=OF_EACH_KIND, costly=(0,)):
    """Return `families` with seed 0 for `make test`, all of them with the costly seeds for `make
    test-all`, and with more seeds for a long run."""
    quick = [(family, 0) for family in families]
    in_test_all = [(family, seed) for family in LAYOUTS for seed in costly]
    return quick_first(
        quick, [(family, seed) for family in LAYOUTS for seed in more],
        [each for each in in_test_all if each not in quick],
    )


@functools.cache
def saved(family, seed, root):
    """Return a folder that transformers wrote, and its model."""
    theirs = random_reference(family, seed)
    folder = root / f"{family}-{seed}"
    theirs.save_pretrained(folder)
    return folder, theirs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def buffers(cache):
    """Yield what a cache holds of the committed tokens."""
    used = cache.num_committed
    for layer in cache.layers:
        if isinstance(layer, AttentionCache):
            yield from (layer.keys[:, :, :used], layer.values[:, :, :used])
        else:
            yield layer.conv_state
            if hasattr(layer, "state"):
                yield layer.state


def relative(got, wanted):
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(("family", "seed"), cases(range(2, 24), LAYOUTS, costly=(1,)))
@torch.no_grad()
def test_logits_are_those_of_transformers(root, family, seed):
    folder, theirs = saved(family, seed, root)
    ours = load_model(folder)
    for length in (1, 33):
        tokens = torch.randint(VOCAB, (2, length))
        wanted = theirs(tokens, use_cache=False).logits
        assert wanted.std() > 0.05
        assert relative(ours(tokens), wanted) <= 1e-4, length


def tied_copies(theirs):
    """Return the tensors of each family's `state_dict()`, and the names of those that are tied."""
    state = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    names: dict[int, list[str]] = {}
    for name, tensor in theirs.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return state, [each for each in names.values() if len(each) > 1]


@pytest.mark.parametrize(("family", "seed", "is_block"), [
    ("zamba", 0, True), ("zamba", 2, True), ("zamba", 4, True), ("zamba", 1, False),
    ("llama", 2, False), ("mamba2", 4, False), ("lfm2", 1, False), ("qwen3_5", 0, False),
])
@torch.no_grad()
def test_tied_tensors_may_be_stored_under_each_name(root, tmp_path, family, seed, is_block):
    folder, theirs = saved(family, seed, root)
    state, tied = tied_copies(theirs)
    names = next(each for each in tied if ("lm_head.weight" in each) is not is_block)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    wanted = load_model(folder).state_dict()
    without_first = {name: each for name, each in state.items() if name != names[0]}
    for stored in (state, without_first):
        save_file(stored, tmp_path / "model.safetensors")
        for name, tensor in load_model(tmp_path).state_dict().items():
            assert torch.equal(tensor, wanted[name]), name
    save_file({**state, names[-1]: state[names[-1]] + 1}, tmp_path / "model.safetensors")
    differing = "|".join(map(re.escape, names))
    with pytest.raises(CheckpointRefused, match=f"({differing}) differs from ({differing}):"):
        load_model(tmp_path)


def in_fp64(root, family, seed):
    return load_model(saved(family, seed, root)[0], dtype=torch.float64)


@pytest.mark.quick(10)
@pytest.mark.parametrize(("family", "seed"), cases(range(1, 20), LAYOUTS))
@torch.no_grad()
def test_prefill_trees_and_commits(root, family, seed):
    """Each tree sees the accepted paths of earlier ones, each node its ancestors."""
    model = in_fp64(root, family, seed)
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (1, 3 + seed % 4), generator=draw)
    cache = model.new_cache(max_length=96, max_nodes=16)
    last = model.prefill(prompt, cache, chunk=4)
    assert relative(last, model(prompt)[:, -1]) <= 1e-9
    committed = prompt[0].tolist()
    for tree in TREES[seed == 0 :: 1 + (seed == 0)]:  # every other one in a short run
        nodes = torch.randint(VOCAB, (1, tree.num_nodes), generator=draw)
        logits = model.tree_forward(nodes, tree, cache)
        leaf = int(torch.randint(tree.num_nodes, (), generator=draw))
        for node in {0, tree.num_nodes - 1, leaf}:
            path = [int(nodes[0, each]) for each in tree.path_to(node)]
            wanted = model(torch.tensor([committed + path]))[0, -1]
            assert relative(logits[0, node], wanted) <= 1e-9, (tree, node)
        path = tree.path_to(leaf)
        cache.commit(path)
        committed += nodes[0, list(path)].tolist()
    again = model.new_cache(max_length=96, max_nodes=16)
    model.prefill(torch.tensor([committed]), again)
    model.apply_path(cache)
    for got, wanted in zip(buffers(cache), buffers(again), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.quick(7)
@pytest.mark.parametrize("backtracking", ["replay", "joint"])
@pytest.mark.parametrize(("family", "seed"), cases(range(1, 6)))
@torch.no_grad()
def test_padded_pieces_of_a_prompt(root, family, seed, backtracking):
    """A row that reads padded chunks ends as without padding, and other rows stay."""
    model = in_fp64(root, family, seed)
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (1, 21), generator=draw)
    wanted = model.new_cache(max_length=48, max_nodes=4, backtracking=backtracking)
    cache = model.new_cache(max_length=48, max_nodes=4, batch=3, backtracking=backtracking)
    for row, count in ((0, 5), (2, 1)):
        model.prefill(prompt[:, :count], cache.at(row))
    for layer in cache.layers:
        if hasattr(layer, "keys"):
            layer.keys[1] = layer.values[1] = torch.nan  # of an occupant before
    others = [cache.narrow(row, 1).save() for row in (0, 2)]
    row = torch.tensor([1])
    # The last piece's padding lies behind the last slot
    for begin, count, size, bound in ((0, 6, 8, 8), (6, 2, 8, 32), (8, 1, 2, 10), (9, 12, 64, 90)):
        piece = prompt[:, begin : begin + count]
        logits = model.prefill(piece, wanted)
        padded = F.pad(piece, (0, size - count), value=3)
        room = PrefillScratch(cache, size, model.config.d_conv)
        last = model.prefill_padded(padded, torch.tensor([count]), row, cache, room, bound)
        got = model.logits(last)
        assert relative(got, logits) <= 1e-9
        mine, theirs = cache.narrow(1, 1).save(), wanted.save()
        assert mine.length == theirs.length == begin + count
        for got, each in zip(chain(*mine.parts), chain(*theirs.parts), strict=True):
            torch.testing.assert_close(got, each, rtol=1e-9, atol=1e-12)
    for index, before in zip((0, 2), others, strict=True):
        after = cache.narrow(index, 1).save()
        assert all(map(torch.equal, chain(*after.parts), chain(*before.parts)))


@pytest.mark.parametrize(("family", "seed"), cases(range(1, 6)))
@torch.no_grad()
def test_sequences_of_a_batch_see_nothing_of_each_other(root, family, seed):
    model, tree = in_fp64(root, family, seed), TokenTree.paper()
    draw = torch.Generator().manual_seed(seed)
    lines = [torch.randint(VOCAB, (1, length), generator=draw) for length in (7, 2)]
    paths = [tree.path_to(tree.num_nodes - 1), tree.path_to(1)]
    cache = model.new_cache(max_length=32, max_nodes=tree.num_nodes, batch=2)
    for row, line in enumerate(lines):
        model.prefill(line, cache.at(row))
    for _ in range(2):
        nodes = torch.randint(VOCAB, (2, tree.num_nodes), generator=draw)
        logits = model.tree_forward(nodes, tree, cache, bound=32)
        for row, path in enumerate(paths):
            line = lines[row] = torch.cat([lines[row], nodes[row : row + 1, path]], dim=1)
            assert relative(logits[row, path[-1]], model(line)[0, -1]) <= 1e-9, row
        longest = max(map(len, paths))
        padded = [[*path, *[0] * (longest - len(path))] for path in paths]
        cache.path[:, : len(padded[0])] = torch.tensor(padded)
        cache.path_length.copy_(torch.tensor([len(path) for path in paths]))


@pytest.mark.parametrize(("family", "seed"), cases(range(1, 20)))
@torch.no_grad()
def test_greedy_trees_are_lossless(root, family, seed):
    """A decoder with a tree and a drafter cut from the target gives the target's own choices."""
    model = in_fp64(root, family, seed)
    prompt, tokens = [1, 2, 3, 4, 5], 64 if seed else 12
    wanted = list(prompt)
    for _ in range(tokens):
        wanted.append(int(model(torch.tensor([wanted]))[0, -1].argmax()))
    generation = GenerationConfig(max_new_tokens=tokens, ignore_eos=True)
    drafter = right_now_and_then(model)
    if not seed:
        drafter = slice_drafter(model, [0, model.config.num_layers - 1]).double().eval()
    accepted = 0
    alone = 1 + (seed + 4) % 7  # of most models one tree, after the one without drafts
    for tree in TREES if 0 < seed < 6 else TREES[alone : alone + 1]:
        decoder = Decoder(model, drafter, tree, max_length=128)
        out = decoder.generate(prompt, generation)
        assert out.tokens == wanted[len(prompt) :], tree
        accepted += sum(out.stats.accepted_per_call)
    assert accepted > 0 or not seed
    decoder = Decoder(model, max_length=128)
    assert decoder.generate(prompt, generation).tokens == wanted[len(prompt) :]


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("tree", "length"),
    [
        pytest.param(TokenTree((-1, 0, 0, 2)), 2, id="small-2"),
        *(
            pytest.param(tree, length, id=f"{tree.name}-{length}", marks=pytest.mark.long)
            for tree in TREES
            for length in (1, 7)
        ),
    ],
)
@pytest.mark.parametrize("family", LAYOUTS)
@torch.no_grad()
def test_the_state_after_every_path_is_that_of_its_tokens(root, family, tree, length):
    """Keys and states after an accepted path are those of its tokens read at once."""
    model = in_fp64(root, family, length % 2)
    draw = torch.Generator().manual_seed(length)
    prompt = torch.randint(VOCAB, (1, length), generator=draw)
    nodes = torch.randint(VOCAB, (1, tree.num_nodes), generator=draw)
    for leaf in range(tree.num_nodes):
        path = tree.path_to(leaf)
        cache, again = (model.new_cache(max_length=40, max_nodes=16) for _ in range(2))
        model.prefill(prompt, cache)
        poison(cache)
        assert model.tree_forward(nodes, tree, cache).isfinite().all()
        cache.commit(path)
        model.apply_path(cache)
        accepted = torch.cat([prompt, nodes[:, path]], dim=1)
        model.prefill(accepted, again)
        for got, wanted in zip(buffers(cache), buffers(again), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
        poison(cache)
        after = model.tree_forward(torch.tensor([[5]]), TREES[0], cache, bound=cache.num_slots)
        whole = model(torch.cat([accepted, torch.tensor([[5]])], dim=1))[:, -1:]
        assert relative(after, whole) <= 1e-9, leaf


@pytest.mark.parametrize(("family", "seed"), cases(range(1, 8)))
def test_packed_training(root, family, seed):
    """Samples of one row see nothing of each other, and every weight gets a gradient."""
    model = in_fp64(root, family, seed)
    lengths = (5, 1, 9)
    samples = [torch.randint(VOCAB, (length,)) for length in lengths]
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    packed = model(torch.cat(samples)[None], segments[None])[0]
    alone = torch.cat([model(sample[None])[0] for sample in samples])
    assert relative(packed, alone) <= 1e-9
    packed.logsumexp(-1).sum().backward()
    without = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not without


@pytest.mark.parametrize(("family", "seed"), cases(range(1, 8)))
@torch.no_grad()
def test_what_we_save_we_load(root, tmp_path, family, seed):
    """Whole models and cut ones load as they were saved, in our own layout if need be."""
    ours = load_model(saved(family, seed, root)[0])
    tokens = torch.randint(VOCAB, (1, 12))
    for model, name in ((ours, "whole"), (slice_drafter(ours, [1]), "cut")):
        save_model(model, tmp_path / name)
        again = load_model(tmp_path / name)
        assert again.config == model.config
        assert torch.equal(again(tokens), model.eval()(tokens))


@pytest.mark.quick(7)
@pytest.mark.parametrize("family", LAYOUTS)
@torch.no_grad()
def test_sharded_and_narrow_checkpoints(root, tmp_path, family):
    folder, theirs = saved(family, 0, root)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    # Tokens that no other test's draws change: with some, rounding to bf16 makes a router choose
    # another expert, and logits of these tokens are others
    tokens = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    wanted = load_model(folder)(tokens)
    assert torch.equal(load_model(tmp_path / "sharded")(tokens), wanted)
    narrow = load_model(folder, dtype=torch.bfloat16)
    assert {each.dtype for name, each in narrow.named_parameters() if name.endswith("proj.weight")}
    assert relative(narrow(tokens), wanted) < 0.3


@pytest.mark.parametrize("family", LAYOUTS)
def test_names_are_checked(root, tmp_path, family):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(saved(family, 0, root)[0], tmp_path / "it")
    weights = load_file(folder / "model.safetensors")
    gone = sorted(weights)[len(weights) // 2]
    save_file(
        {name: w for name, w in weights.items() if name != gone}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointRefused, match="missing, nothing not expected"):
        load_model(folder)
    save_file({**weights, "model.more": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(CheckpointRefused, match=r"nothing missing, model\.more not expected"):
        load_model(folder)
