"""Turn prompts, in all forms that tokenizers and users of `transformers` have, into token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stree.checkpoints.tokenizer import refusing_panics
from stree.common.errors import BadData, UsageError

_WANTED = "wanted token ids: of one sequence, as a list or a tensor, or of several"
# Arguments of transformers' `apply_chat_template` that are no variables of a template
_SET_HERE = {"conversation", "add_generation_prompt", "continue_final_message", "tokenize",
             "padding", "truncation", "max_length", "return_tensors", "return_dict",
             "return_assistant_tokens_mask", "sanitize_control_tokens",
             "tokenizer_kwargs"}
_OF_TOKENIZER = {"input_ids", "attention_mask", "token_type_ids"}  # keys of its output by default


class EncodedPrompt(NamedTuple):
    """The ids of a text, or of a conversation up to where the assistant's next turn begins.

    messages_end: Number of the ids that are the conversation's messages, without the opening of
    the assistant's turn; None for a text.
    """

    ids: list[int]
    messages_end: int | None = None


def one_list_of_ids(inputs: Any) -> list[int]:
    """Return the token ids of one sequence, in any form that `prompts_of` takes."""
    if isinstance(inputs, list | tuple) and _are_tokens(inputs):
        return list(inputs)
    return one_prompt(inputs).tolist()


def one_prompt(inputs: Any) -> Tensor:
    """Return the token ids (T,) of one sequence, in any form that `prompts_of` takes."""
    prompts, _ = prompts_of(inputs)
    if len(prompts) != 1:
        raise UsageError(f"got {len(prompts)} prompts, wanted one: make a request of each")
    return prompts[0]


def prompts_of(
    inputs: Any, attention_mask: Any = None, pad_token_id: int | None = None
) -> tuple[list[Tensor], bool]:
    """Return the token ids (T,) of each prompt without padding, and whether they came as several.

    An empty list is one prompt of no tokens; a tensor (0, T) is no prompts.

    Args:
        inputs: Ids of one sequence (a list, an array or tensor (T,) or (1, T)) or of several (a
            list of such, a tensor (B, T)); or a tokenizer's output (a mapping with `input_ids`).
        attention_mask: Of the same shape, 0 where a prompt is padded, left or right; None for no
            padding.
        pad_token_id: Without a mask, rows of a tensor that begin or end with it are refused.

    Raises:
        UsageError: For other inputs.
    """
    if isinstance(inputs, Mapping):
        inputs, attention_mask = _of_tokenizer(inputs, attention_mask)
    is_matrix = getattr(inputs, "ndim", 0) == 2
    listed = isinstance(inputs, list | tuple) and _has_several(inputs)
    rows = list(inputs) if listed or is_matrix else [inputs]
    if attention_mask is not None:
        masks = _masks(attention_mask, len(rows))
        prompts = [_unpadded(_ids(row), mask) for row, mask in zip(rows, masks, strict=True)]
    else:
        prompts = [one_prompt(row) if isinstance(row, Mapping) else _ids(row) for row in rows]
        for prompt in prompts if is_matrix and len(rows) > 1 else ():
            if len(prompt) and pad_token_id in (int(prompt[0]), int(prompt[-1])):
                raise UsageError(
                    f"a prompt begins or ends with the padding token ({pad_token_id}), and there "
                    "is no attention_mask: pass the tokenizer's, too"
                )
    return prompts, listed or len(rows) != 1


def text_ids(tokenizer: Any, text: Any) -> list[int]:
    """Return a text's ids, with the special tokens that its tokenizer adds."""
    if not isinstance(text, str):
        raise UsageError(f"got {_named(text)}, wanted a text, or a list of texts")
    with refusing_panics():
        try:
            return tokenizer(text).input_ids
        except (TypeError, ValueError) as error:  # halves of a surrogate pair
            raise UsageError(f"the text {text!r:.60} cannot be encoded: {error}") from error


def text_prompt(tokenizer: Any, text: Any) -> EncodedPrompt:
    """Encode a text as `text_ids` does."""
    return EncodedPrompt(text_ids(tokenizer, text))


def chat_prompt(tokenizer: Any, messages: Any, **variables: Any) -> EncodedPrompt:
    """Encode a conversation up to where the assistant's next turn begins.

    The ids are those of training (`chat_encoding`): no message can spell a control token. But a
    template that prints the date has today's, where training has a fixed one.

    Args:
        tokenizer: With a chat template.
        messages: A text (one question), or mappings with `role` and `content`: a text, or parts of
            `{"type": "text", "text": …}`. A turn of the assistant may have `tool_calls` alone.
        **variables: Variables of the template (`tools`, `documents`, `enable_thinking`, …), and
            another `chat_template`; None is left out.

    Raises:
        UsageError: When there is no template, it refuses the messages, or it does not read a
            variable.
    """
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        raise UsageError(
            f"got {_named(messages)}, wanted messages: "
            '[{"role": "user", "content": "…"}, …], or a list of such'
        )
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the tokenizer has no chat template: decoder.complete(text) goes without")
    from stree.chat_encoding import chat_encoder  # imports transformers

    given = {name: value for name, value in variables.items() if value is not None}
    template, own = given.pop("chat_template", None), tokenizer.chat_template
    if template is None and isinstance(own, Mapping) and given.get("tools"):
        template = own.get("tool_use")  # by this name `transformers` takes it, too
    try:
        encoder = chat_encoder(tokenizer, template, today=True)
        _require_read(encoder.renderer.template, given)
        if any(map(_has_parts, messages)) and not _reads_parts(encoder, messages, given):
            messages = [_with_text(each) for each in messages]
        return EncodedPrompt(*encoder.encode_chat_prompt(messages, **given))
    except BadData as error:
        raise UsageError(str(error)) from error


