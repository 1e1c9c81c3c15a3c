"""Encode conversations as training samples, and count those that the chat template refuses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from stree.chat_encoding import ChatEncoder, EncodedChat, Message
from stree.chat_templates import THOUGHT_END, THOUGHT_KEYS, THOUGHT_START
from stree.common.errors import BadData
from stree_pipelines.data.conversations import Conversation, ReadReport

CHUNK = 1024  # conversations encoded together
REFUSED = "refused by the chat template"
THOUGHTS_UNREAD = "thoughts that the chat template does not read"


def encoded(
    conversations: Iterator[Conversation], report: ReadReport, encoder: ChatEncoder
) -> Iterator[tuple[Conversation, list[EncodedChat]]]:
    """Yield conversations with their training samples; turns in `masked` carry no loss.

    A conversation that the template refuses, or whose thoughts it does not read, is skipped and
    counted in `report`, from which `conversations` were read. Raises `BadData` when none is left.
    """
    while chunk := list(islice(conversations, CHUNK)):
        read = []
        for conversation in chunk:
            if conversation.thoughts and not encoder.renderer.reads_thoughts:
                report.accepted -= 1
                report.skip(THOUGHTS_UNREAD, conversation.place)
            else:
                read.append(conversation)
        outcomes = encoder.encode_each(
            [(messages_of(each, encoder), each.masked) for each in read]
        )
        for conversation, samples in zip(read, outcomes, strict=True):
            if isinstance(samples, BadData):
                report.accepted -= 1
                report.skip(REFUSED, f"{conversation.place}: {samples}")
                continue
            report.num_without_thought += any(sample.lacks_thought for sample in samples)
            yield conversation, samples
    report.require_some()


def messages_of(conversation: Conversation, encoder: ChatEncoder) -> list[Message]:
    """Return the messages for a chat template, thoughts under each name that templates read.

    Also a thought that stands in an answer's text, where the template reads thoughts by name.
    """
    thoughts = dict(conversation.thoughts)
    messages: list[Message] = []
    for number, (role, text) in enumerate(conversation.turns):
        thought = thoughts.get(number, "")
        if role == "assistant" and not thought and encoder.renderer.reads_thoughts:
            thought, text = thought_in(text)
        named = dict.fromkeys(THOUGHT_KEYS, thought) if thought else {}
        messages.append({"role": role, "content": text, **named} if named else (role, text))
    return messages


def thought_in(text: str) -> tuple[str, str]:
    """Return the thought with which a text begins, "" without one, and the rest of the text."""
    opening = THOUGHT_START.match(text.lstrip())
    ending = THOUGHT_END.search(text)
    if opening is None or ending is None:
        return "", text
    thought = text[: ending.start()].lstrip()[opening.end() :].strip()
    rest = text[ending.end() :].lstrip()
    return (thought, rest) if thought and rest else ("", text)
