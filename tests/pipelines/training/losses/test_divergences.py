"""Each kind of divergence equals its formula in fp64 with all logits at once.

Tolerances: as in test_distillation_loss.py, 1e-5 for fp32 sums in another order.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from loss_cases import distillation_loss, make_case, peak_bytes, target_loss

from stree.common.errors import UsageError
from stree_pipelines.resources.estimates import LOSS_BUFFERS
from stree_pipelines.training.losses.distillation_loss import counted_rows, teacher_of
from stree_pipelines.training.losses.divergences import (
    LK,
    ForwardKL,
    JensenShannon,
    LossConfig,
    TotalVariation,
)

LOSSES = [
    LossConfig(),
    LossConfig("reverse_kl"),
    LossConfig("jsd", beta=0.3),
    LossConfig("tv"),
    LossConfig("lk", eta=2.0),
]
EXACT = dict(rtol=1e-5, atol=1e-6)


def name_of(loss: LossConfig) -> str:
    return loss.kind


def dense(loss, p, q, temperature, outside=0.0):
    """Return the docstrings' formulas (rows,) for distributions of positive probabilities.

    Of a head over some tokens q = 0 outside of it, where p has the mass `outside` (rows,); forward
    KL is then the sum over the head's tokens.
    """
    square, linear = temperature**2, temperature
    kl = (p * (p / q).log()).sum(-1)
    tv = ((p - q).abs().sum(-1) + outside) / 2
    if loss.kind == "forward_kl":
        return square * kl
    if loss.kind == "reverse_kl":
        return square * (q * (q / p).log()).sum(-1)
    if loss.kind == "jsd":
        m = loss.beta * p + (1 - loss.beta) * q
        of_p, of_q = (p * (p / m).log()).sum(-1), (q * (q / m).log()).sum(-1)
        of_p = of_p - outside * math.log(loss.beta)  # where m is beta p
        return square * (loss.beta * of_p + (1 - loss.beta) * of_q)
    if loss.kind == "tv":
        return linear * tv
    share = torch.exp(-loss.eta * torch.minimum(p, q).sum(-1).detach())
    return share * square * kl + (1 - share) * linear * tv


def in_fp64(case, temperature):
    """Return leaves in fp64, the student's logits (rows, V) and its distribution."""
    leaves = [case[f"student_{part}"].detach().double().requires_grad_() for part in
              ("hidden", "head")]
    logits = leaves[0][case["mask"]] @ leaves[1].T
    return leaves, logits, (logits / temperature).softmax(-1)


def teacher_distribution(hidden, head, mask, temperature):
    return (hidden[mask].double() @ head.double().T / temperature).softmax(-1)


