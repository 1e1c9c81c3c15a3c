"""Compute losses over a large vocabulary without holding the logits of all tokens.

Legend: B batch, T tokens, M rows (tokens that count), C rows of a chunk, V vocabulary (the head's
own tokens, for a student whose head has only some), Ds / Dt width of student and teacher.

Dense logits of teacher and student cost 2·M·V fp32 numbers; at V = 128,256 and 8,192 tokens that is
8 GiB before the first gradient. Here the rows that count are gathered first, then taken C at a
time: a chunk's logits, loss and gradients (with respect to the student's hidden rows and head) are
computed together in the forward pass and the logits are dropped. The backward pass only scales. For
any number of rows, at most five (C, V) buffers live at once; their size is stated below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stree.common.errors import UsageError
from stree.models.layers.part import product_dtype
from stree_pipelines.training.losses.divergences import Chunk, Divergence, ForwardKL, RowTerms
from stree_pipelines.training.teachers.teachers import LiveTeacher, Teacher

# Size of one (C, V) fp32 buffer. On a CPU it fits the cache. On a GPU it is as large as memory
# allows: each chunk adds to the head's gradient, which reads and writes 8·V·Ds bytes.
_CPU_BUFFER_BYTES = 8 << 20
_CUDA_BUFFER_BYTES = 512 << 20
_MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class LossTerms:
    """Terms of a loss, each a scalar: loss = divergence + ce_weight · cross_entropy.

    `loss` carries the gradient; the others are detached.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    simulated_acceptance: Tensor


@dataclass(frozen=True)
class MeasuredRows:
    """Divergence and acceptance Σ_v min(p_v, q_v) of each row, fp32 without gradient.

    Both have the shape of the mask, and 0 outside it.
    """

    divergence: Tensor
    accepted: Tensor


def live_teacher(
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    student_hidden: Tensor,
    temperature: float = 1.0,
) -> LiveTeacher:
    """Make the teacher of the rows in `mask`; no gradient flows to it.

    teacher_hidden (…, Dt) float, teacher_head (V, Dt) float, mask (…) bool. Products run in the
    dtype of `student_hidden`'s. Raises UsageError when the mask has another shape.
    """
    rows_M = _rows_of(mask, teacher_hidden=teacher_hidden)
    dtype = product_dtype(student_hidden)
    hidden_MD = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])[rows_M]
    return LiveTeacher(hidden_MD.to(dtype), teacher_head.detach().to(dtype), temperature)


def chunked_distillation_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher: Teacher,
    mask: Tensor,
    divergence: Divergence = ForwardKL(),
    ce_labels: Tensor | None = None,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    weights: Tensor | None = None,
    chunk_tokens: int | None = None,
    normalizer: Tensor | None = None,
    compiled: bool = False,
) -> LossTerms:
    """Average a student's divergence from its teacher over the tokens in `mask`, plus CE.

    loss = mean_m w_m [ D(p_m, q_m)  +  ce_weight · (−log q¹_m[label_m]) ]

    with p and q the softmax of the teacher's and the student's logits divided by the temperature
    τ, D as in divergences.py (forward KL: τ² Σ_v p_v (log p_v − log q_v)), and q¹ the student at
    τ = 1. The simulated acceptance is mean_m w_m Σ_v min(p_mv, q_mv): the chance that a token drawn
    from the student passes speculative sampling (Leviathan et al. 2023, corollary 3.6).

    When the teacher knows its top k only, D is the divergence after all tokens outside the top k
    are merged into one, hence at most the full one (data processing inequality; Cover & Thomas,
    Elements of Information Theory, section 2.8) and equal to it when k = V: the student is free to
    spread the tail as it likes. The simulated acceptance counts the top k only, so it is at most
    the full one, too.

    Args:
        student_hidden: (…, Ds) float, hidden states that predict the token of the same row.
        student_head: (V, Ds) float.
        teacher: of the rows that count, in the mask's order, at the same temperature, restricted
            (`Teacher.over`) to the tokens of the student's head.
        mask: (…) bool, the rows that count; the others are not computed at all.
        ce_labels: (…) int64, read where the mask is True; needed when `ce_weight` is not 0.
        temperature: τ > 0.
        weights: (…) fp32, not negative, w of the rows that count; None is 1 for each. Rows of
            weight 0 are not computed.
        chunk_tokens: rows per chunk; None chooses by device and vocabulary.
        normalizer: scalar to divide the sums by in place of the number of rows (the global mean
            over ranks that hold different numbers of tokens).
        compiled: compile the element-wise work of a chunk.

    Logits, softmax and sums are fp32; under autocast the matrix products run in its dtype.
    A batch without a counting row gives 0 with zero gradients. p = 0 contributes 0 to a forward KL,
    so logits of −inf on both sides are fine; p > 0 where q = 0 gives inf, as it should.

    Raises:
        UsageError: shapes that do not fit, CE without labels, a temperature that is not positive.
    """
    rows_M = _rows_of(mask, student_hidden=student_hidden)
    _require_teacher(teacher, len(rows_M), student_head)
    return _loss_of(
        student_hidden, student_head, teacher, rows_M, divergence, ce_labels, ce_weight,
        temperature, weights, chunk_tokens, normalizer, compiled,
    )


