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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stree.common.errors import UsageError
from stree.models.layers.part import product_dtype
from stree_pipelines.training.losses.divergences import Chunk, Divergence, ForwardKL, RowTerms
from stree_pipelines.training.parallel.host_memory import to_device
from stree_pipelines.training.teachers.teacher import Teacher

# Size of one (C, V) fp32 buffer. On a CPU it fits the cache. On a GPU it is as large as memory
# allows: each chunk adds to the head's gradient, which reads and writes 8·V·Ds bytes.
_CPU_BUFFER_BYTES = 8 << 20
_CUDA_BUFFER_BYTES = 512 << 20
_MIN_CHUNK_TOKENS = 16


@dataclass(frozen=True)
class LossSpec:
    """Settings of a loss over a vocabulary.

    Args:
        divergence: from the teacher; None leaves the cross-entropy alone.
        ce_weight: weight of the cross-entropy to the labels.
        temperature: τ > 0, of teacher and student in the divergence.
        chunk_tokens: rows whose logits exist at once; None chooses by device and vocabulary.
        compiled: compile the element-wise work of a chunk.
    """

    divergence: Divergence | None = field(default_factory=ForwardKL)
    ce_weight: float = 0.0
    temperature: float = 1.0
    chunk_tokens: int | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UsageError(f"temperature is {self.temperature}; wanted more than 0")


@dataclass(frozen=True)
class LossTerms:
    """Terms of a loss, each a scalar: loss = divergence + ce_weight · cross_entropy.

    `loss` carries the gradient; the others are detached.
    """

    loss: Tensor
    divergence: Tensor
    cross_entropy: Tensor
    simulated_acceptance: Tensor
    spec: LossSpec

    def logged(self) -> dict[str, Tensor]:
        """Return the terms that a training logs, by their columns in metrics.csv."""
        values = {"loss": self.loss.detach()}
        if self.spec.divergence is not None:
            values["simulated_acceptance"] = self.simulated_acceptance
            if self.spec.ce_weight:
                values |= {"divergence": self.divergence, "cross_entropy": self.cross_entropy}
        return values


def teacher_of(
    teacher_hidden: Tensor, teacher_head: Tensor, rows_M: Tensor, student_hidden: Tensor,
    temperature: float = 1.0,
) -> Teacher:
    """Make the teacher of the rows that count; no gradient flows to it.

    teacher_hidden (…, Dt) float, teacher_head (V, Dt) float, rows_M (M,) int64 of `counted_rows`.
    Products run in the dtype of `student_hidden`'s. Raises UsageError when the student has other
    rows.
    """
    if teacher_hidden.shape[:-1] != student_hidden.shape[:-1]:
        raise UsageError(
            f"the teacher has hidden states of rows {tuple(teacher_hidden.shape[:-1])}, the "
            f"student of {tuple(student_hidden.shape[:-1])}: give both the same tokens"
        )
    dtype = product_dtype(student_hidden)
    hidden_MD = teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])[rows_M]
    return Teacher(hidden_MD.to(dtype), teacher_head.detach().to(dtype), temperature)


