"""Encode conversations by the tokenizer's chat template, with the assistant's tokens marked.

Training, evaluation, `Decoder.chat` and `stree chat` all encode here. A training sample is what
decoding meets: the rendering of a prompt, with the opening of an assistant turn, and the answer.
The text is cut at these borders, and the pieces are encoded one by one. So the mask is exact (no
token straddles a border), and a prompt's ids are by construction the first ids of its sample. Where
a template rewrites earlier turns (drops their thoughts, for example), each answer has its own
sample.

A control token that a message spells (`<|end|>` typed by a user) is encoded as plain text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from stree.chat_templates import (
    THOUGHT_CLOSED,
    THOUGHT_END,
    THOUGHT_KEYS,
    THOUGHT_OPENED,
    THOUGHT_START,
    ChatRenderer,
    Rendering,
    Span,
    around_thoughts,
    tokenizer_for_pieces,
)
from stree.checkpoints.tokenizer import refusing_panics
from stree.common.errors import BadData, UsageError

Message = tuple[str, str] | Mapping[str, Any]  # (role, text), or as `transformers` has it
PLAIN_TEXT = "text"  # role of a text that is learnt as it is, without a chat template


class Piece(NamedTuple):
    """A stretch of rendered text that is encoded by itself."""

    text: str
    assistant: bool
    plain: bool  # spells a control token, but is text of a message


class Answer(NamedTuple):
    """An answer in a sample's text.

    opened: Where its prompt ends. start, stop: What decoding generates, the end of the turn
    included; template text between `opened` and `start` closes a thought that the answer lacks.
    """

    opened: int
    start: int
    stop: int
    is_learnt: bool = True
    lacks_thought: bool = False


class Sample(NamedTuple):
    """The text of a training sample or prompt, its answers, and the texts of its messages."""

    text: str
    answers: list[Answer]
    quoted: list[Span]


@dataclass(frozen=True)
class EncodedChat:
    """Ids int32 (T,), and mask bool (T,) of the assistant's tokens, end-of-turn included.

    lacks_thought: Whether the template opens a thought before an answer that has none.
    """

    tokens: NDArray[np.int32]
    assistant: NDArray[np.bool_]
    lacks_thought: bool = False


class ChatEncoder:
    """Encoder of conversations with one tokenizer and one template.

    With `{% generation %}` in the template its marks enclose the assistant's texts, and a
    conversation is one sample. Without, an answer is the text that the template adds to the
    rendering of its prompt; where it renders the prompt otherwise then, the answer's own text.

    Templates that print the date have the fixed one of `stree.common.template_dates`, so that a run
    can go on tomorrow; `today` gives them the day on which they are rendered.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, today: bool = False):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UsageError(
                f"{type(tokenizer).__name__} is not backed by `tokenizers`; convert it first"
            )
        self.renderer = ChatRenderer(tokenizer, template, today)
        self.eos: str = tokenizer.eos_token or ""
        text = tokenizer.backend_tokenizer.to_str()
        self._backends = {plain: tokenizer_for_pieces(text, plain) for plain in (False, True)}
        # SentencePiece-like tokenizers put a space before every text (and behind control tokens); a
        # piece that continues a text is encoded behind an anchor, whose ids are then dropped.
        anchor = "\n"
        glued, alone = self._ids([anchor + "a"])[0], self._ids(["a"])[0]
        self._anchor = "" if glued[-len(alone) :] == alone else anchor
        self._anchor_ids = self._ids([self._anchor])[0] if self._anchor else []

    def encode(
        self, messages: Sequence[Message], unlearnt: Collection[int] = ()
    ) -> list[EncodedChat]:
        """Return the training samples of a conversation, the last answer's last. Raises `BadData`
        as `encode_each` returns it."""
        (samples,) = self.encode_each([(messages, unlearnt)])
        if isinstance(samples, BadData):
            raise samples
        return samples

    def encode_each(
        self, conversations: Sequence[tuple[Sequence[Message], Collection[int]]]
    ) -> list[list[EncodedChat] | BadData]:
        """Encode many conversations in parallel, each with the numbers of its turns without loss.

        A conversation may also be a single (PLAIN_TEXT, text): its sample is the text and the
        end-of-text token, and all of it is learnt, or nothing.

        Returns the samples of each conversation: one, or one an answer where the template rewrites
        earlier turns. A conversation has an error instead when the template refuses it, or does not
        print its answers.
        """
        outcomes: list[list[EncodedChat] | BadData] = []
        samples: list[Sample] = []
        numbers: list[int] = []  # of the samples' conversations
        for number, (messages, unlearnt) in enumerate(conversations):
            try:
                found = self._plain(messages, unlearnt) or self._samples(
                    messages, unlearnt=unlearnt
                )
            except BadData as error:
                outcomes.append(error)
                continue
            outcomes.append([])
            learnt = [each for each in found if any(answer.is_learnt for answer in each.answers)]
            samples += learnt or found[-1:]
            numbers += [number] * len(learnt or found[-1:])
        cut = [self._pieces(sample) for sample in samples]
        encoded = self._encode_pieces(cut)
        for number, sample, pieces, ids in zip(numbers, samples, cut, encoded, strict=True):
            chats = outcomes[number]
            if isinstance(ids, BadData) or isinstance(chats, BadData):
                outcomes[number] = ids if isinstance(ids, BadData) else chats
                continue
            tokens = np.concatenate([np.asarray(each, np.int32) for each in ids])
            assistant = np.repeat([piece.assistant for piece in pieces], [len(i) for i in ids])
            assistant[:1] = False  # nothing stands before the first token of a plain text
            lacks = any(answer.lacks_thought for answer in sample.answers if answer.is_learnt)
            chats.append(EncodedChat(tokens, assistant, lacks))
        return outcomes

    def _plain(self, messages: Sequence[Message], unlearnt: Collection[int]) -> list[Sample]:
        """Return the sample of a plain text, [] for a conversation."""
        first = messages[0] if len(messages) == 1 else None
        if not isinstance(first, tuple) or first[0] != PLAIN_TEXT:
            return []
        whole = (text := first[1]) + self.eos
        return [Sample(whole, [Answer(0, 0, len(whole), 0 not in unlearnt)], [(0, len(text))])]

    def encode_prompt(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Return the ids of a prompt: those of `messages`, and of an assistant turn's opening.
        `variables` go to the template. Raises `BadData` when it refuses the messages."""
        pieces = self._pieces(self._samples(messages, prompt=True, variables=variables)[-1])
        (ids,) = self._encode_pieces([pieces])
        if isinstance(ids, BadData):
            raise ids
        return [token for of_piece in ids for token in of_piece]

    def encode_chat_prompt(
        self, messages: Sequence[Message], **variables: Any
    ) -> tuple[list[int], int]:
        """Return the ids of a prompt, as `encode_prompt` does, and how many of them are `messages`.

        The others are the opening of the assistant's turn, which a template may print otherwise
        once an answer follows (without the thought that it opens).
        """
        sample = self._samples(messages, prompt=True, variables=variables)[-1]
        try:
            text, *_ = self.renderer.render(_mappings(messages), False, variables)
        except BadData:  # it always opens a turn
            text = sample.text
        same = _num_equal(sample.text, text)
        ids, of_messages = self._encode_pieces([
            self._pieces(each) for each in (sample, sample._replace(text=sample.text[:same]))
        ])
        if isinstance(ids, BadData):
            raise ids
        if isinstance(of_messages, BadData):
            of_messages = []
        prompt = list(chain.from_iterable(ids))
        return prompt, _num_equal(prompt, chain.from_iterable(of_messages))

    def prompt_text(self, messages: Sequence[Message], **variables: Any) -> str:
        """Return the text of a prompt. Raises `BadData` when the template refuses the messages."""
        return self.renderer.render(_mappings(messages), True, variables)[0]

    def _samples(
        self, messages: Sequence[Message], prompt: bool = False,
        variables: Mapping[str, Any] | None = None, unlearnt: Collection[int] = (),
    ) -> list[Sample]:
        """Return the samples of a conversation, or with `prompt` its prompt as the last of them."""
        variables, turns = variables or {}, _mappings(messages)
        answers = [n for n, each in enumerate(turns) if each.get("role") == "assistant"]
        whole = self.renderer.rendering(turns, prompt, variables)
        if self.renderer.has_marks:
            return [self._marked(whole, answers, unlearnt)]
        samples, sample = [], Sample("", [], [])
        for number in answers:
            try:
                before = self.renderer.rendering(turns[:number], True, variables)
                if not before.text.startswith(sample.text):
                    samples.append(sample)
                    sample = Sample("", [], [])
                is_last = number + 1 == len(turns) and not prompt
                through = whole if is_last else self.renderer.rendering(
                    turns[: number + 1], False, variables
                )
                added = self._added(turns[: number + 1], before, through, variables)
            except BadData:
                if not prompt:
                    raise
                added = None
            if added is not None:
                text, quoted, answer = added
                answer = answer._replace(is_learnt=number not in unlearnt)
                sample = Sample(text, [*sample.answers, answer], quoted)
            elif prompt or number in unlearnt:  # nothing is learnt of it
                sample = Sample("", [], [])
            else:
                raise BadData(
                    f"the chat template does not print turn {number} as it is, so its tokens "
                    "cannot be told apart; give another template"
                )
        if whole.text.startswith(sample.text):
            sample = Sample(whole.text, sample.answers, whole.quoted)
        elif prompt:
            samples.append(sample)
            sample = Sample(whole.text, [], whole.quoted)
        return [*samples, sample]

    def _marked(
        self, whole: Rendering, numbers: Sequence[int], unlearnt: Collection[int]
    ) -> Sample:
        """Return the sample of a template whose marks tell the answers."""
        text = whole.text
        if unlearnt and len(whole.spans) != len(numbers):
            raise BadData(
                f"the chat template marks {len(whole.spans)} answers, the conversation has "
                f"{len(numbers)}, so its masked turns cannot be told apart; give another template"
            )
        answers = []
        for order, (start, stop) in enumerate(whole.spans):
            # A block that closes before the end-of-turn token would never teach the model to stop.
            stop += len(self.eos) * text.startswith(self.eos, stop)
            is_learnt = not unlearnt or numbers[order] not in unlearnt
            answers.append(Answer(start, start, stop, is_learnt))
        return Sample(text, answers, whole.quoted)

    def _added(
        self, messages: Sequence[dict[str, Any]], before: Rendering, through: Rendering,
        variables: Mapping[str, Any],
    ) -> tuple[str, list[Span], Answer] | None:
        """Put the last message, an answer, behind the rendering of its prompt.

        Returns the text up to the end of the answer's turn, the texts of messages in it, and the
        answer; None when the template does not print the answer's text as it is.
        """
        message, opened = messages[-1], len(before.text)
        content: str = message["content"] if isinstance(message.get("content"), str) else ""
        thought_end = max((sign.end() for sign in THOUGHT_END.finditer(content)), default=0)
        beside = next(filter(None, (str(message.get(key) or "") for key in THOUGHT_KEYS)), "")
        is_opened = THOUGHT_OPENED.search(before.text) is not None
        stop = self._end_of_turn(through.text)
        said = through.text[opened:stop] if through.text.startswith(before.text) else ""
        closed = THOUGHT_END.search(said)
        answer = content[thought_end:]
        if said and answer.strip() in said and (closed or not thought_end):
            lacks = not thought_end and not beside and (is_opened or closed is not None)
            start = stop - len(said[closed.end() :].lstrip()) if lacks and closed else opened
            return through.text[:stop], through.quoted, Answer(opened, start, stop, True, lacks)
        # The template renders the prompt otherwise now, or drops the thought.
        place = self.renderer.place(messages, answer.strip(), through.text, variables)
        if place is None:
            return None
        is_closed = THOUGHT_CLOSED.search(before.text) is not None  # no thought is wanted
        is_beside = beside and not is_closed
        start = through.text.rfind(beside.strip(), 0, place) if is_beside else place
        if start < 0:
            return None
        thought = "" if is_closed else content[:thought_end].lstrip()
        if is_opened and (sign := THOUGHT_START.match(thought)):
            thought = thought[sign.end() :].lstrip()
        if thought:
            thought += answer[: len(answer) - len(answer.lstrip())]
        text = before.text + thought + through.text[start:stop]
        end = len(text) - (stop - place) + len(answer.strip())
        quoted = [*before.quoted, *around_thoughts(text, opened, end)]
        lacks = is_opened and not thought and not beside
        return text, quoted, Answer(opened, opened, len(text), True, lacks)

    def _pieces(self, sample: Sample) -> list[Piece]:
        """Cut a sample where answers start and stop, and around control tokens in messages."""
        pieces: list[Piece] = []
        at = 0
        for answer in sample.answers:
            for stop, is_said in (
                (answer.opened, False), (answer.start, False), (answer.stop, answer.is_learnt)
            ):
                pieces += self._cut(sample, at, stop, is_said)
                at = stop
        return [*pieces, *self._cut(sample, at, len(sample.text), False)]

    def _cut(self, sample: Sample, start: int, stop: int, assistant: bool) -> Iterator[Piece]:
        """Yield the pieces of a stretch of a sample."""
        text, at = sample.text[start:stop], 0
        quoted = [(a - start, b - start) for a, b in sample.quoted if a < stop and start < b]
        for first, end in self.renderer.controls(text) if quoted else ():
            if any(first < b and a < end for a, b in quoted):
                for part, plain in ((text[at:first], False), (text[first:end], True)):
                    if part:
                        yield Piece(part, assistant, plain)
                at = end
        if text[at:]:
            yield Piece(text[at:], assistant, plain=False)

    def _end_of_turn(self, through: str) -> int:
        """Return where the assistant's turn stops in a rendering that ends with it.

        Whitespace after the end-of-turn token is the template's, and what follows that is, too:
        generation is over by then.
        """
        trimmed = through.rstrip()
        if not trimmed.endswith(self.renderer.specials):
            return len(through)
        last = max(len(each) for each in self.renderer.specials if trimmed.endswith(each))
        before = trimmed[:-last].rstrip()
        is_ended = len(before) + last < len(trimmed) and before.endswith(self.renderer.specials)
        return len(before) if is_ended else len(trimmed)

    def _ends_in_control(self, piece: Piece) -> bool:
        return not piece.plain and piece.text.endswith(self.renderer.specials)

    def _ids(self, texts: list[str], plain: bool = False) -> list[list[int]]:
        """Encode texts without the special tokens that the tokenizer adds."""
        with refusing_panics():
            found = self._backends[plain].encode_batch_fast(texts, add_special_tokens=False)
        return [each.ids for each in found]

    def _encode_pieces(self, chats: Sequence[list[Piece]]) -> list[list[list[int]] | BadData]:
        """Return the ids of each piece of each conversation; all are encoded in parallel."""
        ids: list[list[list[int]] | BadData] = [[[] for _ in pieces] for pieces in chats]
        for plain in (False, True):
            places = [
                (chat, number) for chat, pieces in enumerate(chats)
                for number, piece in enumerate(pieces) if piece.plain == plain
            ]
            anchored = [
                number > 0 and not self._ends_in_control(chats[chat][number - 1])
                for chat, number in places
            ]
            texts = [
                (self._anchor if behind else "") + chats[chat][number].text
                for behind, (chat, number) in zip(anchored, places, strict=True)
            ]
            found = self._ids(texts, plain) if texts else []
            for behind, (chat, number), tokens in zip(anchored, places, found, strict=True):
                before = self._anchor_ids if behind else []
                text, of_chat = chats[chat][number].text[:40], ids[chat]
                if isinstance(of_chat, BadData):
                    continue
                if tokens[: len(before)] != before:
                    ids[chat] = BadData(f"the tokenizer merges {text!r} with what stands before")
                elif plain and not self.renderer.special_ids.isdisjoint(tokens):
                    ids[chat] = BadData(f"the tokenizer knows {text!r} as a control token alone")
                else:
                    of_chat[number] = tokens[len(before) :]
        return ids


def _num_equal(values: Iterable[object], others: Iterable[object]) -> int:
    """Return how many values at the start of two sequences are the same."""
    pairs = zip(values, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _mappings(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form of `transformers`."""
    return [
        dict(each) if isinstance(each, Mapping) else {"role": each[0], "content": each[1]}
        for each in messages
    ]


_encoders: WeakKeyDictionary[Any, dict[tuple, ChatEncoder]] = WeakKeyDictionary()


def chat_encoder(
    tokenizer: Any, template: str | None = None, today: bool = False
) -> ChatEncoder:
    """Return the encoder of a tokenizer and template, cached: copying a vocabulary takes time."""
    key = (template, str(tokenizer.chat_template), len(tokenizer), today)
    known = _encoders.setdefault(tokenizer, {})
    if key not in known:
        known[key] = ChatEncoder(tokenizer, template, today)
    return known[key]


def encode_prompt(
    tokenizer: Any, messages: Sequence[Message], template: str | None = None, **variables: Any
) -> list[int]:
    """Return the ids of a prompt, which are the first ids of the same conversation in training.
    They are those of `messages` and of the answer's opening; `variables` go to the template."""
    return chat_encoder(tokenizer, template).encode_prompt(messages, **variables)
