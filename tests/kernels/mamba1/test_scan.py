"""Mamba-1's scan of training and its gradients: the kernels against the twin's in fp64.

fp32 leaves about 1e-6 of sums of 70 tokens; bf16 rounds inputs' gradients to 2^-9.
"""

import pytest
import torch
from kernel_cases import DEVICE, normal, relative_error
from lanes import costly

from stree_kernels import naive, ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def inputs(T, channels=40, states=5, batch=2, dtype=torch.float32):
    given = dict(
        x=normal(batch, T, channels, dtype=dtype),
        dt=normal(batch, T, channels, seed=1).exp() * 0.2,
        A=-normal(channels, states, seed=2).exp(), B=normal(batch, T, states, seed=3, dtype=dtype),
        C=normal(batch, T, states, seed=4, dtype=dtype),
    )
    return {name: each.requires_grad_() for name, each in given.items()}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(ops, "fused", lambda *_: True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("T", "dtype", "segments"), [
    (1, torch.float32, False), (31, torch.float32, True), (70, torch.float32, False),
    costly(70, torch.bfloat16, True),
])
def test_outputs_and_gradients(T, dtype, segments):
    given = inputs(T, dtype=dtype)
    exact = {name: each.detach().double().requires_grad_() for name, each in given.items()}
    segment_ids = None
    if segments:
        segment_ids = (torch.arange(T, device=DEVICE) // 13).repeat(2, 1)
        segment_ids[1] = torch.arange(T, device=DEVICE) // 29
    weight = normal(2, T, 40, seed=5, dtype=dtype)
    y, state = ops.selective_scan(*given.values(), segment_ids=segment_ids)
    wanted, last = naive.selective_scan(**exact, segment_ids=segment_ids)
    assert y.dtype == dtype
    assert relative_error(y, wanted) < TOLERANCE[dtype]
    assert relative_error(state, last) < TOLERANCE[dtype]
    (y * weight).sum().backward()
    (wanted * weight.double()).sum().backward()
    for name, each in given.items():
        assert relative_error(each.grad, exact[name].grad) < TOLERANCE[dtype], name


def test_it_goes_on_from_a_state():
    given = {name: each.detach() for name, each in inputs(50).items()}
    whole, last = ops.selective_scan(*given.values())
    state, outputs = None, []
    for part in (slice(0, 1), slice(1, 34), slice(34, 50)):
        piece = [each if name == "A" else each[:, part] for name, each in given.items()]
        y, state = ops.selective_scan(*piece, initial_state=state)
        outputs.append(y)
    assert relative_error(torch.cat(outputs, 1), whole) < 1e-6
    assert relative_error(state, last) < 1e-6
