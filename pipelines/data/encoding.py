"""Texts to token ids, with a tokenizer of others in a process of its own, under a limit.

A tokenizer.json is a program, too: its regular expressions may search for ever, its replacements
double a text again and again. One whose every step is known to take time in proportion to the text
is run in place, any other in a child that the kernel stops.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from stree_pipelines.data.limited_child import ChildEnded, LimitedChild, serve

MEMORY_BYTES = 1 << 30  # the largest vocabularies take a quarter of it
# Loading 256,000 tokens takes 2 s; a text some microseconds a character.
LOAD_CPU_S, CPU_S, CPU_S_PER_CHAR = 30.0, 1.0, 20e-6


class Encoder:
    """Encodes texts without special tokens, truncation and padding, in this process.

    `plain` takes the spelling of a control token as the text that it is.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._backends = [_without_extras(tokenizer_json) for _ in range(2)]
        self._backends[True].encode_special_tokens = True

    def __call__(self, texts: list[str], plain: bool = False) -> list[list[int]]:
        backend = self._backends[plain]
        return [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]


class ChildEncoder:
    """`Encoder` in a child process. A call raises ChildEnded when the tokenizer fails or takes more
    than CPU_S and CPU_S_PER_CHAR, or MEMORY_BYTES."""

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._child = LimitedChild(__file__)

    def __call__(self, texts: list[str], plain: bool = False) -> list[list[int]]:
        if not self._child.is_running:
            self._ask([self._json], LOAD_CPU_S)
        cpu_s = CPU_S + CPU_S_PER_CHAR * sum(map(len, texts))
        return self._ask([texts, plain], cpu_s)

    def _ask(self, question: Any, cpu_s: float) -> Any:
        answer = self._child.ask(question, cpu_s)
        if isinstance(answer, str):
            raise ChildEnded(answer)
        return answer


def _without_extras(tokenizer_json: str) -> Tokenizer:
    backend = Tokenizer.from_str(tokenizer_json)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _serve() -> None:
    """The child: it is told the tokenizer first. A text is why there are no ids."""
    encoders: list[Encoder] = []

    def answer(question: Any) -> Any:
        try:
            if not encoders:
                encoders.append(Encoder(*question))
                return []
            return encoders[0](*question)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library in Rust is no Exception
            return f"{type(error).__name__}: {error}"

    serve(answer, MEMORY_BYTES)


if __name__ == "__main__":
    _serve()
