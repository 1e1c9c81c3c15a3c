"""Decode one sequence: a batch of one row, with a streamer and with times by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any, Unpack, overload

from stree.common.threads import for_decoding

import torch
from torch import Tensor

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request, samples_of
from stree.common.clock import PAUSED, PhaseClock
from stree.common.errors import UsageError, naming_what_does_not_fit
from stree.common.words import described, ends_of, placed
from stree.drafters import Drafter, DrafterSpec
from stree.generation import (
    ChatOptions,
    CompleteOptions,
    GenerateOptions,
    GenerationConfig,
    GenerationOptions,
    GenerationOutput,
    PromptOptions,
    TargetOptions,
)
from stree.models.model import HybridModel
from stree.prompts import chat_prompt, is_several_chats, one_prompt, text_prompt
from stree.settings import Asked, asked_for, asked_of_texts, end_of
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.policy import TreePolicy
from stree.tree_policy.step_times import StepTimes
from stree.trees.token_tree import StepTree, TokenTree
from stree.verifiers import Verifier


class Decoder:
    """Decoder of one sequence: a target, optionally a drafter and a tree, and their caches.

    Several threads may call it: each answer waits for the end of the one before.

    Args:
        target: A `HybridModel`.
        drafter: A model, n-grams or anything that fills trees (`stree.drafters.Drafter`); None
            decodes without drafts.
        tree: The token tree, or `AdaptiveTrees`, whose step times are measured first
            (`measure_step_times`). None is the paper's tree with a drafter, else the root alone.
        max_length: Tokens of the longest sequence, prompt included; none goes beyond the target's
            positions.
        tokenizer: Encodes texts and chats, and finds stop strings; None takes token ids only.
        verifier: A name (`stree.verifiers.named`), or a verifier of your own.
        backtracking: "replay" or "joint", as in `BatchDecoder`.
        num_prefixes: Prefixes to keep, two a generation: the prompt with its answer, and the
            prompt alone (of a chat its messages, without the opening of the assistant's turn). A
            conversation's next turn then does not read them again, even if the template drops
            thoughts from the history. Each has the memory of a state and its keys; 0 keeps none.

    Raises:
        UsageError: When target and drafter have different vocabularies, or different tokenizers by
            the hashes in their checkpoints' manifests.

    Example:
        >>> import stree
        >>> sizes = dict(attn_layers=(0,), num_heads=2, num_kv_heads=1, head_dim=8)
        >>> target = stree.HybridModel(stree.HybridConfig(64, d_model=16, num_layers=1, **sizes))
        >>> decoder = stree.Decoder(target, max_length=32)
        >>> len(decoder.generate([1, 2, 3], max_new_tokens=4).tokens)
        4
    """

    def __init__(
        self, target: Any, drafter: HybridModel | DrafterSpec | Drafter | None = None,
        tree: StepTree | TreePolicy | str | None = None, *, max_length: int = 2048,
        tokenizer: Any = None, verifier: str | Verifier = "coupled", backtracking: str = "replay",
        num_prefixes: int = 0,
    ) -> None:
        tree = None if tree is None else as_tree_policy(tree)
        if tree is not None and tree.largest.num_nodes == 1:
            drafter = None  # a root alone leaves nothing to draft
        self.batch = BatchDecoder(
            target, drafter, tree,
            num_rows=1, max_length=max_length, tokenizer=tokenizer, verifier=verifier,
            backtracking=backtracking, num_prefixes=num_prefixes,
        )
        self.target, self.drafter, self.tree = target, self.batch.drafter, self.batch.tree
        self.max_length, self.tokenizer = max_length, tokenizer
        self.eos_token_ids = self.batch.eos_token_ids

    def __repr__(self) -> str:
        models = described(self.target, self.drafter, self.batch.tree_policy)
        ends = ends_of(self.eos_token_ids)
        return f"Decoder({models}, max_length {self.max_length}, {ends}, {placed(self.target)})"

    @overload
    def generate(
        self, inputs: Sequence[int], generation_config: Any = None, *,
        num_return_sequences: None = None, **options: Unpack[GenerateOptions],
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self, inputs: Sequence[Sequence[int] | Tensor | Mapping[str, Any]],
        generation_config: Any = None, *, num_return_sequences: None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerationOutput]: ...

    @overload
    def generate(
        self, inputs: Any = None, generation_config: Any = None, *,
        num_return_sequences: int, **options: Unpack[GenerateOptions],
    ) -> list[GenerationOutput]: ...

    @overload
    def generate(
        self, inputs: Any = None, generation_config: Any = None, *,
        num_return_sequences: None = None, **options: Unpack[GenerateOptions],
    ) -> GenerationOutput | list[GenerationOutput]: ...

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *,
        attention_mask: Any = None, streamer: Any = None, **options: Unpack[PromptOptions],
    ) -> GenerationOutput | list[GenerationOutput]:
        """Generate after a prompt, or after several, one after the other.

        Args:
            inputs: The ids of at least one token as a list, an array or tensor (T,) or (1, T), or
                what a tokenizer returns (`input_ids`, `attention_mask`). Several prompts are a list
                of those, or a tensor (B, T) that is padded, left or right, with its attention_mask.
            generation_config: Ours or `transformers`'.
            attention_mask: 0 where `inputs` are padded.
            streamer: For one prompt: an object with `put(tokens)` and `end()`, such as
                `transformers.TextStreamer`. It is ended after an error, too.
            **options: Fields of either config, as well as do_sample and max_length. They win over
                generation_config.

        Returns:
            A `GenerationOutput`; a list of them for several prompts, and with
            `num_return_sequences`, whose answers to a prompt follow one another.

        Raises:
            UsageError: When the prompt does not fit, and for what cannot be honoured (num_beams,
                no_repeat_ngram_size, …).
            InvariantBroken: On NaN logits.
            OutOfMemory: When the caches do not fit.
        """

        return self._serve(
            streamer, asked_for, inputs, generation_config, attention_mask, options
        )

    @overload
    def complete(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, text: str, generation_config: Any = None, *,
        num_return_sequences: None = None, **options: Unpack[CompleteOptions],
    ) -> GenerationOutput: ...

    @overload
    def complete(
        self, text: Sequence[str], generation_config: Any = None, *,
        num_return_sequences: None = None, **options: Unpack[CompleteOptions],
    ) -> list[GenerationOutput]: ...

    @overload
    def complete(
        self, text: str | Sequence[str], generation_config: Any = None, *,
        num_return_sequences: int, **options: Unpack[CompleteOptions],
    ) -> list[GenerationOutput]: ...

    def complete(
        self, text: str | Sequence[str], generation_config: Any = None, *,
        streamer: Any = None, **options: Unpack[GenerationOptions],
    ) -> GenerationOutput | list[GenerationOutput]:
        """Continue a text, or each text of a list, as `generate` continues tokens.

        Raises `UsageError` without a tokenizer. Other arguments, results and errors are those of
        `generate`.
        """
        several = isinstance(text, list | tuple)
        return self._serve(
            streamer, asked_of_texts, text_prompt, text, several, generation_config, options
        )

    @overload
    def chat(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, messages: str | Sequence[Mapping[str, Any]], generation_config: Any = None, *,
        num_return_sequences: None = None, **options: Unpack[ChatOptions],
    ) -> GenerationOutput: ...

    @overload
    def chat(
        self, messages: Sequence[str | Sequence[Mapping[str, Any]]], generation_config: Any = None,
        *, num_return_sequences: None = None, **options: Unpack[ChatOptions],
    ) -> list[GenerationOutput]: ...

    @overload
    def chat(
        self, messages: Any, generation_config: Any = None, *,
        num_return_sequences: int, **options: Unpack[ChatOptions],
    ) -> list[GenerationOutput]: ...

    def chat(
        self, messages: str | Sequence[Any], generation_config: Any = None, *,
        streamer: Any = None, tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None, enable_thinking: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, **options: Unpack[GenerationOptions],
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answer a conversation in the form of the tokenizer's chat template, or several.

        Args:
            messages: `[{"role": "user", "content": "…"}]`, whose contents may be text parts; a list
                of such conversations; or a text, which is one question.
            generation_config: As in `generate`.
            streamer: As in `generate`.
            tools: Functions or JSON schemas, for the template.
            documents: Mappings, for the template.
            enable_thinking: For templates that read it.
            chat_template_kwargs: Other variables of the template, and another `chat_template`.
            **options: As in `generate`.

        Returns:
            As `generate`.

        Raises:
            UsageError: As `generate`, and for what the template does not read or refuses.
        """
        variables = dict(tools=tools, documents=documents, enable_thinking=enable_thinking)
        encode = partial(chat_prompt, **{**variables, **(chat_template_kwargs or {})})
        several = is_several_chats(messages)
        return self._serve(
            streamer, asked_of_texts, encode, messages, several, generation_config, options
        )

    def _serve(
        self, streamer: Any, read: Callable[..., Asked], *given: Any
    ) -> GenerationOutput | list[GenerationOutput]:
        """Answer the requests that `read(*given, tokenizer)` finds in a call's arguments."""
        with ExitStack() as stack:
            if streamer is not None:
                stack.callback(end_of(streamer))  # whatever happens: somebody may wait for it
            asked, several = read(*given, self.tokenizer)
            requests = [
                sample
                for prompt, config, end in asked
                for sample in samples_of(Request(prompt, config, None, True, end))
            ]
            if streamer is not None and len(requests) > 1:
                raise UsageError(
                    f"asked for {len(requests)} answers: a streamer shows one answer at a time"
                )
            outputs = [self._generate(request, streamer) for request in requests]
        return outputs if several or len(outputs) > 1 else outputs[0]

    def _generate(self, request: Request, streamer: Any) -> GenerationOutput:
        batch, prompt = self.batch, one_prompt(request.prompt_ids)
        if streamer is not None:
            streamer.put(prompt.cpu())
        with ExitStack() as stack:
            stack.enter_context(
                naming_what_does_not_fit(
                    "lower max_new_tokens, take a smaller tree, or use bfloat16 or a larger GPU",
                    f"decoding after {len(prompt)} tokens with {self.tree}",
                )
            )
            stack.enter_context(for_decoding(self.target))
            stack.enter_context(batch.lock)  # another thread's answer waits for this one's end
            stack.callback(setattr, batch.worker, "clock", None)
            reports = stack.enter_context(closing(batch.serve([request], self._start_clock)))
            for num_calls, served in enumerate(reports):
                clock, report = batch.worker.clock, served.report
                assert clock is not None
                if num_calls == 0 and report.error is None:  # a prompt is read alone, so at once
                    prefill_s = clock.start_decoding()
                elif report.finish_reason and report.error is None:
                    decode_s, time_ms = clock.stop(num_calls)
                if streamer is not None and report.error is None:
                    clock.mark("host")
                    streamer.put(torch.tensor(report.tokens))
                    clock.mark(PAUSED)
            output = served.release()
            output.stats.prefill_s = prefill_s
            if num_calls:
                output.stats.decode_s, output.stats.time_ms = decode_s, time_ms
            return output

    def _start_clock(self, row: int) -> None:
        """Begin to time the answer of a row that was admitted, graphs left out."""
        self.batch.prepare()
        self.batch.worker.clock = PhaseClock(self.target.device)

    def measure_step_times(
        self, context: int | None = None, num_steps: int = 8,
        generation: GenerationConfig = GenerationConfig(),
    ) -> StepTimes:
        """Time steps with each tree that may be chosen (`BatchDecoder.measure_step_times`)."""
        return self.batch.measure_step_times(context, num_steps, generation=generation)

    def forget(self) -> None:
        """Let the tree policy begin anew (`BatchDecoder.forget`)."""
        self.batch.forget()

    def forgetting(self) -> AbstractContextManager[None]:
        """Let the tree policy learn nothing inside (`BatchDecoder.forgetting`)."""
        return self.batch.forgetting()

    def num_reusable(self, prompt: list[int]) -> int:
        """Return the number of a prompt's tokens that would not be read again now."""
        return self.batch.num_reusable(prompt)


@overload
def generate(
    target: Any, inputs: Sequence[int], generation_config: Any = None, *,
    num_return_sequences: None = None, **options: Unpack[TargetOptions],
) -> GenerationOutput: ...


@overload
def generate(
    target: Any, inputs: Sequence[Sequence[int] | Tensor | Mapping[str, Any]],
    generation_config: Any = None, *, num_return_sequences: None = None,
    **options: Unpack[TargetOptions],
) -> list[GenerationOutput]: ...


@overload
def generate(
    target: Any, inputs: Any, generation_config: Any = None, *,
    num_return_sequences: int, **options: Unpack[TargetOptions],
) -> list[GenerationOutput]: ...


@overload
def generate(
    target: Any, inputs: Any, generation_config: Any = None, *,
    num_return_sequences: None = None, **options: Unpack[TargetOptions],
) -> GenerationOutput | list[GenerationOutput]: ...


def generate(
    target: Any, inputs: Any, generation_config: Any = None, *,
    drafter: HybridModel | DrafterSpec | Drafter | None = None, tree: StepTree | None = None,
    attention_mask: Any = None, tokenizer: Any = None, streamer: Any = None,
    **options: Unpack[PromptOptions],
) -> GenerationOutput | list[GenerationOutput]:
    """Generate once, as `Decoder.generate`; a `Decoder` does it again without new buffers."""
    with ExitStack() as stack:
        if streamer is not None:
            stack.callback(end_of(streamer))
        read = asked_for(inputs, generation_config, attention_mask, options, tokenizer)
        depth = tree.max_depth if tree is not None else TokenTree.paper().max_depth
        if not read[0]:
            return []
        longest = max(len(prompt) + config.max_new_tokens for prompt, config, _ in read[0])
        decoder = Decoder(
            target, drafter, tree, max_length=longest + depth + 1, tokenizer=tokenizer
        )
        stack.pop_all()  # from here on the decoder ends it
    return decoder._serve(streamer, lambda tokenizer: read)