@torch.no_grad()
def measure_rows(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher: Teacher,
    mask: Tensor,
    divergence: Divergence = ForwardKL(),
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    compiled: bool = False,
) -> MeasuredRows:
    """Measure each row's divergence and acceptance by itself, without gradient.

    Arguments as for `chunked_distillation_loss`.
    """
    rows_M = _rows_of(mask, student_hidden=student_hidden)
    _require_teacher(teacher, len(rows_M), student_head)
    student_MD = student_hidden.reshape(-1, student_hidden.shape[-1])[rows_M]
    if chunk_tokens is None:
        chunk_tokens = _chunk_rows_of(teacher, student_head)
    dtype = product_dtype(student_hidden)
    compare = _compiled(_compare) if compiled else _compare
    measured = student_MD.new_zeros(2, mask.numel(), dtype=torch.float32)
    with torch.autocast(student_MD.device.type, enabled=False):
        head_VD = student_head.to(dtype)
        for start in range(0, len(rows_M), chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, len(rows_M)))
            logits_CV = (student_MD[rows].to(dtype) @ head_VD.T).float()
            accepted_C, terms, _ = compare(
                logits_CV, teacher.of(rows), divergence, temperature, with_grad=False
            )
            measured[:, rows_M[rows]] = torch.stack([terms.value, accepted_C])
    return MeasuredRows(*measured.reshape(2, *mask.shape).unbind())


def chunked_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    mask: Tensor,
    chunk_tokens: int | None = None,
    normalizer: Tensor | None = None,
    compiled: bool = False,
) -> LossTerms:
    """Average the cross-entropy to `labels` (nats) over the tokens in `mask`.

    hidden (…, D), head (V, D), labels (…) int64, mask (…) bool. The simulated acceptance is the
    mean probability of the label: Σ_v min(p, q) with p the one-hot data. Otherwise as
    `chunked_distillation_loss`.
    """
    rows_M = _rows_of(mask, hidden=hidden)
    return _loss_of(
        hidden, head, None, rows_M, None, labels, 1.0, 1.0, None, chunk_tokens, normalizer, compiled
    )


def _rows_of(mask: Tensor, **hidden: Tensor) -> Tensor:
    """Return the indices of the flattened rows that count, (M,) int64; a host sync on CUDA."""
    for name, tensor in hidden.items():
        if tensor.shape[:-1] != mask.shape:
            raise UsageError(
                f"{name} has rows {tuple(tensor.shape[:-1])}, the mask {tuple(mask.shape)}"
            )
    return mask.reshape(-1).nonzero().squeeze(1)


def _require_teacher(teacher: Teacher, num_rows: int, student_head: Tensor) -> None:
    if len(teacher) != num_rows:
        raise UsageError(f"the teacher has {len(teacher)} rows, the mask {num_rows}")
    if isinstance(teacher, LiveTeacher):
        num_tokens = len(teacher.head if teacher.ids is None else teacher.ids)
        if num_tokens != len(student_head):
            raise UsageError(
                f"the teacher's head has {num_tokens} tokens, the student's "
                f"{len(student_head)}; a drafter needs its target's vocabulary"
            )


@dataclass(frozen=True)
class _Settings:
    divergence: Divergence | None  # None where there is no teacher
    ce_weight: float
    temperature: float
    chunk_tokens: int
    dtype: torch.dtype  # of the matrix products
    is_compiled: bool


