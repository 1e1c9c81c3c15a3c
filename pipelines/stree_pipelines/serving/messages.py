"""Messages between the engine's process and the one that speaks HTTP, over a socket.

A message is a pickled value after its size. Both processes are this program's own, and nobody else
has an end of the socket.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from stree.batching.batch_decoder import BatchDecoder
from stree.generation import DecodingStats
from stree.logits.log_probs import TokenLogprobs

SIZE = struct.Struct("!Q")  # of the bytes that follow


@dataclass(frozen=True)
class Facts:
    """Facts of a decoder that requests are made by.

    Attributes:
        tokenizer: The target's.
        num_rows: Answers at once.
        max_length: Tokens of the longest conversation, its last tree included.
        tree_depth: Depth of the deepest tree.
        vocabulary: V of the target's logits.
        eos_token_ids: Tokens that end an answer.
        has_drafter: Whether there is a drafter.
    """

    tokenizer: Any
    num_rows: int
    max_length: int
    tree_depth: int
    vocabulary: int
    eos_token_ids: tuple[int, ...]
    has_drafter: bool

    @classmethod
    def of(cls, decoder: BatchDecoder) -> Facts:
        """Return the facts of a decoder."""
        return cls(
            decoder.tokenizer, decoder.num_rows, decoder.max_length,
            decoder.tree_policy.deepest.max_depth, decoder.target.config.vocab_size,
            tuple(decoder.eos_token_ids), decoder.drafter is not None,
        )


class Gain(NamedTuple):
    """Gain of an answer in a step; a message has all of a step, as a list of plain tuples.

    Attributes:
        answer: Number of the answer.
        tokens: New tokens.
        num_accepted: Accepted drafts, which are the first of these.
        finish_reason: Why the answer ends; "" while it goes on.
        logprobs: Log-probabilities of the tokens; empty unless the request wants them.
        stats: Counts of the whole answer, at its end.
        error: What has ended it; "" for none.
    """

    answer: int
    tokens: list[int]
    num_accepted: int = 0
    finish_reason: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    stats: DecodingStats | None = None
    error: str = ""


class Call(NamedTuple):
    """A call of a method of the engine's end: its number, and what is called with what."""

    number: int
    name: str
    arguments: tuple[Any, ...]


class Result(NamedTuple):
    """The value of a call, or the error that it raised."""

    number: int
    value: Any = None
    error: Exception | None = None


def packed(message: Any) -> bytes:
    """Return the bytes of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return SIZE.pack(len(body)) + body


def received(stream: BinaryIO) -> Any:
    """Wait for a message and return it. Raises `EOFError` when the other end is closed."""
    head = stream.read(SIZE.size)
    body = stream.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else b""
    if not body:
        raise EOFError("the other process has closed the connection")
    return unpacked(body)


def unpacked(body: bytes) -> Any:
    """Return the message of the bytes that follow its size."""
    return pickle.loads(body)
