"""Attention within packed samples: by bounds on a GPU, where it needs no mask."""

from __future__ import annotations

import pytest
import torch
from toys import tiny_config

from stree.models.layers.attention import takes_packed
from stree.models.model import HybridModel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LENGTHS = [[5, 1, 34, 24], [64]]  # of the samples of each row


def test_a_cpu_has_a_mask():
    assert not takes_packed(64, torch.bfloat16, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "dtype", "takes"),
    [(64, torch.bfloat16, True), (20, torch.bfloat16, False), (264, torch.bfloat16, False),
     (64, torch.float32, False)],
)
def test_what_the_kernel_takes(head_dim, dtype, takes):
    assert takes_packed(head_dim, dtype, GPU) == takes


def _rows(seed: int, lengths: list[list[int]], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """Return tokens and segment ids (B, T)."""
    torch.manual_seed(seed)
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    segments = torch.stack(ids)
    return torch.randint(vocab_size, segments.shape, device=GPU), segments.to(GPU)


def _model() -> HybridModel:
    torch.manual_seed(0)
    return HybridModel(tiny_config(num_layers=2, attn_layers=(0, 1), head_dim=32)).to(GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_samples_and_their_gradients_are_those_of_each_alone(compiled):
    """Packed attention equals fp32 without autocast, which attends by a mask."""
    model = _model()
    tokens, segments = _rows(0, LENGTHS, model.config.vocab_size)
    pull = torch.randn(*tokens.shape, model.config.d_model, device=GPU)

    def gradients() -> list[torch.Tensor]:
        taken = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        return taken

    wanted = model.hidden_states(tokens, segments)
    (wanted * pull).sum().backward()
    wanted_gradients = gradients()
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    with torch.autocast("cuda", torch.bfloat16):
        assert model.model._attends_packed()
        got = model.hidden_states(tokens, segments)
    (got * pull).sum().backward()
    assert (got - wanted).abs().max() < 0.03 * wanted.abs().max()
    found = gradients()
    assert len(found) == len(wanted_gradients)
    for one, other in zip(found, wanted_gradients, strict=True):
        assert (one - other).norm() < 0.05 * other.norm()


@pytest.mark.gpu
def test_other_numbers_of_samples_compile_nothing_again():
    model = _model()
    layer = model.model.layers[0]
    layer.compile(dynamic=False)
    counts = []
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for lengths in ([[30, 34], [64]], [[16] * 4, [1, 63]], [[8] * 8, [2] * 32]):
            model.hidden_states(*_rows(0, lengths, model.config.vocab_size))
            counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1] > 0