def _loss_of(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher: Teacher | None,
    rows_M: Tensor,
    divergence: Divergence | None,
    labels: Tensor | None,
    ce_weight: float,
    temperature: float,
    weights: Tensor | None,
    chunk_tokens: int | None,
    normalizer: Tensor | None,
    compiled: bool,
) -> LossTerms:
    if temperature <= 0:
        raise UsageError(f"temperature is {temperature}; wanted more than 0")
    if ce_weight and labels is None:
        raise UsageError(f"ce_weight is {ce_weight} but there are no ce_labels")
    if normalizer is None:
        normalizer = torch.full((), float(max(len(rows_M), 1)), device=student_hidden.device)
    weights_M = None
    if weights is not None:
        weights_M = weights.reshape(-1)[rows_M]
        kept = weights_M.nonzero().squeeze(1)
        rows_M, weights_M = rows_M[kept], weights_M[kept]
        teacher = None if teacher is None else teacher.of(kept)
    labels_M = labels.reshape(-1)[rows_M] if ce_weight and labels is not None else None
    student_MD = student_hidden.reshape(-1, student_hidden.shape[-1])[rows_M]
    if chunk_tokens is None:
        chunk_tokens = _chunk_rows_of(teacher, student_head)
    settings = _Settings(
        divergence, ce_weight, temperature, chunk_tokens, product_dtype(student_MD), compiled
    )
    loss, terms_3 = _ChunkedLoss.apply(
        student_MD, student_head, teacher, labels_M, weights_M, normalizer, settings,
        torch.is_grad_enabled(),
    )
    return LossTerms(loss, *terms_3.unbind())


def _chunk_rows_of(teacher: Teacher | None, student_head: Tensor) -> int:
    """Choose the rows of a chunk by the wider head: a live teacher's logits span its vocabulary."""
    wider = teacher.head if isinstance(teacher, LiveTeacher) else student_head
    return chunk_rows(len(wider), student_head.is_cuda)