def is_several_chats(messages: Any) -> bool:
    """Return True for a list of conversations (texts, or lists of messages), False for one."""
    return isinstance(messages, list | tuple) and any(
        isinstance(each, list | tuple | str) for each in messages
    )


def _is_message(given: Any) -> bool:
    has_turn = isinstance(given, Mapping) and not given.keys().isdisjoint(("content", "tool_calls"))
    return has_turn and "role" in given


def _has_parts(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("content"), list | tuple)


def _reads_parts(encoder: Any, messages: Sequence[Any], variables: Mapping[str, Any]) -> bool:
    """Return whether a template reads content parts, instead of failing or printing the list."""
    try:
        text = encoder.prompt_text(messages, **variables)
    except BadData:
        return False
    parts = (part for each in messages if _has_parts(each) for part in each["content"])
    return not any(str(part) in text for part in parts)


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose text parts are joined. Raises `UsageError` for other parts."""
    if not _has_parts(message):
        return message
    for part in message["content"]:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise UsageError(
                f"a message's content has {_named(part)}, wanted parts "
                '{"type": "text", "text": "…"}: the chat template reads no others'
            )
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def _require_read(template: str, variables: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a variable that the template does not read, or that we set."""
    for name in variables:
        if name in _SET_HERE:
            raise UsageError(
                f"chat cannot honour {name}: it encodes all messages, up to where the assistant's "
                "next turn begins; decoder.generate(ids) takes other prompts"
            )
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise UsageError(
                f"the chat template does not read {name}: leave it out, or use a chat_template "
                "that does"
            )


def _of_tokenizer(inputs: Mapping[str, Any], attention_mask: Any) -> tuple[Any, Any]:
    """Return the ids of a tokenizer's output, and its mask unless another is given."""
    unknown = sorted(str(key) for key in inputs.keys() - _OF_TOKENIZER)
    if "input_ids" not in inputs or unknown:
        given = f"a mapping of {', '.join(map(str, inputs))}" if inputs else "an empty mapping"
        chat = ": decoder.chat(messages) takes conversations" if "role" in inputs else ""
        raise UsageError(f"the prompt is {given}, wanted input_ids and attention_mask{chat}")
    if attention_mask is None:
        attention_mask = inputs.get("attention_mask")
    return inputs["input_ids"], attention_mask


def _is_encoding(value: Any) -> bool:
    """Return whether a value is the output of a tokenizer (`transformers` or `tokenizers`)."""
    return isinstance(value, Mapping) or hasattr(value, "ids")


def _has_several(items: Sequence[Any]) -> bool:
    """Return whether any item of a list is a prompt, not a token; texts are refused later."""
    return not _are_tokens(items) and any(map(_is_several_ids, items))


def _are_tokens(items: Sequence[Any]) -> bool:
    """Return whether all items of a list are ints, as in most prompts; False if there are none."""
    return set(map(type, items)) == {int}


def _is_several_ids(value: Any) -> bool:
    """Return whether an item of a list is a prompt, not a token."""
    one_of_many = isinstance(value, list | tuple | range | str) or _is_encoding(value)
    return one_of_many or getattr(value, "ndim", 0) > 0


def _ids(given: Any) -> Tensor:
    """Return ids in a list, an array or a tensor as a tensor (T,)."""
    given = given.ids if hasattr(given, "ids") else given
    if isinstance(given, str):
        raise UsageError(
            f"the prompt is text ({given!r:.60}), {_WANTED}; decoder.complete(text) takes texts"
        )
    try:
        ids = torch.as_tensor(list(given) if isinstance(given, range) else given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UsageError(f"the prompt is {_named(given)}, {_WANTED}") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    no_ids = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if ids.ndim != 1 or (no_ids and len(ids)):
        raise UsageError(
            f"the prompt is a {ids.dtype} tensor of shape {tuple(ids.shape)}, {_WANTED}"
        )
    return ids.long()


def _masks(given: Any, count: int) -> list[Any]:
    """Return the mask of each prompt."""
    is_one = isinstance(given, list | tuple) and not _has_several(given)
    masks = [given] if is_one or getattr(given, "ndim", 0) == 1 else given
    if not hasattr(masks, "__len__") or len(masks) != count:
        raise UsageError(
            f"attention_mask is {_named(given)}, wanted a row for each prompt ({count})"
        )
    return list(masks)


def _unpadded(ids: Tensor, given: Any) -> Tensor:
    """Return the ids where the mask is not 0."""
    try:
        mask = torch.as_tensor(given, device=ids.device) != 0
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"attention_mask is {_named(given)}, wanted 0s and 1s") from None
    if mask.shape != ids.shape:
        raise UsageError(
            f"attention_mask has shape {tuple(mask.shape)} for a prompt of {len(ids)} tokens"
        )
    kept = mask.nonzero()[:, 0]
    if len(kept) and int(kept[-1] - kept[0]) + 1 != len(kept):
        raise UsageError("attention_mask has a 0 between two 1s, wanted padding at an end only")
    return ids[kept]


def _named(value: Any) -> str:
    return f"a {type(value).__name__} ({value!r:.60})"
