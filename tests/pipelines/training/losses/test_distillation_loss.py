"""The chunked losses equal dense twins and stay in their memory (kinds: test_divergences.py).

Tolerances: fp32 sums over V terms in another order differ by about 1e-6 relative; 1e-5 is the
bound that the pipeline promises. Memory is counted, not timed: a dispatch mode adds up the storage
of every tensor that is alive.
"""

from __future__ import annotations

import functools
from functools import partial

import pytest
import torch
from lanes import quick_first
from loss_cases import distillation_loss, make_case, peak_bytes, target_loss

from stree.common.errors import UsageError
from stree_pipelines.resources.estimates import LOSS_BUFFERS
from stree_pipelines.training.losses import distillation_loss as losses
from stree_pipelines.training.losses.distillation_loss import (
    LossSpec,
    chunk_rows,
    chunked_loss,
    counted_rows,
)
from stree_pipelines.training.losses.divergences import LK, ForwardKL
from stree_pipelines.training.teachers.teacher import Teacher

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def dense_loss(student_hidden, student_head, teacher_hidden, teacher_head, mask):
    """Return the forward KL of the docstring, all logits at once."""
    log_q = torch.log_softmax((student_hidden[mask] @ student_head.T).float(), -1)
    log_p = torch.log_softmax((teacher_hidden[mask] @ teacher_head.T).float(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def test_a_teacher_of_other_rows_is_refused():
    case, _ = make_case()
    teacher = Teacher(case.pop("teacher_hidden")[case["mask"]], case.pop("teacher_head"))
    case["mask"] = torch.ones_like(case["mask"])
    with pytest.raises(UsageError, match=r"the teacher has \d+ rows, the student 63"):
        distillation_loss(**case, teacher=teacher)


@pytest.mark.parametrize("chunk_tokens", [5, None])
def test_cross_entropy_equals_the_dense_one(chunk_tokens):
    case, labels = make_case()
    hidden, head, mask = case["student_hidden"], case["student_head"], case["mask"]
    spec = LossSpec(None, ce_weight=1.0, chunk_tokens=chunk_tokens)
    terms = chunked_loss(hidden, head, None, counted_rows(mask, hidden), spec, labels)
    logits = hidden[mask] @ head.T
    loss = torch.nn.functional.cross_entropy(logits, labels[mask])
    torch.testing.assert_close(terms.loss, loss, rtol=1e-5, atol=1e-6)
    label_probability = logits.softmax(-1).gather(1, labels[mask][:, None]).mean()
    torch.testing.assert_close(terms.simulated_acceptance, label_probability)
    for got, want in zip(
        torch.autograd.grad(terms.loss, (hidden, head)),
        torch.autograd.grad(loss, (hidden, head)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_tied_head_and_hidden_add_their_gradients():
    """A tied embedding gets gradients from the head and from the input through hidden."""
    case, labels = make_case()
    embedding = case["student_head"]
    hidden = embedding[labels]
    rest = {k: v for k, v in case.items() if not k.startswith("student")}
    terms = target_loss(hidden, embedding, **rest, chunk_tokens=4)
    (got,) = torch.autograd.grad(terms.loss, embedding)
    loss = dense_loss(embedding[labels], embedding, **rest)
    torch.testing.assert_close(got, torch.autograd.grad(loss, embedding)[0], rtol=1e-5, atol=1e-6)


def test_nothing_to_count_gives_zero_and_not_nan():
    case, labels = make_case()
    case["mask"] = torch.zeros_like(case["mask"])
    terms = target_loss(**case, labels=labels, ce_weight=0.5)
    terms.loss.backward()
    for value in (terms.loss, terms.divergence, terms.cross_entropy, terms.simulated_acceptance):
        assert value == 0
    assert not case["student_hidden"].grad.any()
    assert not case["student_head"].grad.any()


def test_rows_outside_the_mask_do_not_count_even_when_they_are_nan():
    case, labels = make_case()
    clean = target_loss(**case).loss
    mask = case["mask"]
    case["student_hidden"] = (
        case["student_hidden"].detach().masked_fill(~mask[..., None], torch.nan)
    )
    case["teacher_hidden"] = case["teacher_hidden"].masked_fill(~mask[..., None], torch.nan)
    labels = labels.masked_fill(~mask, -100)
    assert target_loss(**case, labels=labels).loss == clean


def test_minus_infinity_on_both_sides_is_masked():
    """Padded ids have weights so negative that both logits overflow to −inf."""
    case, _ = make_case(student_width=20)
    for side in ("student", "teacher"):
        hidden, head = (case[f"{side}_{part}"].detach().clone() for part in ("hidden", "head"))
        hidden[..., 0] = 10.0
        head[-5:] = 0.0
        head[-5:, 0] = -1e38
        case[f"{side}_hidden"], case[f"{side}_head"] = hidden, head
    assert (case["teacher_hidden"] @ case["teacher_head"].T)[..., -1].isneginf().all()
    case["student_hidden"].requires_grad_()
    terms = target_loss(**case)
    kept = dict(case, **{k: case[k][:-5] for k in ("student_head", "teacher_head")})
    torch.testing.assert_close(terms.loss, target_loss(**kept).loss)
    terms.loss.backward()
    assert case["student_hidden"].grad.isfinite().all()


def test_a_student_that_rules_out_what_the_teacher_says_has_infinite_loss():
    case, _ = make_case(student_width=20)
    hidden, head = (case[f"student_{part}"].detach().clone() for part in ("hidden", "head"))
    hidden[..., 0], head[-5:, 0] = 10.0, -1e38
    case.update(student_hidden=hidden, student_head=head)
    assert target_loss(**case).loss == torch.inf


def test_products_in_bf16_are_summed_in_fp32():
    """A chunk's number of rows changes nothing. Logits are multiples of 1/4, so none is rounded."""
    case, _ = make_case((1, 200), vocab=64)
    case = {
        name: (each * 2).round().clamp(-1, 1) / 2 if each.is_floating_point() else each
        for name, each in case.items()
    }
    case = {name: each.detach().to(DEVICE) for name, each in case.items()}
    leaves = case["student_hidden"].requires_grad_(), case["student_head"].requires_grad_()
    grads = []
    for chunk_tokens in (1, 1000):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = target_loss(**case, chunk_tokens=chunk_tokens).loss
        grads.append(torch.autograd.grad(loss, leaves))
    for mine, whole in zip(*grads, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("backend", "divergence", "options"),
    quick_first(
        [("aot_eager", ForwardKL(), {}), ("aot_eager", LK(3.0), {})],
        [
            ("inductor", LK(3.0), {}),
            ("inductor", ForwardKL(), {"temperature": 2.0}),
            ("inductor", ForwardKL(), {"ce_weight": 0.3}),
        ],
    ),
)
def test_a_compiled_loss_is_the_same(backend, divergence, options, monkeypatch):
    """One graph serves any number of rows but one, which the last chunk has here."""
    monkeypatch.setattr(
        losses, "_compile", functools.cache(partial(torch.compile, backend=backend))
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case, labels = make_case()
    on_device = {name: each.detach().to(DEVICE) for name, each in case.items()}
    leaves = [on_device[f"student_{part}"].requires_grad_() for part in ("hidden", "head")]
    options = {**options, "labels": labels.to(DEVICE), "divergence": divergence}
    rows, got = int(case["mask"].sum()), []
    for chunk_tokens, compiled in ((rows - 1, False), (rows - 1, True), (7, True)):
        terms = target_loss(**on_device, chunk_tokens=chunk_tokens, compiled=compiled, **options)
        grads = torch.autograd.grad(terms.loss * 3.0, leaves)
        got.append((terms.loss, terms.simulated_acceptance, *grads))
    for mine in got[1:]:
        for one, other in zip(mine, got[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.costly
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_cross_entropy_is_the_same(backend, monkeypatch):
    monkeypatch.setattr(
        losses, "_compile", functools.cache(partial(torch.compile, backend=backend))
    )
    torch._dynamo.reset()
    case, labels = make_case()
    hidden, head = (case[f"student_{part}"].detach().to(DEVICE) for part in ("hidden", "head"))
    leaves, got = (hidden.requires_grad_(), head.requires_grad_()), []
    for compiled in (False, True):
        spec = LossSpec(None, ce_weight=1.0, chunk_tokens=7, compiled=compiled)
        rows = counted_rows(case["mask"], hidden)
        terms = chunked_loss(*leaves, None, rows, spec, labels.to(DEVICE))
        got.append((terms.loss, *torch.autograd.grad(terms.loss, leaves)))
    for one, other in zip(*got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_validation_makes_no_gradients():
    case, _ = make_case()
    with torch.no_grad():
        terms = target_loss(**case)
    assert not terms.loss.requires_grad


def test_normalizer_replaces_the_number_of_rows():
    case, _ = make_case()
    half = target_loss(**case, normalizer=2.0 * case["mask"].sum()).loss
    torch.testing.assert_close(half * 2, target_loss(**case).loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"ce_weight": 1.0}, "no labels"),
        ({"teacher_head": torch.zeros(96, 20)}, "vocabulary"),
        ({"mask": torch.ones(3, 20, dtype=torch.bool)}, "mask"),
        ({"student_hidden": torch.zeros(3, 22, 12)}, "same tokens"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case, _ = make_case()
    with pytest.raises(UsageError, match=message):
        target_loss(**{**case, **change})


@pytest.mark.parametrize(("on_cuda", "most_bytes"), [(False, 40 << 20), (True, 5 << 29)])
@pytest.mark.parametrize("vocab", [300, 16_384, 128_256])
def test_a_chunk_takes_no_more_than_the_documents_say(on_cuda, most_bytes, vocab):
    """docs/losses.md says 2.5 GiB on a GPU and 40 MiB on a CPU, where 16 rows may take more."""
    rows = chunk_rows(vocab, on_cuda)
    assert rows >= 16
    assert rows == 16 or most_bytes / 2 < LOSS_BUFFERS * 4 * rows * vocab <= most_bytes


def test_peak_memory_is_under_a_fifth_of_the_two_logit_tensors():
    num_tokens, vocab = 512, 128_256
    case, _ = make_case((1, num_tokens), vocab, student_width=16, teacher_width=24)
    case["mask"] = torch.ones_like(case["mask"])
    two_logits = 2 * num_tokens * vocab * 4
    assert peak_bytes(lambda: target_loss(**case).loss.backward()) < two_logits / 5


def test_the_memory_counter_sees_dense_logits():
    """The instrument works: the dense loss on a small case needs more than its two logits."""
    case, _ = make_case((1, 256), 2048)
    case["mask"] = torch.ones_like(case["mask"])
    two_logits = 2 * 256 * 2048 * 4
    assert peak_bytes(lambda: dense_loss(**case).backward()) > two_logits