def chunked_loss(
    student_hidden: Tensor, student_head: Tensor, teacher: Teacher | None, rows_M: Tensor,
    spec: LossSpec, labels: Tensor | None = None, normalizer: Tensor | None = None,
) -> LossTerms:
    """Average a student's divergence from its teacher over the rows that count, plus CE.

    loss = mean_m [ D(p_m, q_m)  +  ce_weight · (−log q¹_m[label_m]) ]

    with p and q the softmax of the teacher's and the student's logits divided by the temperature
    τ, D as in divergences.py (forward KL: τ² Σ_v p_v (log p_v − log q_v)), and q¹ the student at
    τ = 1. The simulated acceptance is mean_m Σ_v min(p_mv, q_mv): the chance that a token drawn
    from the student passes speculative sampling (Leviathan et al. 2023, corollary 3.6). Without a
    teacher the loss is CE alone, and p the one-hot data.

    Args:
        student_hidden: (…, Ds) float, hidden states that predict the token of the same row.
        student_head: (V, Ds) float.
        teacher: of the same rows in the same order, at the same temperature, restricted
            (`Teacher.over`) to the tokens of the student's head; None with a `spec` that has no
            divergence.
        rows_M: (M,) int64, the rows that count (`counted_rows`); the others are not computed at
            all.
        labels: (…) int64, read at these rows; needed when `spec.ce_weight` is not 0.
        normalizer: scalar to divide the sums by in place of the number of rows (the global mean
            over ranks that hold different numbers of tokens).

    Logits, softmax and sums are fp32; under autocast the matrix products run in its dtype.
    A batch without a counting row gives 0 with zero gradients. p = 0 contributes 0 to a forward KL,
    so logits of −inf on both sides are fine; p > 0 where q = 0 gives inf, as it should.

    Raises:
        UsageError: shapes that do not fit, CE without labels.
    """
    if teacher is not None and len(teacher) != len(rows_M):
        raise UsageError(f"the teacher has {len(teacher)} rows, the student {len(rows_M)}")
    if teacher is not None and teacher.num_tokens != len(student_head):
        raise UsageError(
            f"the teacher's head has {teacher.num_tokens} tokens, the student's "
            f"{len(student_head)}; a drafter needs its target's vocabulary"
        )
    if spec.ce_weight and labels is None:
        raise UsageError(f"ce_weight is {spec.ce_weight} but there are no labels")
    if normalizer is None:
        normalizer = torch.full((), float(max(len(rows_M), 1)), device=student_hidden.device)
    labels_M = labels.reshape(-1)[rows_M] if spec.ce_weight and labels is not None else None
    student_MD = student_hidden.reshape(-1, student_hidden.shape[-1])[rows_M]
    loss, terms_3 = _ChunkedLoss.apply(
        student_MD, student_head, teacher, labels_M, normalizer, spec, torch.is_grad_enabled()
    )
    divergence, cross_entropy, accepted = terms_3.unbind()
    return LossTerms(loss, divergence, cross_entropy, accepted, spec)


def counted_rows(mask: Tensor, hidden: Tensor) -> Tensor:
    """Return the indices (M,) int64 of the flattened rows that count, on the device of `hidden`.

    mask (…) bool, hidden (…, D). The host counts the rows of a mask that lies on the CPU; a mask on
    a GPU costs a host sync. Raises UsageError when the mask has another shape.
    """
    if hidden.shape[:-1] != mask.shape:
        raise UsageError(
            f"the hidden states have rows {tuple(hidden.shape[:-1])}, the mask {tuple(mask.shape)}"
        )
    return to_device(mask.reshape(-1).nonzero().squeeze(1), hidden.device)


