"""Models with layers in the CPU's memory: the same tokens, other addresses, no stale weights."""

import copy

import pytest
import torch
from families import LAYOUTS, OF_EACH_KIND, random_reference
from lanes import costly
from torch import nn
from toys import load_quietly, mixed_requests, right_now_and_then, tiny_model

import stree
from stree import BatchDecoder, GenerationConfig, TokenTree
from stree.checkpoints.load_save import save_model
from stree.checkpoints.shared_weights import shared_model
from stree.common.errors import UsageError
from stree.models.in_8_bits import put_in_8_bits
from stree.models.offload import NUM_BUFFERS, stream_layers
from stree.trees.token_tree import balanced

TREES = [TokenTree.chain(0), TokenTree.paper(), balanced([3, 2])]


def tokens_of(target, drafter, requests, **options):
    decoder = BatchDecoder(
        target, drafter, None if drafter is None else TREES[1],
        num_rows=3, max_length=64, max_nodes=13, **options,
    )
    return [each.tokens for each in decoder.generate(requests)]


@pytest.mark.parametrize(
    ("family", "in_8_bits"),
    [
        *((each, False) for each in OF_EACH_KIND), ("falcon", True), costly("zamba", True),
        ("lfm2_moe", True),
        *(costly(each, False) for each in LAYOUTS if each not in (*OF_EACH_KIND, "mamba2")),
    ],
)
def test_every_family_gives_the_same_tokens(family, in_8_bits):
    target = shared_model(random_reference(family, 1))
    if in_8_bits:
        put_in_8_bits(target)
    requests = [stree.Request([5, 3, 8, 2], GenerationConfig(6, ignore_eos=True))] * 2
    wanted = tokens_of(target, None, requests)
    streamed = copy.deepcopy(target)
    stream_layers(streamed, target.config.num_layers, "cpu")
    assert tokens_of(streamed, None, requests) == wanted


@pytest.mark.quick(1)
@pytest.mark.parametrize("backtracking", ["replay", "joint"])
@pytest.mark.parametrize("num_layers", [1, 2, *map(costly, (3, 5))])
def test_trees_and_batches_give_the_same_tokens(num_layers, backtracking):
    target = tiny_model(1, num_layers=5, attn_layers=(1, 4))
    drafter = right_now_and_then(target)
    requests = mixed_requests(6, TREES, seed=2)
    options = dict(backtracking=backtracking, num_prefixes=2)
    wanted = tokens_of(target, drafter, requests, **options)
    streamed = stream_layers(target, num_layers, "cpu")
    assert len(streamed.layers) == num_layers
    products = [each for each in target.model.layers.modules() if isinstance(each, nn.Linear)]
    all_bytes = sum(each.weight.nbytes for each in products)
    assert num_layers < 5 or all_bytes <= streamed.num_bytes < 1.1 * all_bytes
    for buffer in streamed.buffers:
        buffer.fill_(255)  # NaN, if anything read a buffer before its copy
    assert tokens_of(target, drafter, requests, **options) == wanted
    with streamed.without_copies():
        told = tokens_of(target, drafter, requests, **options)
        assert num_layers <= NUM_BUFFERS or told != wanted


@pytest.mark.gpu
@pytest.mark.parametrize("num_layers", [2, 5])
def test_graphs_hold_the_copies(num_layers):
    target = tiny_model(1, torch.float32, num_layers=5, attn_layers=(1, 4)).cuda()
    drafter = right_now_and_then(target)
    requests = mixed_requests(6, TREES, seed=2)
    wanted = tokens_of(target, drafter, requests)
    stream_layers(target, num_layers, "cuda")
    for _ in range(2):  # captured, and replayed
        assert tokens_of(target, drafter, requests) == wanted


def test_a_loaded_pair_streams_its_target(workspace):
    prompt, asked = "What is 1 plus 2?", GenerationConfig(12, ignore_eos=True)
    plain, streaming = (
        load_quietly(workspace / "target", "ngram:3", tree="chain-2", offload=number)
        for number in (None, 2)
    )
    assert streaming.complete(prompt, asked).tokens == plain.complete(prompt, asked).tokens
    assert len(streaming.target.offload.layers) == 2


def test_what_cannot_be_is_refused(tmp_path):
    target = tiny_model(1)
    for number in (0, 4):
        with pytest.raises(UsageError, match=f"offload is {number}, wanted 1 to 3: the number"):
            stream_layers(target, number, "cpu")
    stream_layers(target, 2, "cpu")
    for refused in (lambda: save_model(target, tmp_path / "a"), lambda: copy.deepcopy(target)):
        with pytest.raises(UsageError, match=r"streamed from the CPU's memory.*load it without"):
            refused()
