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
from stree_pipelines.training.teachers import LiveTeacher, Teacher, TopK

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
    if teacher_head.shape[0] != student_head.shape[0]:
        raise UsageError(
            f"the teacher's head has {teacher_head.shape[0]} tokens, the student's "
            f"{student_head.shape[0]}; a drafter needs its target's vocabulary"
        )
    rows_M = _rows_of(mask, student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    compute_dtype = product_dtype(student_hidden)
    teacher_MD = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])[rows_M]
    teacher = LiveTeacher(
        teacher_MD.to(compute_dtype), teacher_head.detach().to(compute_dtype), temperature
    )
    return _loss_of(
        student_hidden, student_head, teacher, rows_M, ce_labels, ce_weight, temperature,
        chunk_tokens, normalizer,
    )  # fmt: skip


def chunked_top_k_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher: TopK,
    mask: Tensor,
    ce_labels: Tensor | None = None,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    normalizer: Tensor | None = None,
) -> LossTerms:
    """Forward KL on the teacher's top k and one bucket for all other tokens, plus optional CE.

    kl = mean_m [ Σ_{v ∈ S_m} p_mv (log p_mv − log q_mv)  +  P_m (log P_m − log Q_m) ]

    with S_m the k tokens that the teacher finds most probable, P_m = 1 − Σ_{v ∈ S_m} p_mv and
    Q_m = 1 − Σ_{v ∈ S_m} q_mv. It is the KL divergence after all tokens outside S_m are merged
    into one, hence at most the full one (data processing inequality; Cover & Thomas, Elements of
    Information Theory, section 2.8) and equal to it when k = V. What it leaves out is
    P_m · KL(p(· | not S_m) ‖ q(· | not S_m)): the student is free to share out the tail as it
    likes. The gradient with respect to its logits is q − p̂, where p̂ is p on S_m and P_m q_v / Q_m
    elsewhere. The simulated acceptance counts the top k only, so it is at most the full one, too.

    Args as `chunked_distillation_loss`, but for:
        teacher: of the rows that count, in the mask's order, at the same temperature.

    Raises:
        UsageError: as there, and when the teacher has another number of rows than the mask.
    """
    rows_M = _rows_of(mask, student_hidden=student_hidden)
    if len(teacher.ids) != len(rows_M):
        raise UsageError(f"the teacher has {len(teacher.ids)} rows, the mask {len(rows_M)}")
    return _loss_of(
        student_hidden, student_head, teacher, rows_M, ce_labels, ce_weight, temperature,
        chunk_tokens, normalizer,
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
    rows_M = _rows_of(mask, hidden=hidden)
    return _loss_of(hidden, head, None, rows_M, labels, 1.0, 1.0, chunk_tokens, normalizer)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """In which the head's products run: autocast's where it is on, else that of `hidden`."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def _rows_of(mask: Tensor, **hidden: Tensor) -> Tensor:
    """Which of the flattened rows count, (M,) int64; the only host sync on CUDA."""
    for name, tensor in hidden.items():
        if tensor.shape[:-1] != mask.shape:
            raise UsageError(
                f"{name} has rows {tuple(tensor.shape[:-1])}, the mask {tuple(mask.shape)}"
            )
    return mask.reshape(-1).nonzero().squeeze(1)


def _loss_of(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher: Teacher | None,
    rows_M: Tensor,
    labels: Tensor | None,
    ce_weight: float,
    temperature: float,
    chunk_tokens: int | None,
    normalizer: Tensor | None,
) -> LossTerms:
    if temperature <= 0:
        raise UsageError(f"temperature is {temperature}; wanted more than 0")
    labels_M = None
    if ce_weight:
        if labels is None:
            raise UsageError(f"ce_weight is {ce_weight} but there are no ce_labels")
        labels_M = labels.reshape(-1)[rows_M]
    student_MD = student_hidden.reshape(-1, student_hidden.shape[-1])[rows_M]
    if normalizer is None:
        normalizer = torch.full((), float(max(len(rows_M), 1)), device=student_MD.device)
    if chunk_tokens is None:
        chunk_tokens = chunk_rows(len(rows_M), student_head.shape[0], student_head.is_cuda)
    loss, terms_3 = _ChunkedLoss.apply(
        student_MD, student_head, teacher, labels_M, normalizer, ce_weight, temperature,
        chunk_tokens, product_dtype(student_MD), torch.is_grad_enabled(),
    )  # fmt: skip
    kl, cross_entropy, acceptance = terms_3.unbind()
    return LossTerms(loss, kl, cross_entropy, acceptance)


def chunk_rows(num_rows: int, vocab_size: int, on_cuda: bool) -> int:
    """Rows whose logits may exist at once."""
    row_bytes = 4 * vocab_size
    budget = _CUDA_BUFFER_BYTES if on_cuda else _CPU_BUFFER_BYTES
    most = max(budget // row_bytes, _MIN_CHUNK_TOKENS)
    # Small vocabularies gain nothing from many tiny chunks: 4 MiB a buffer is always allowed.
    least = max((4 << 20) // row_bytes, _MIN_CHUNK_TOKENS)
    return min(max(num_rows // _MIN_NUM_CHUNKS, least), most)


class _ChunkedLoss(torch.autograd.Function):
    """(loss, [kl, cross entropy, acceptance]); gradients of `loss` are made in the forward."""

    @staticmethod
    def forward(
        ctx, student_MD, student_head, teacher, labels_M, normalizer,
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
            for start in range(0, num_rows, chunk_tokens):
                rows = slice(start, min(start + chunk_tokens, num_rows))
                student_CD = student_MD[rows].to(compute_dtype)
                student_CV = (student_CD @ student_VD.T).float()
                grad_CV = _chunk_terms(
                    student_CV, teacher, rows, None if labels_M is None else labels_M[rows],
                    ce_weight, temperature, sums_3, with_grad,
                )  # fmt: skip
                del student_CV
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
        return grad_MD, grad_VD, *([None] * 8)


def _chunk_terms(
    student_CV: Tensor,
    teacher: Teacher | None,
    rows: slice,
    labels_C: Tensor | None,
    ce_weight: float,
    temperature: float,
    sums_3: Tensor,
    with_grad: bool,
) -> Tensor | None:
    """Add a chunk's Σ KL, Σ CE and Σ acceptance to `sums_3`; return d loss / d student logits.

    The logits are consumed (overwritten). At most five (C, V) buffers live at once.
    """
    grad_CV = None
    if labels_C is not None and (temperature != 1.0 or teacher is None):
        log_q_CV = torch.log_softmax(student_CV, dim=-1)
        _add_cross_entropy(log_q_CV, labels_C, sums_3, acceptance=teacher is None)
        if with_grad:
            grad_CV = log_q_CV.exp_().mul_(ce_weight)
            _subtract_one_hot(grad_CV, labels_C, ce_weight)
        if teacher is None:
            return grad_CV
        del log_q_CV
        labels_C = None
    assert teacher is not None
    if temperature != 1.0:
        student_CV.div_(temperature)
    log_q_CV = torch.log_softmax(student_CV, dim=-1)
    if labels_C is not None:
        _add_cross_entropy(log_q_CV, labels_C, sums_3, acceptance=False)
    log_p_CV = teacher.log_law(rows, log_q_CV)
    p_CV = log_p_CV.exp()
    q_CV = torch.exp(log_q_CV, out=student_CV)
    # Where p = 0 the term is 0 whatever the logs are (−inf − −inf is NaN).
    sums_3[0] += log_p_CV.sub_(log_q_CV).masked_fill_(p_CV == 0, 0.0).mul_(p_CV).sum()
    del log_p_CV
    sums_3[2] += teacher.overlap(rows, p_CV, q_CV)
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