def chunk_rows(vocab_size: int, on_cuda: bool) -> int:
    """Return the number of rows whose logits may exist at once."""
    budget = _CUDA_BUFFER_BYTES if on_cuda else _CPU_BUFFER_BYTES
    return max(budget // (4 * vocab_size), _MIN_CHUNK_TOKENS)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and [divergence, cross entropy, acceptance]; the forward makes the gradients."""

    @staticmethod
    def forward(ctx, student_MD, student_head, teacher, labels_M, normalizer, spec, with_grad):
        needs_hidden = with_grad and ctx.needs_input_grad[0]
        needs_head = with_grad and ctx.needs_input_grad[1]
        num_rows, dtype = student_MD.shape[0], product_dtype(student_MD)
        # A teacher's logits span its own vocabulary, which may be the wider one.
        wider = student_head if teacher is None else teacher.head
        chunk_tokens = spec.chunk_tokens or chunk_rows(len(wider), student_head.is_cuda)
        chunk_terms = _compiled(_chunk_terms) if spec.compiled else _chunk_terms
        sums_3 = student_MD.new_zeros(3, dtype=torch.float32)
        grad_MD = torch.zeros_like(student_MD) if needs_hidden else None
        grad_VD = torch.zeros_like(student_head, dtype=torch.float32) if needs_head else None
        with torch.autocast(student_MD.device.type, enabled=False):
            student_VD = student_head.to(dtype)
            for start in range(0, num_rows, chunk_tokens):
                rows = slice(start, min(start + chunk_tokens, num_rows))
                student_CD = student_MD[rows].to(dtype)
                grad_CV, chunk_sums_3 = chunk_terms(
                    student_CD, None if teacher is None else teacher.of(rows),
                    None if labels_M is None else labels_M[rows], student_VD, spec, with_grad,
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
        return terms_3[0] + spec.ce_weight * terms_3[1], terms_3

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
        return grad_MD, grad_VD, *([None] * 5)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a chunk's element-wise work: dozens of passes over (C, V) become a few.

    One graph serves any number of rows, so a chunk's numbers do not depend on earlier chunks.
    """
    compiled = _compile(function)

    def of_chunk(
        student_CD: Tensor, teacher: Teacher | None, labels_C: Tensor | None, *others: Any
    ) -> Any:
        rows = [student_CD, None if teacher is None else teacher.hidden, labels_C]
        for each in rows:
            if each is not None and len(each) > 1:  # a single row has a graph of its own
                torch._dynamo.mark_dynamic(each, 0)
        return compiled(student_CD, teacher, labels_C, *others)

    return of_chunk


_compile = functools.cache(torch.compile)


def _chunk_terms(
    student_CD: Tensor, teacher: Teacher | None, labels_C: Tensor | None, head_VD: Tensor,
    spec: LossSpec, with_grad: bool,
) -> tuple[Tensor | None, Tensor]:
    """Compute a chunk's gradient and its sums of divergence, CE and acceptance (3,).

    The gradient d sums / d student logits (C, V) has the dtype of the products. At most five (C, V)
    buffers live at once.
    """
    logits_CV = (student_CD @ head_VD.T).float()
    divergence = cross_entropy = accepted = torch.zeros((), device=logits_CV.device)
    grad_CV = log_q_CV = None
    if teacher is not None:
        accepted_C, terms, log_q_CV = _compare(logits_CV, teacher, spec, with_grad)
        divergence, accepted = terms.value.sum(), accepted_C.sum()
        grad_CV = terms.gradient
        if grad_CV is not None and spec.temperature != 1.0:
            grad_CV.div_(spec.temperature)
        if spec.temperature != 1.0 and labels_C is not None:
            # The logits once more, up to a constant in each row.
            log_q_CV = torch.log_softmax(log_q_CV.mul_(spec.temperature), dim=-1)
    elif labels_C is not None:
        log_q_CV = torch.log_softmax(logits_CV, dim=-1)
    if labels_C is not None:
        assert log_q_CV is not None
        picked_C = log_q_CV.gather(1, labels_C[:, None]).squeeze(1)
        cross_entropy = -picked_C.sum()
        if teacher is None:
            accepted = picked_C.exp().sum()
        if with_grad:
            ce_grad_CV = log_q_CV.exp_().mul_(spec.ce_weight)
            grad_CV = ce_grad_CV if grad_CV is None else grad_CV.add_(ce_grad_CV)
            places = labels_C[:, None]
            one_hot = torch.full_like(places, -spec.ce_weight, dtype=grad_CV.dtype)
            grad_CV.scatter_add_(1, places, one_hot)
    if grad_CV is not None:
        grad_CV = grad_CV.to(head_VD.dtype)
    return grad_CV, torch.stack([divergence, cross_entropy, accepted])


def _compare(
    logits_CV: Tensor, teacher: Teacher, spec: LossSpec, with_grad: bool
) -> tuple[Tensor, RowTerms, Tensor]:
    """Compare a chunk of student logits with the teacher; overwrites the logits.

    Returns acceptance (C,), the divergence with its gradient with respect to the logits divided by
    the temperature, and log q (C, V).
    """
    assert spec.divergence is not None
    if spec.temperature != 1.0:
        logits_CV.div_(spec.temperature)
    log_q_CV = torch.log_softmax(logits_CV, dim=-1)
    log_p_CV = teacher.log_distribution()
    p_CV = log_p_CV.exp()
    q_CV = torch.exp(log_q_CV, out=logits_CV)
    accepted_C = torch.minimum(p_CV, q_CV).sum(1)
    inside_C = None if teacher.ids is None else p_CV.sum(1)
    chunk = Chunk(log_p_CV, log_q_CV, p_CV, q_CV, accepted_C, spec.temperature, inside_C)
    return accepted_C, spec.divergence(chunk, with_grad), log_q_CV


def _add_product(total_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    """Add left @ right to total in place, summed in fp32 for operands of any dtype."""
    if left_VC.is_cuda and left_VC.dtype != torch.float32:
        torch.addmm(total_VD, left_VC, right_CD, out_dtype=torch.float32, out=total_VD)
    else:  # products of 16 bits that sum in 32 are there on GPUs only
        total_VD.addmm_(left_VC.float(), right_CD.float())
