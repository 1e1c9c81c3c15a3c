"""A model works on its own GPU, whichever is the current one.

Kernels, streams, events and graphs go to the current GPU: with another one they fail, or race. Two
GPUs are needed to see it; that the GPU is made current is seen without.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import tiny_model

from stree import BatchDecoder, Decoder, GenerationConfig, Request, TokenTree
from stree.trees.tree_batch import topology_of
from stree_kernels import ops


def call(name: str, model) -> Callable[[], object]:
    """Return a public method with arguments."""
    if name in ("tree_hidden", "tree_stream"):
        made = call("tree_call", model)()
        return partial(getattr(model, name), made)
    tokens, tree = torch.tensor([[3]], device=model.device), TokenTree.chain(0)
    cache = model.new_cache(16, 4)
    topology = topology_of(tree, model.config.d_conv, model.device)
    arguments = dict(
        forward=(tokens,), hidden_states=(tokens,), first_non_finite=([3],),
        logits=(torch.zeros(1, 32, dtype=model.dtype, device=model.device),),
        prefill=(tokens, cache), tree_forward=(tokens, tree, cache),
        tree_call=(tokens, topology, cache), apply_path=(cache,),
    )[name]
    return partial(model if name == "forward" else getattr(model, name), *arguments)


METHODS = [
    "forward", "hidden_states", "first_non_finite", "logits", "prefill", "tree_forward",
    "tree_call", "tree_hidden", "tree_stream", "apply_path",
]


class Watched(TorchDispatchMode):
    """Notes what runs while no device has been made current."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.outside = 0, []

    @contextmanager
    def current(self, device):
        self.depth += 1
        yield
        self.depth -= 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.depth:
            self.outside.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [*METHODS, "generate"])
def test_the_models_gpu_is_made_current(method, monkeypatch):
    model, watched = tiny_model(1), Watched()
    decoder = Decoder(model, max_length=32)
    monkeypatch.setattr(ops, "current", watched.current)
    function = partial(decoder.generate, torch.tensor([1]), GenerationConfig(4))
    if method != "generate":
        function = call(method, model)
    with watched:
        function()
    assert not watched.outside


def test_it_is_made_current_to_keep_a_prefix(monkeypatch):
    """The event behind which lengths are known is of the current GPU."""
    decoder, watched = BatchDecoder(tiny_model(1), max_length=32, num_prefixes=2), Watched()
    row = decoder.admit(Request([1, 2], GenerationConfig(4)))
    decoder.step()
    runner, depths = decoder.worker.runner, []
    hand_over = runner.hand_over
    runner.hand_over = lambda values: depths.append(watched.depth) or hand_over(values)
    monkeypatch.setattr(ops, "current", watched.current)
    decoder.release(row, keep=True)
    assert depths == [1]


@pytest.fixture(params=["fused", "naive"])
def kernels(request, monkeypatch):
    if request.param == "naive":
        monkeypatch.setattr(ops, "fused", lambda *_: False)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("tree", [None, TokenTree.chain(3), TokenTree.paper()], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_gpus_decode_alike(tree, temperature, kernels):
    """The GPUs take turns, so that each one's graphs are replayed beside the other's."""

    def decoder(device):
        target = tiny_model(1, torch.float32, num_layers=4, attn_layers=(1, 3)).to(device)
        drafter = tiny_model(1, torch.float32, num_layers=2, attn_layers=()).to(device)
        return Decoder(target, drafter if tree else None, tree, max_length=300)

    decoders = [decoder(device) for device in ("cuda:0", "cuda:1")]
    for seed in range(3):
        generation = GenerationConfig(60, temperature=temperature, seed=seed)
        first, second = (each.generate([1, 2, 3, seed], generation) for each in decoders)
        assert first.tokens == second.tokens and torch.cuda.current_device() == 0
        assert second.stats.decode_s > 0
    with torch.cuda.device(1):
        generation = GenerationConfig(60, temperature=temperature, seed=2)
        assert decoders[0].generate([1, 2, 3, 2], generation).tokens == first.tokens


@pytest.mark.gpu(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_run_on_the_other_gpu(method, dtype):
    model = tiny_model(1, dtype).to("cuda:1")
    call(method, model)()
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu(2)
def test_both_gpus_train_alike():
    tokens = torch.arange(40)[None]
    gradients = []
    for device in ("cuda:0", "cuda:1"):
        model = tiny_model(1, torch.float32).to(device)
        model(tokens.to(device)).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.cpu() for parameter in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)
