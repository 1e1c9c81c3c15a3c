"""One sequence: a batch of one row, with a streamer and with times by phase."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from stree import threads
from stree.batch import BatchDecoder, Report, Request
from stree.clock import PAUSED, PhaseClock
from stree.drafters import Drafter
from stree.errors import UsageError, naming_what_does_not_fit
from stree.generation import GenerationConfig, GenerationOutput, one_prompt
from stree.models.hybrid import HybridModel
from stree.tree import TokenTree
from stree.verifiers import Verifier
from stree_kernels import ops


class Decoder:
    """A target, optionally with a drafter and a tree, and the caches to decode one sequence.

    Args: drafter, a model or anything that fills trees (`stree.drafters.Drafter`); without one,
    decoding is autoregressive. tree, the token tree (default with a drafter: the paper's).
    max_length, the longest sequence, prompt included; beyond the target's positions it warns.
    tokenizer, needed for stop strings only. verifier, by name (`stree.verifiers.named`).
    Raises `UsageError` when target and drafter have different vocabularies, or tokenizers (by the
    fingerprints in their checkpoints' manifests).
    """

    def __init__(
        self,
        target: Any,
        drafter: HybridModel | Drafter | None = None,
        tree: TokenTree | None = None,
        *,
        max_length: int = 2048,
        tokenizer: Any = None,
        verifier: str | Verifier = "coupled",
    ) -> None:
        if drafter is None and tree is not None and tree.num_nodes > 1:
            raise UsageError(f"{tree} needs a drafter to fill it")
        if tree is not None and tree.num_nodes == 1:
            drafter = None  # a root alone leaves nothing to draft
        self.batch = BatchDecoder(
            target, drafter, tree,
            num_rows=1, max_length=max_length, tokenizer=tokenizer, verifier=verifier,
        )  # fmt: skip
        self.target, self.drafter, self.tree = target, self.batch.drafter, self.batch.tree
        self.max_length, self.tokenizer = max_length, tokenizer
        self.eos_token_ids = self.batch.eos_token_ids

    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        generation: GenerationConfig = GenerationConfig(),
        *,
        streamer: Any = None,
    ) -> GenerationOutput:
        """Generate after a prompt.

        Args: prompt_ids, at least one token, as a sequence or a tensor (T,) or (1, T);
        streamer, an object with `put(tokens)` and `end()` such as `transformers.TextStreamer`,
        ended after an error, too.
        Raises `UsageError` when it cannot fit or start, `InvariantBroken` on NaN logits,
        `OutOfMemory`.
        """
        batch = self.batch
        with ExitStack() as stack:
            if streamer is not None:
                stack.callback(streamer.end)  # whatever happens: somebody may wait for it
            prompt = one_prompt(prompt_ids)
            if streamer is not None:
                streamer.put(prompt.cpu())
            stack.enter_context(
                naming_what_does_not_fit(
                    "lower max_new_tokens, take a smaller tree, or use bfloat16 or a larger GPU",
                    f"decoding after {len(prompt)} tokens with {self.tree}",
                )
            )
            stack.enter_context(ops.current(self.target.device))
            stack.enter_context(threads.for_decoding(self.target))
            row = batch.admit(Request(prompt, generation))
            try:
                batch.prepare()
                batch.phase_clock = clock = PhaseClock(self.target.device)
                report = self._next()
                prefill_s = clock.start_decoding()
                num_calls = 0
                while True:
                    if streamer is not None:
                        streamer.put(torch.tensor(report.tokens))
                    clock.mark(PAUSED)
                    if report.finish_reason:
                        break
                    report = self._next()
                    num_calls += 1
                    clock.mark("host")
                    if report.finish_reason:
                        decode_s, time_ms = clock.stop(num_calls)
            finally:
                batch.phase_clock = None
                output = batch.release(row)
            output.stats.prefill_s = prefill_s
            if num_calls:
                output.stats.decode_s, output.stats.time_ms = decode_s, time_ms
            return output

    def _next(self) -> Report:
        (report,) = self.batch.step()  # a prompt that is read alone is read at once
        if report.error is not None:
            raise report.error
        return report


def generate(
    target: Any,
    prompt_ids: Sequence[int] | Tensor,
    generation: GenerationConfig = GenerationConfig(),
    *,
    drafter: HybridModel | Drafter | None = None,
    tree: TokenTree | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
) -> GenerationOutput:
    """Generate once; a `Decoder` does the same for many prompts without new buffers."""
    with ExitStack() as stack:
        if streamer is not None:
            stack.callback(streamer.end)
        prompt = one_prompt(prompt_ids)
        depth = tree.max_depth if tree is not None else TokenTree.paper().max_depth
        max_length = len(prompt) + generation.max_new_tokens + depth + 1
        decoder = Decoder(target, drafter, tree, max_length=max_length, tokenizer=tokenizer)
        stack.pop_all()  # from here on the decoder ends it
    return decoder.generate(prompt, generation, streamer=streamer)