@pytest.mark.parametrize(("ce_weight", "temperature"), [(0.0, 1.0), (0.3, 1.0), (0.4, 2.5)])
@pytest.mark.parametrize(
    ("loss", "chunk_tokens"),
    [*((loss, 7) for loss in LOSSES), *((LOSSES[0], size) for size in (1, 1000, None))],
    ids=str,
)
def test_a_teacher_of_s_loss_and_gradients_are_the_formula(
    loss, chunk_tokens, ce_weight, temperature
):
    case, labels = make_case()
    terms = target_loss(
        **case, divergence=loss.divergence, labels=labels, ce_weight=ce_weight,
        temperature=temperature, chunk_tokens=chunk_tokens,
    )
    # A factor behind the loss (gradient accumulation) has to reach the gradients.
    got = torch.autograd.grad(terms.loss * 3.0, (case["student_hidden"], case["student_head"]))
    leaves, logits, q = in_fp64(case, temperature)
    p = teacher_distribution(
        case["teacher_hidden"], case["teacher_head"], case["mask"], temperature
    )
    divergence = dense(loss, p, q, temperature).mean()
    cross_entropy = F.cross_entropy(logits, labels[case["mask"]])
    want = divergence + ce_weight * cross_entropy
    torch.testing.assert_close(terms.loss.double(), want, **EXACT)
    torch.testing.assert_close(terms.divergence.double(), divergence, **EXACT)
    if ce_weight:
        torch.testing.assert_close(terms.cross_entropy.double(), cross_entropy, **EXACT)
    acceptance = torch.minimum(p, q).sum(1).mean()
    torch.testing.assert_close(terms.simulated_acceptance.double(), acceptance, **EXACT)
    for mine, theirs in zip(got, torch.autograd.grad(want * 3.0, leaves), strict=True):
        torch.testing.assert_close(mine.double(), theirs, **EXACT)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_in_bf16_only_the_products_are_rounded(loss):
    """On the logits that a product in bf16 gives, the loss is the formula's; its gradient is then
    rounded to bf16 (8 bits) before two more products."""
    case, _ = make_case(vocab=301)
    with torch.autocast("cpu", torch.bfloat16):
        terms = target_loss(**case, divergence=loss.divergence)
    got = torch.autograd.grad(terms.loss, (case["student_hidden"], case["student_head"]))
    mask, bf16 = case["mask"], torch.bfloat16
    half = {name: each.detach().to(bf16) for name, each in case.items() if name != "mask"}
    logits = (half["student_hidden"][mask] @ half["student_head"].T).double().requires_grad_()
    teacher_logits = half["teacher_hidden"][mask] @ half["teacher_head"].T
    want = dense(loss, teacher_logits.double().softmax(-1), logits.softmax(-1), 1.0).mean()
    torch.testing.assert_close(terms.loss.double(), want, **EXACT)
    (grad,) = torch.autograd.grad(want, logits)
    dense_grads = (
        torch.zeros_like(case["student_hidden"], dtype=torch.float64),
        grad.T @ half["student_hidden"][mask].double(),
    )
    dense_grads[0][mask] = grad @ half["student_head"].double()
    for mine, theirs in zip(got, dense_grads, strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(mine.double() / scale, theirs / scale, rtol=0, atol=2**-7)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_distributions_without_common_tokens_have_finite_losses_where_they_are(loss):
    """The student is certain of one token (q = 1 and 0 in fp32), the teacher of another; ids that
    both rule out with logits of −inf count nothing."""
    student = torch.tensor([[0.0, 200.0, -torch.inf]]).requires_grad_()
    teacher = torch.tensor([[200.0, 0.0, -torch.inf]])
    identity = torch.eye(3)
    # the product with an identity would make NaN of −inf, so the last id has a head of its own
    head = torch.cat([identity[:2], torch.tensor([[-1e38, -1e38, -1e38]])])
    hidden = [torch.cat([each[:, :2], torch.full((1, 1), 1e3)], 1) for each in (student, teacher)]
    row = torch.ones(1, dtype=torch.bool)
    student_hidden = hidden[0].detach().requires_grad_()
    terms = target_loss(student_hidden, head, hidden[1], head, row, divergence=loss.divergence)
    terms.loss.backward()
    assert terms.loss.isfinite() and terms.loss > 0.1
    assert student_hidden.grad[:, :2].isfinite().all()
    assert terms.simulated_acceptance < 1e-6


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.parametrize("ce_weight", [0.0, 0.1])
def test_a_chunk_takes_the_buffers_that_dry_runs_count(loss, ce_weight):
    chunk_tokens, vocab = 32, 8192
    case, labels = make_case((1, 256), vocab, student_width=1, teacher_width=1)
    case["mask"] = torch.ones_like(case["mask"])

    def step():
        target_loss(
            **case, divergence=loss.divergence, labels=labels, ce_weight=ce_weight,
            temperature=2.0, chunk_tokens=chunk_tokens,
        ).loss.backward()

    # A mask of a byte a number, and gradients that are small beside a buffer, come on top.
    assert peak_bytes(step) / (4 * chunk_tokens * vocab) < LOSS_BUFFERS + 0.5


# What the kinds are to each other


def test_the_ends_of_the_families():
    """JSD goes to the KL divergences, and is symmetric in the middle; LK begins at KL."""
    case, _ = make_case(student_width=20)
    turned = dict(
        student_hidden=case["teacher_hidden"], student_head=case["teacher_head"],
        teacher_hidden=case["student_hidden"], teacher_head=case["student_head"],
        mask=case["mask"],
    )

    def value(divergence, given=case):
        return target_loss(**given, divergence=divergence).loss

    small = 1e-4
    kl, tv = value(ForwardKL()), value(TotalVariation())
    torch.testing.assert_close(value(JensenShannon(small)) / small, kl, rtol=0.02, atol=0)
    half = JensenShannon(0.5)
    torch.testing.assert_close(value(half), value(half, turned))
    torch.testing.assert_close(value(LK(0.0)), kl)
    torch.testing.assert_close(value(LK(1e4)), tv)
    assert target_loss(**case).simulated_acceptance == pytest.approx(1 - tv.item(), abs=1e-5)


# The config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lk", "beta": 0.2}, "model.loss.beta is an option of jsd, model.loss.kind is lk"),
        ({"eta": 1.0}, "loss.eta is an option of lk, model.loss.kind is forward_kl"),
        ({"kind": "jsd", "beta": 1.0}, "model.loss.beta is 1.0, wanted between 0 and 1"),
        ({"kind": "lk", "eta": -1.0}, "model.loss.eta is -1.0, wanted at least 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        LossConfig(**options)


# A head over some tokens


def partial_case(num_ids=30, seed=0, **options):
    """Make a student whose head is over some of the teacher's 97 tokens."""
    case, _ = make_case(seed=seed, **options)
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(seed))[:num_ids].sort().values
    case["student_head"] = case["student_head"].detach()[ids].requires_grad_()
    return case, ids


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_a_head_over_some_tokens_has_the_whole_distributions_losses(loss, temperature):
    case, ids = partial_case()
    hidden, head = case.pop("teacher_hidden"), case.pop("teacher_head")
    rows = counted_rows(case["mask"], hidden)
    teacher = teacher_of(hidden, head, rows, case["student_hidden"], temperature)
    terms = distillation_loss(
        **case, teacher=teacher.over(ids), divergence=loss.divergence, temperature=temperature,
        chunk_tokens=7,
    )
    got = torch.autograd.grad(terms.loss, (case["student_hidden"], case["student_head"]))
    leaves, _, q = in_fp64(case, temperature)
    whole = teacher_distribution(hidden, head, case["mask"], temperature)
    p, outside = whole[:, ids], 1 - whole[:, ids].sum(1)
    want = dense(loss, p, q, temperature, outside).mean()
    torch.testing.assert_close(terms.loss.double(), want, **EXACT)
    accepted = torch.minimum(p, q).sum(1).mean()
    torch.testing.assert_close(terms.simulated_acceptance.double(), accepted, **EXACT)
    for mine, theirs in zip(got, torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(mine.double(), theirs, **EXACT)


def test_a_head_over_some_tokens_takes_no_more_memory():
    chunk_tokens, vocab = 32, 8192
    case, _ = make_case((1, 256), vocab, student_width=1, teacher_width=1)
    case["mask"] = torch.ones_like(case["mask"])
    ids = torch.arange(0, vocab, 2)
    case["student_head"] = case["student_head"].detach()[ids].requires_grad_()
    hidden, head = case.pop("teacher_hidden"), case.pop("teacher_head")

    def step():
        rows = counted_rows(case["mask"], hidden)
        teacher = teacher_of(hidden, head, rows, case["student_hidden"], 2.0).over(ids)
        distillation_loss(
            **case, teacher=teacher, divergence=LK(3.0), temperature=2.0, chunk_tokens=chunk_tokens
        ).loss.backward()

    assert peak_bytes(step) / (4 * chunk_tokens * vocab) < LOSS_BUFFERS - 1
