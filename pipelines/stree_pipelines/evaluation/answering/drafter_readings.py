"""Let target and drafter predict the data's own answer to a prompt, token by token.

It tells a target that fails at a length from a drafter that does (docs/long-context.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from stree.chat_encoding import chat_encoder
from stree.engine.worker import FEATURES_CHUNK
from stree.models.hidden_states import HiddenStateTap
from stree.models.model import HybridModel
from stree_kernels import ops
from stree_pipelines.evaluation.answering.decoders import Decoders
from stree_pipelines.evaluation.benchmarks import BenchmarkPrompt
from stree_pipelines.evaluation.plan import DrafterIdentity
from stree_pipelines.evaluation.records import Reading, ReadingKey

MAX_ANSWER_TOKENS = 512  # of an answer: the logits of all of them are in memory at once


class Agreement(NamedTuple):
    """Agreement of a drafter with its target on an answer's tokens, each field a sum over them.

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
        """Compare log-probabilities (A, V) of both models for the answer's tokens (A,)."""
        overlap = torch.minimum(target.exp(), drafter.exp()).sum(-1)
        same = target.argmax(-1) == drafter.argmax(-1)
        return cls(loss_of(drafter, answer), float(overlap.double().sum()), int(same.sum()))


@torch.no_grad()
def read_answer(
    decoders: Decoders, drafter: DrafterIdentity | None, prompt: BenchmarkPrompt, key: ReadingKey
) -> Reading:
    """Read a prompt's `reference_answer` with an evaluation's models.

    Without a drafting model of the target's vocabulary only the target reads.
    """
    target, model = decoders.target, decoders.drafter_model(drafter)
    encoder = chat_encoder(decoders.tokenizer, decoders.settings.chat_template)
    turns = [*prompt.history, ("user", prompt.turns[0])]
    whole = encoder.encode([*turns, ("assistant", prompt.reference_answer)])[-1].tokens.tolist()
    start = len(encoder.encode_prompt(turns))
    question = start - len(encoder.encode_prompt(turns[-1:]))
    tokens = torch.tensor(whole[: start + MAX_ANSWER_TOKENS], device=decoders.device)
    answer = tokens[start:]
    after, begun = None, None
    with ops.current(target.device):
        hidden, inputs = target_hidden(target, model, tokens, start)
        log_probs = target.logits(hidden).log_softmax(-1)
        if model is not None:
            after = Agreement.of(
                log_probs, drafter_log_probs(model, tokens, inputs, 0, start), answer
            )
            begun = Agreement.of(
                log_probs, drafter_log_probs(model, tokens, inputs, question, start), answer
            )
    return Reading(
        **key._asdict(), num_prompt_tokens=start, num_tokens=len(answer),
        target_loss=loss_of(log_probs, answer),
        drafter_loss=None if after is None or math.isinf(after.loss) else after.loss,
        overlap=after and after.overlap, same_choice=after and after.same_choice,
        overlap_begun_anew=begun and begun.overlap,
    )


def loss_of(log_probs: Tensor, answer: Tensor) -> float:
    """Sum the loss in nats of the answer's tokens (A,) under log_probs (A, V)."""
    return -float(log_probs.gather(-1, answer[:, None]).double().sum())


def target_hidden(
    target: HybridModel, drafter: HybridModel | None, tokens: Tensor, start: int
) -> tuple[Tensor, Tensor | None]:
    """Return the target's hidden states (A, D) that predict the tokens (T,) from `start` on.

    The second tensor, (1, T, D'), is added to the drafter's embeddings of all tokens; None when it
    reads tokens alone. Read in pieces: what stays in memory for all tokens has the drafter's width.
    """
    layers = drafter.config.feature_layers if drafter is not None else ()
    cache = target.new_cache(len(tokens), 1)
    following: list[Tensor] = []
    for begin, end in _pieces(len(tokens), start - 1):
        features = HiddenStateTap((*layers, target.config.num_layers - 1))
        target.prefill(tokens[None, begin:end], cache, features=features)
        streams = features.values
        if drafter is not None and layers:
            read = streams[..., : drafter.config.feature_width].contiguous()
            following.append(drafter.model.features.of_tokens(read))
    hidden = target.model.norm(streams[0, :-1, -target.config.d_model :].contiguous())
    # Each token reads the feature of the one before it
    return hidden, torch.cat(following, 1).roll(1, dims=1) if following else None


def drafter_log_probs(
    drafter: HybridModel, tokens: Tensor, inputs: Tensor | None, begin: int, start: int
) -> Tensor:
    """Return the drafter's log-probabilities (A, V) of the tokens (T,) from `start` on.

    The drafter reads from `begin` on only.
    """
    if inputs is not None and drafter.model.features.skips_first:
        begin += 1
        inputs = inputs[:, begin:]
    elif inputs is not None:
        inputs = inputs[:, begin:].clone()
        inputs[:, 0] = drafter.model.features.unknown
    cache = drafter.new_cache(len(tokens) - begin, 1)
    features = HiddenStateTap((drafter.config.num_layers - 1,))
    drafter.prefill(tokens[None, begin:], cache, features=features, inputs=inputs)
    stream = features.values[0, start - 1 - begin : -1]
    return drafter.logits(drafter.model.norm(stream)).log_softmax(-1)


def _pieces(length: int, last: int) -> list[tuple[int, int]]:
    """Cut `length` tokens into short pieces; the last one begins at `last`."""
    begins = [*range(0, last, FEATURES_CHUNK), last]
    return list(zip(begins, [*begins[1:], length], strict=True))
