"""A training by the kernels of `ops` has the loss and the gradients of one in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, relative_error

from stree.models.config import HybridConfig
from stree_kernels import ops
from stree_kernels.segments import sample_bounds
from stree_pipelines.training.module import TargetTraining

CONFIG = HybridConfig(
    vocab_size=64, d_model=32, num_layers=2, attn_layers=(1,),
    intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16, num_ssm_heads=2,
    ssm_head_dim=16, d_state=16, num_x_groups=1, num_b_groups=1, num_c_groups=2,
    gated_norm_groups=2,
)


def test_loss_and_gradients_are_the_naive_twins(monkeypatch):
    torch.manual_seed(0)
    module = TargetTraining(CONFIG).to(DEVICE)
    tokens = torch.randint(64, (2, 40), device=DEVICE)
    segment_ids = torch.tensor([[0] * 17 + [1] * 2 + [2] * 21, [3] * 40], device=DEVICE)
    counted = torch.ones(2, 40, dtype=torch.bool).numpy()
    batch = dict(
        tokens=tokens, segment_ids=segment_ids, bounds=sample_bounds(segment_ids), counted=counted
    )

    def loss_and_gradients(fused: bool):
        monkeypatch.setattr(ops, "fused", lambda *_: fused)
        loss = module.loss_terms(batch).loss
        return loss.detach(), torch.autograd.grad(loss, list(module.exported.parameters()))

    (loss, gradients), (wanted, naive) = loss_and_gradients(True), loss_and_gradients(False)
    assert not torch.equal(gradients[0], naive[0])  # the sums are in another order
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    bound = 1e-5 if DEVICE == "cpu" else 2e-5  # on an H200 one of the smallest is 1.03e-5 apart
    for own, other in zip(gradients, naive, strict=True):
        assert relative_error(own, other) < bound
