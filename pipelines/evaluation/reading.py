"""What target and drafter say of the data's own answer to a prompt, token by token as it stands
there: tells a target that fails at a length from a drafter that does (docs/long-context.md)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stree.models.features import Features
from stree.models.hybrid import HybridModel
from stree.prefill import FEATURES_CHUNK
from stree_pipelines.data.chat import chat_encoder
from stree_pipelines.evaluation.benchmarks import BenchmarkPrompt
from stree_pipelines.evaluation.plan import Drafter
from stree_pipelines.evaluation.records import Reading, ReadingKey

MOST_TOKENS = 512  # of an answer: the logits of all of them are in memory at once


class Agreement(NamedTuple):
    """Of a drafter with its target on an answer's tokens, each a sum over them.

    Attributes:
        loss: the drafter's own on the data, in nats.
        overlap: Σ min(p, q), the chance that a single draft is accepted at T = 1.
        same_choice: tokens whose most likely successor is the same.
    """

    loss: float
    overlap: float
    same_choice: int

    @classmethod
    def of(cls, target: Tensor, drafter: Tensor, answer: Tensor) -> Agreement:
        """Given log-probabilities (A, V) of both ahead of the answer's tokens (A,)."""
        overlap = torch.minimum(target.exp(), drafter.exp()).sum(-1)
        same = target.argmax(-1) == drafter.argmax(-1)
        return cls(loss_of(drafter, answer), float(overlap.double().sum()), int(same.sum()))


@torch.no_grad()
def read_answer(
    answerer: Any, drafter: Drafter | None, prompt: BenchmarkPrompt, key: ReadingKey
) -> Reading:
    """The reading of a prompt's `reference_answer`, by an evaluation's models; by the target alone
    where no model of its vocabulary drafts."""
    model = answerer.drafter_model(drafter)
    encoder = chat_encoder(answerer.tokenizer, answerer.settings.chat_template)
    asked = [*prompt.history, ("user", prompt.turns[0])]
    whole = encoder.encode([[*asked, ("assistant", prompt.reference_answer)]])[0].tokens.tolist()
    start = len(encoder.encode_prompt(asked))
    question = start - len(encoder.encode_prompt(asked[-1:]))
    tokens = torch.tensor(whole[: start + MOST_TOKENS], device=answerer.device)
    answer = tokens[start:]
    layers = model.config.feature_layers if model is not None else ()
    stream, features = _target_read(answerer.target, tokens, start, layers, model)
    target = answerer.target.logits(stream).log_softmax(-1)
    after, begun = None, None
    if model is not None:
        after = Agreement.of(target, _law(model, tokens, features, 0, start), answer)
        begun = Agreement.of(target, _law(model, tokens, features, question, start), answer)
    return Reading(
        **key._asdict(),
        num_prompt_tokens=start,
        num_tokens=len(answer),
        target_loss=loss_of(target, answer),
        drafter_loss=None if after is None or after.loss == float("inf") else after.loss,
        overlap=after and after.overlap,
        same_choice=after and after.same_choice,
        overlap_begun_anew=begun and begun.overlap,
    )


def loss_of(log_probs: Tensor, answer: Tensor) -> float:
    """In nats, summed: log_probs (A, V) ahead of the answer's tokens (A,)."""
    return -float(log_probs.gather(-1, answer[:, None]).double().sum())


def _target_read(
    target: HybridModel, tokens: Tensor, start: int, layers: tuple[int, ...],
    drafter: HybridModel | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Hidden states (A, D) from which the tokens (T,) from `start` on are predicted, and what the
    drafter reads of all tokens (1, T, D'), each at the one after it; None where it reads nothing.
    In pieces: what is in memory for all tokens is of the drafter's width."""
    cache = target.new_cache(len(tokens), 1)
    read = []
    for begin, end in _pieces(len(tokens), start - 1):
        features = Features((*layers, target.config.num_layers - 1))
        target.prefill(tokens[None, begin:end], cache, features=features)
        streams = features.values
        if layers and drafter is not None:
            reader = drafter.model.features
            read.append(reader.of_tokens(streams[..., : drafter.config.feature_width]))
    width = target.config.d_model
    last = streams[0, :-1, -width:]
    return target.model.norm(last), torch.cat(read, 1).roll(1, dims=1) if read else None


def _law(
    drafter: HybridModel, tokens: Tensor, features: Tensor | None, begin: int, start: int
) -> Tensor:
    """The drafter's log-probabilities (A, V) of the tokens (T,) from `start` on, when it reads from
    `begin` on only."""
    inputs = None
    if features is not None:
        inputs = features[:, begin:].clone()
        inputs[:, 0] = drafter.model.features.unknown.detach()
    cache = drafter.new_cache(len(tokens) - begin, 1)
    read = Features((drafter.config.num_layers - 1,))
    drafter.prefill(tokens[None, begin:], cache, features=read, inputs=inputs)
    stream = read.values[0, start - 1 - begin : -1]
    return drafter.logits(drafter.model.norm(stream)).log_softmax(-1)


def _pieces(length: int, last: int) -> list[tuple[int, int]]:
    """Of so many tokens, none too long, one of which begins at `last` and is the last."""
    begins = [*range(0, last, FEATURES_CHUNK), last]
    return list(zip(begins, [*begins[1:], length], strict=True))
