"""Losses over a large vocabulary that never hold the logits of all tokens.

Legend: B batch, T tokens, M rows (tokens that count), C rows of a chunk, V vocabulary,
Ds / Dt width of student and teacher.

Dense logits of teacher and student cost 2·M·V fp32 numbers; at V = 128,256 and 8,192 tokens that
is 8 GiB before the first gradient. Here the rows that count are gathered first, then taken C at a
time: a chunk's logits, loss and gradients (with respect to the student's hidden rows and head) are
computed together in the forward pass and the logits are dropped. The backward pass only scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stree.errors import UsageError

# One (C, V) fp32 buffer: small enough to stay in cache on a CPU, large enough to fill a GPU.
_CPU_BUFFER_BYTES = 8 << 20
_CUDA_BUFFER_BYTES = 512 << 20
_MIN_CHUNK_TOKENS = 16
# About four (C, V) buffers live at once, so C = M/16 keeps them at an eighth of 2·M·V.
_MIN_NUM_CHUNKS = 16


@dataclass(frozen=True)
class LossTerms:
    """What a training step logs; `loss` carries the gradient, the others are detached scalars."""

    loss: Tensor
    kl: Tensor
    cross_entropy: Tensor
    simulated_acceptance: Tensor


def chunked_distillation_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    ce_labels: Tensor | None = None,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    normalizer: Tensor | None = None,
) -> LossTerms:
    """Forward KL(teacher ‖ student), averaged over the tokens in `mask`, plus optional CE.

    loss = τ²·mean_m Σ_v p_mv (log p_mv − log q_mv)  +  ce_weight · mean_m (−log q¹_m[label_m])

    with p and q the softmax of the teacher's and the student's logits divided by the temperature
    τ (τ² keeps the gradient's size, Hinton et al. 2015, section 2) and q¹ the student at τ = 1.
    The simulated acceptance is mean_m Σ_v min(p_mv, q_mv): the chance that a token drawn from the
    student passes speculative sampling (Leviathan et al. 2023, corollary 3.6).

    Args:
        student_hidden: (…, Ds) float, hidden states that predict the token of the same row.
        student_head: (V, Ds) float.
        teacher_hidden: (…, Dt) float; no gradient flows to it or to its head.
        teacher_head: (V, Dt) float.
        mask: (…) bool, the rows that count; the others are not computed at all.
        ce_labels: (…) int64, read where the mask is True; needed when `ce_weight` is not 0.
        temperature: τ > 0.
        chunk_tokens: rows per chunk; None chooses by device and vocabulary.
        normalizer: scalar to divide the sums by in place of the number of rows (the global mean
            over ranks that hold different numbers of tokens).

    Logits, softmax and sums are fp32; under autocast the matrix products run in its dtype.
    A batch without a counting row gives 0 with zero gradients. p = 0 contributes 0, so logits of
    −inf on both sides are fine; p > 0 where q = 0 gives inf, as it should.

    Raises:
        UsageError: shapes that do not fit, CE without labels, a temperature that is not positive.
    """
    if temperature <= 0:
        raise UsageError(f"temperature is {temperature}; wanted more than 0")
    if teacher_head.shape[0] != student_head.shape[0]:
        raise UsageError(
            f"the teacher's head has {teacher_head.shape[0]} tokens, the student's "
            f"{student_head.shape[0]}; a drafter needs its target's vocabulary"
        )
    if ce_weight and ce_labels is None:
        raise UsageError(f"ce_weight is {ce_weight} but there are no ce_labels")
    return _masked_loss(
        student_hidden, student_head, teacher_hidden.detach(), teacher_head.detach(), mask,
        ce_labels if ce_weight else None, ce_weight, temperature, chunk_tokens, normalizer,
    )  # fmt: skip


def chunked_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    mask: Tensor,
    chunk_tokens: int | None = None,
    normalizer: Tensor | None = None,
) -> LossTerms:
    """Cross-entropy to `labels` (nats), averaged over the tokens in `mask`.

    hidden (…, D), head (V, D), labels (…) int64, mask (…) bool. The simulated acceptance is the
    mean probability of the label: Σ_v min(p, q) with p the one-hot data. Otherwise as
    `chunked_distillation_loss`.
    """
    return _masked_loss(hidden, head, None, None, mask, labels, 1.0, 1.0, chunk_tokens, normalizer)


def _masked_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor | None,
    teacher_head: Tensor | None,
    mask: Tensor,
    labels: Tensor | None,
    ce_weight: float,
    temperature: float,
    chunk_tokens: int | None,
    normalizer: Tensor | None,
) -> LossTerms:
    for name, tensor in (("student_hidden", student_hidden), ("teacher_hidden", teacher_hidden)):
        if tensor is not None and tensor.shape[:-1] != mask.shape:
            raise UsageError(
                f"{name} has rows {tuple(tensor.shape[:-1])}, the mask {tuple(mask.shape)}"
            )
    # The only host sync on CUDA: how many rows there are.
    rows_M = mask.reshape(-1).nonzero().squeeze(1)
    student_MD = student_hidden.reshape(-1, student_hidden.shape[-1])[rows_M]
    teacher_MD = (
        None
        if teacher_hidden is None
        else teacher_hidden.reshape(-1, teacher_hidden.shape[-1])[rows_M]
    )
    labels_M = None if labels is None else labels.reshape(-1)[rows_M]
    if normalizer is None:
        normalizer = torch.full((), float(max(len(rows_M), 1)), device=student_MD.device)
    if chunk_tokens is None:
        chunk_tokens = _default_chunk_tokens(len(rows_M), student_head)
    device_type = student_MD.device.type
    compute_dtype = (
        torch.get_autocast_dtype(device_type)
        if torch.is_autocast_enabled(device_type)
        else student_MD.dtype
    )
    loss, terms_3 = _ChunkedLoss.apply(
        student_MD, student_head, teacher_MD, teacher_head, labels_M, normalizer,
        ce_weight, temperature, chunk_tokens, compute_dtype, torch.is_grad_enabled(),
    )  # fmt: skip
    kl, cross_entropy, acceptance = terms_3.unbind()
    return LossTerms(loss, kl, cross_entropy, acceptance)


def _default_chunk_tokens(num_rows: int, head: Tensor) -> int:
    row_bytes = 4 * head.shape[0]
    budget = _CUDA_BUFFER_BYTES if head.is_cuda else _CPU_BUFFER_BYTES
    most = max(budget // row_bytes, _MIN_CHUNK_TOKENS)
    # Small vocabularies gain nothing from many tiny chunks: 4 MiB a buffer is always allowed.
    least = max((4 << 20) // row_bytes, _MIN_CHUNK_TOKENS)
    return min(max(num_rows // _MIN_NUM_CHUNKS, least), most)


class _ChunkedLoss(torch.autograd.Function):
    """(loss, [kl, cross entropy, acceptance]); gradients of `loss` are made in the forward."""

    @staticmethod
    def forward(
        ctx, student_MD, student_head, teacher_MD, teacher_head, labels_M, normalizer,
        ce_weight, temperature, chunk_tokens, compute_dtype, with_grad,
    ):  # fmt: skip
        needs_hidden = with_grad and ctx.needs_input_grad[0]
        needs_head = with_grad and ctx.needs_input_grad[1]
        num_rows = student_MD.shape[0]
        sums_3 = student_MD.new_zeros(3, dtype=torch.float32)
        grad_MD = torch.zeros_like(student_MD) if needs_hidden else None
        grad_VD = torch.zeros_like(student_head, dtype=torch.float32) if needs_head else None
        with torch.autocast(student_MD.device.type, enabled=False):
            student_VD = student_head.to(compute_dtype)
            teacher_VD = None if teacher_head is None else teacher_head.to(compute_dtype)
            for start in range(0, num_rows, chunk_tokens):
                rows = slice(start, min(start + chunk_tokens, num_rows))
                student_CD = student_MD[rows].to(compute_dtype)
                student_CV = (student_CD @ student_VD.T).float()
                teacher_CV = None
                if teacher_MD is not None and teacher_VD is not None:
                    teacher_CV = (teacher_MD[rows].to(compute_dtype) @ teacher_VD.T).float()
                grad_CV = _chunk_terms(
                    student_CV, teacher_CV, None if labels_M is None else labels_M[rows],
                    ce_weight, temperature, sums_3, with_grad,
                )  # fmt: skip
                del student_CV, teacher_CV
                if grad_CV is None:
                    continue
                grad_CV = grad_CV.div_(normalizer).to(compute_dtype)
                if grad_MD is not None:
                    grad_MD[rows] = grad_CV @ student_VD
                if grad_VD is not None:
                    if compute_dtype == torch.float32:
                        grad_VD.addmm_(grad_CV.T, student_CD)
                    else:
                        grad_VD.add_(grad_CV.T @ student_CD)
                del grad_CV
        terms_3 = sums_3 / normalizer
        ctx.grads = (grad_MD, grad_VD)
        ctx.head_dtype = student_head.dtype
        ctx.mark_non_differentiable(terms_3)
        return terms_3[0] * temperature**2 + ce_weight * terms_3[1], terms_3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_terms):
        # In place: a second pair of gradients would double the memory this file is about.
        grad_MD, grad_VD = ctx.grads
        ctx.grads = None
        if grad_MD is not None:
            grad_MD.mul_(grad_loss)
        if grad_VD is not None:
            grad_VD = grad_VD.mul_(grad_loss).to(ctx.head_dtype)
        return grad_MD, grad_VD, *([None] * 9)


def _chunk_terms(
    student_CV: Tensor,
    teacher_CV: Tensor | None,
    labels_C: Tensor | None,
    ce_weight: float,
    temperature: float,
    sums_3: Tensor,
    with_grad: bool,
) -> Tensor | None:
    """Add a chunk's Σ KL, Σ CE and Σ acceptance to `sums_3`; return d loss / d student logits.

    Both logits are consumed (overwritten). At most five (C, V) buffers live at once.
    """
    grad_CV = None
    if labels_C is not None and (temperature != 1.0 or teacher_CV is None):
        log_q_CV = torch.log_softmax(student_CV, dim=-1)
        _add_cross_entropy(log_q_CV, labels_C, sums_3, acceptance=teacher_CV is None)
        if with_grad:
            grad_CV = log_q_CV.exp_().mul_(ce_weight)
            _subtract_one_hot(grad_CV, labels_C, ce_weight)
        if teacher_CV is None:
            return grad_CV
        del log_q_CV
        labels_C = None
    assert teacher_CV is not None
    if temperature != 1.0:
        student_CV.div_(temperature)
        teacher_CV.div_(temperature)
    log_q_CV = torch.log_softmax(student_CV, dim=-1)
    if labels_C is not None:
        _add_cross_entropy(log_q_CV, labels_C, sums_3, acceptance=False)
    log_p_CV = torch.log_softmax(teacher_CV, dim=-1)
    p_CV = torch.exp(log_p_CV, out=teacher_CV)
    q_CV = torch.exp(log_q_CV, out=student_CV)
    # Where p = 0 the term is 0 whatever the logs are (−inf − −inf is NaN).
    sums_3[0] += log_p_CV.sub_(log_q_CV).masked_fill_(p_CV == 0, 0.0).mul_(p_CV).sum()
    sums_3[2] += torch.minimum(p_CV, q_CV, out=log_p_CV).sum()
    if not with_grad:
        return None
    kl_grad_CV = q_CV.sub_(p_CV).mul_(temperature)  # τ² from the loss, 1/τ from the logits
    if labels_C is not None:
        kl_grad_CV.add_(log_q_CV.exp_(), alpha=ce_weight)
        _subtract_one_hot(kl_grad_CV, labels_C, ce_weight)
    return kl_grad_CV if grad_CV is None else kl_grad_CV.add_(grad_CV)


def _add_cross_entropy(log_q_CV: Tensor, labels_C: Tensor, sums_3: Tensor, acceptance: bool):
    picked_C = log_q_CV.gather(1, labels_C[:, None]).squeeze(1)
    sums_3[1] -= picked_C.sum()
    if acceptance:
        sums_3[2] += picked_C.exp().sum()


def _subtract_one_hot(grad_CV: Tensor, labels_C: Tensor, weight: float) -> None:
    grad_CV.scatter_add_(
        1, labels_C[:, None], torch.full_like(labels_C[:, None], -weight, dtype=grad_CV.dtype)
    )