def chunk_rows(vocab_size: int, on_cuda: bool) -> int:
    """Return the number of rows whose logits may exist at once."""
    budget = _CUDA_BUFFER_BYTES if on_cuda else _CPU_BUFFER_BYTES
    return max(budget // (4 * vocab_size), _MIN_CHUNK_TOKENS)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and [divergence, cross entropy, acceptance]; the forward makes the gradients."""

    @staticmethod
    def forward(
        ctx, student_MD, student_head, teacher, labels_M, weights_M, normalizer, settings, with_grad
    ):
        needs_hidden = with_grad and ctx.needs_input_grad[0]
        needs_head = with_grad and ctx.needs_input_grad[1]
        num_rows, dtype = student_MD.shape[0], settings.dtype
        chunk_terms = _compiled(_chunk_terms) if settings.is_compiled else _chunk_terms
        sums_3 = student_MD.new_zeros(3, dtype=torch.float32)
        grad_MD = torch.zeros_like(student_MD) if needs_hidden else None
        grad_VD = torch.zeros_like(student_head, dtype=torch.float32) if needs_head else None
        with torch.autocast(student_MD.device.type, enabled=False):
            student_VD = student_head.to(dtype)
            for start in range(0, num_rows, settings.chunk_tokens):
                rows = slice(start, min(start + settings.chunk_tokens, num_rows))
                student_CD = student_MD[rows].to(dtype)
                grad_CV, chunk_sums_3 = chunk_terms(
                    student_CD, None if teacher is None else teacher.of(rows),
                    None if labels_M is None else labels_M[rows],
                    None if weights_M is None else weights_M[rows], student_VD, settings, with_grad,
                )
                sums_3 += chunk_sums_3
                if grad_MD is not None:
                    grad_MD[rows] = grad_CV @ student_VD
                if grad_CV is not None and grad_VD is not None:
                    _add_product(grad_VD, grad_CV.T, student_CD)
                del grad_CV
        terms_3 = sums_3 / normalizer
        ctx.grads = (grad_MD, grad_VD)
        ctx.normalizer = normalizer
        ctx.head_dtype = student_head.dtype
        ctx.mark_non_differentiable(terms_3)
        return terms_3[0] + settings.ce_weight * terms_3[1], terms_3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_terms):
        # In place: a second pair of gradients would double the memory this file is about.
        grad_MD, grad_VD = ctx.grads
        ctx.grads = None
        scale = grad_loss / ctx.normalizer
        if grad_MD is not None:
            grad_MD.mul_(scale)
        if grad_VD is not None:
            grad_VD = grad_VD.mul_(scale).to(ctx.head_dtype)
        return grad_MD, grad_VD, *([None] * 6)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a chunk's element-wise work: dozens of passes over (C, V) become a few.

    One graph serves any number of rows, so a chunk's numbers do not depend on earlier chunks.
    """
    compiled = _compile(function)

    def of_chunk(student_C: Tensor, teacher: Teacher | None, *others: Any, **options: Any) -> Any:
        rows = [student_C, *(() if teacher is None else teacher.parts)]
        rows += [other for other in others if isinstance(other, Tensor) and other.ndim == 1]
        for each in rows:
            if len(each) > 1:  # a single row has a graph of its own
                torch._dynamo.mark_dynamic(each, 0)
        return compiled(student_C, teacher, *others, **options)

    return of_chunk


_compile = functools.cache(torch.compile)


def _chunk_terms(
    student_CD: Tensor,
    teacher: Teacher | None,
    labels_C: Tensor | None,
    weights_C: Tensor | None,
    head_VD: Tensor,
    settings: _Settings,
    with_grad: bool,
) -> tuple[Tensor | None, Tensor]:
    """Compute a chunk's gradient and its sums of divergence, CE and acceptance (3,).

    The gradient d sums / d student logits (C, V) has the dtype of the products. At most five (C, V)
    buffers live at once.
    """
    logits_CV = (student_CD @ head_VD.T).float()
    divergence = cross_entropy = accepted = torch.zeros((), device=logits_CV.device)
    grad_CV = log_q_CV = None
    if teacher is not None:
        assert settings.divergence is not None
        accepted_C, terms, log_q_CV = _compare(
            logits_CV, teacher, settings.divergence, settings.temperature, with_grad
        )
        divergence = _total(terms.value, weights_C)
        accepted = _total(accepted_C, weights_C)
        grad_CV = terms.gradient
        if grad_CV is not None and settings.temperature != 1.0:
            grad_CV.div_(settings.temperature)
        if settings.temperature != 1.0 and labels_C is not None:
            # The logits once more, up to a constant in each row.
            log_q_CV = torch.log_softmax(log_q_CV.mul_(settings.temperature), dim=-1)
    elif labels_C is not None:
        log_q_CV = torch.log_softmax(logits_CV, dim=-1)
    if labels_C is not None:
        assert log_q_CV is not None
        picked_C = log_q_CV.gather(1, labels_C[:, None]).squeeze(1)
        cross_entropy = -_total(picked_C, weights_C)
        if teacher is None:
            accepted = _total(picked_C.exp(), weights_C)
        if with_grad:
            ce_grad_CV = log_q_CV.exp_().mul_(settings.ce_weight)
            grad_CV = ce_grad_CV if grad_CV is None else grad_CV.add_(ce_grad_CV)
            _subtract_one_hot(grad_CV, labels_C, settings.ce_weight)
    if grad_CV is not None:
        if weights_C is not None:
            grad_CV.mul_(weights_C[:, None])
        grad_CV = grad_CV.to(settings.dtype)
    return grad_CV, torch.stack([divergence, cross_entropy, accepted])


def _compare(
    logits_CV: Tensor,
    teacher: Teacher,
    divergence: Divergence,
    temperature: float,
    with_grad: bool,
) -> tuple[Tensor, RowTerms, Tensor]:
    """Compare a chunk of student logits with the teacher; overwrites the logits.

    Returns acceptance (C,), the divergence with its gradient with respect to the logits divided by
    the temperature, and log q (C, V).
    """
    if temperature != 1.0:
        logits_CV.div_(temperature)
    log_q_CV = torch.log_softmax(logits_CV, dim=-1)
    log_p_CV = teacher.log_distribution(log_q_CV)
    p_CV = log_p_CV.exp()
    q_CV = torch.exp(log_q_CV, out=logits_CV)
    accepted_C = teacher.overlap(p_CV, q_CV)
    inside_C = p_CV.sum(1) if teacher.is_partial else None
    chunk = Chunk(log_p_CV, log_q_CV, p_CV, q_CV, accepted_C, temperature, inside_C)
    return accepted_C, divergence(chunk, with_grad), log_q_CV


def _add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """Add left @ right to total in place, summed in fp32 for operands of any dtype."""
    if left_VC.is_cuda and left_VC.dtype != torch.float32:
        torch.addmm(total_VD, left_VC, right_CD, out_dtype=torch.float32, out=total_VD)
    else:  # products of 16 bits that sum in 32 are there on GPUs only
        total_VD.addmm_(left_VC.float(), right_CD.float())


def _total(values_C: Tensor, weights_C: Tensor | None) -> Tensor:
    return values_C.sum() if weights_C is None else (values_C * weights_C).sum()


def _subtract_one_hot(grad_CV: Tensor, labels_C: Tensor, weight: float) -> None:
    grad_CV.scatter_add_(
        1, labels_C[:, None], torch.full_like(labels_C[:, None], -weight, dtype=grad_CV.dtype)
    )
