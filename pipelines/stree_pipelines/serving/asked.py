"""Turn bodies of requests into the engine's requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stree.batching.sequences import Request
from stree.chat_templates import resolve_template
from stree.common.errors import UsageError
from stree.generation import GenerationConfig
from stree.prompts import EncodedPrompt, chat_prompt, text_prompt
from stree.trees.token_tree import PLAIN, StepTree, as_tree
from stree_pipelines.serving.grammar import AskedGrammar, Grammars
from stree_pipelines.serving.messages import Facts
from stree_pipelines.serving.schemas import Body, ChatBody, CompletionBody
from stree_pipelines.serving.segments import Marks

_NAME = re.compile(r"[a-z]+(-\d+)*")  # of a tree; a path is none
_LAST = 24  # tokens of a prompt's end in which a template may open a thought


@dataclass
class Asked:
    """Request that one prompt asks for.

    Attributes:
        prompt: Its token ids.
        request: For one or several answers.
        grammar: The answers' form; None for any.
        marks: What divides the answers' text.
        prompt_end: The prompt's last text, special tokens included.
        tools: That may be called.
        wants_none: Whether no token is wanted but the prompt's log-probabilities.
        wants_drafts: Whether the text of each token is wanted, and whether it was a draft.
    """

    prompt: list[int]
    request: Request
    grammar: AskedGrammar | None
    marks: Marks
    prompt_end: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    wants_none: bool = False
    wants_drafts: bool = False


class Asker:
    """Makes requests for a decoder of bodies.

    Args:
        facts: Of the engine's decoder.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, self.tokenizer = facts, facts.tokenizer

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the tokenizer."""
        return Grammars(self.facts)

    def of_chat(self, body: ChatBody) -> list[Asked]:
        """Return what a conversation asks for. Raises `UsageError`."""
        body.require_known()
        if body.echo:
            raise UsageError("echo is not served for a conversation: leave it out")
        tools = None if body.tool_choice == "none" else body.tools or None
        variables = {
            "tools": tools, "documents": body.documents, "reasoning_effort": body.reasoning_effort,
            **body.chat_template_kwargs,
        }
        if "chat_template" in variables:  # it could run for ever, or be a file's name
            raise UsageError("chat_template is the server's: leave it out")
        messages = [_with_parsed_arguments(each) for each in body.messages]
        prompt = chat_prompt(self.tokenizer, messages, **variables)
        marks = Marks.of(resolve_template(self.tokenizer), tools is not None)
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return [self._asked(body, prompt, most, marks, tools or ())]

    def of_completion(self, body: CompletionBody) -> list[Asked]:
        """Return what each prompt asks for. Raises `UsageError`."""
        body.require_known()
        if body.suffix:
            raise UsageError("suffix is not served: these models go on after a text")
        most = 16 if body.max_tokens is None else body.max_tokens
        given: Sequence[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if isinstance(body.prompt, list) and all(isinstance(each, int) for each in body.prompt):
            given = [body.prompt]
        prompts = [
            text_prompt(self.tokenizer, each) if isinstance(each, str) else EncodedPrompt([*each])
            for each in given
        ]
        return [self._asked(body, each, most, Marks()) for each in prompts]

    def _asked(
        self, body: Body, prompt: EncodedPrompt, most: int | None, marks: Marks,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Asked:
        facts, ids = self.facts, prompt.ids
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        if most is None:
            most = max(1, facts.max_length - len(ids) - facts.tree_depth - 1)
        if most == 0 and not body.echo:
            raise UsageError("max_tokens is 0, wanted at least 1: 0 goes with echo alone")
        generation = self._generation(body, max(1, most))
        request = Request(
            ids, generation, self._tree(body.speculation), True, prompt.messages_end
        )
        last = [each for each in ids[-_LAST:] if 0 <= each < facts.vocabulary]
        end = self.tokenizer.decode(last, skip_special_tokens=False)
        grammar = self._grammar(body)
        asked = None if grammar is None else AskedGrammar(
            grammar, len(ids), self._end_of_thought(end, marks)
        )
        return Asked(
            ids, request, asked, marks, end, tools, most == 0, body.return_drafts
        )

    def _generation(self, body: Body, most: int) -> GenerationConfig:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        ids = [each for each in stops if isinstance(each, int)] + body.stop_token_ids
        ends = [*self.facts.eos_token_ids, *ids] if ids and not body.ignore_eos else ids
        try:
            bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        except ValueError:
            raise UsageError(
                f"logit_bias is {body.logit_bias!r:.60}, wanted numbers by token ids"
            ) from None
        num_logprobs = body.num_logprobs if isinstance(body, ChatBody | CompletionBody) else None
        return GenerationConfig(
            most, body.temperature, max(body.top_k, 0), body.top_p,
            eos_token_id=ends or None,
            stop_strings=tuple(each for each in stops if isinstance(each, str)),
            seed=body.seed, ignore_eos=body.ignore_eos and not ids, min_p=body.min_p,
            repetition_penalty=body.repetition_penalty, num_return_sequences=body.n,
            logprobs=num_logprobs, presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty, logit_bias=bias,
            min_new_tokens=body.min_tokens,
        ).without_unread()

    def _tree(self, speculation: bool | str) -> StepTree | None:
        if speculation is True:
            return None
        if speculation is False:
            return PLAIN if self.facts.has_drafter else None
        if not _NAME.fullmatch(speculation):
            raise UsageError(
                f"speculation is {speculation!r:.60}, wanted true, false or a tree's name, such as "
                "chain-3 or paper"
            )
        return as_tree(speculation)

    def _grammar(self, body: Body) -> str | None:
        form = body.response_format
        if body.guided_regex is not None:
            if form is not None and form.type != "text":
                raise UsageError("response_format and guided_regex: wanted one form of the answer")
            return self.grammars.of_regex(body.guided_regex)
        if form is None or form.type == "text":
            return None
        if form.type == "json_schema" and form.json_schema is None:
            raise UsageError('response_format "json_schema" needs a json_schema with a schema')
        schema = form.json_schema.schema_ if form.json_schema is not None else {"type": "object"}
        return self.grammars.of_schema(schema)

    def _end_of_thought(self, prompt_end: str, marks: Marks) -> int | None:
        """Return the token that ends the thought which the prompt has opened; None for none."""
        if (end := marks.end_of_opened(prompt_end)) is None:
            return None
        ids = self.tokenizer.encode(end, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, as templates read them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError:
                raise UsageError(
                    f"the arguments of a tool's call are no JSON: {function['arguments']!r:.60}"
                ) from None
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return {**message, "tool_calls": parsed, "content": message.get("content") or ""}
