"""Chat with a target in the terminal, and see what its drafter saves.

    stree chat checkpoints/python-docs-hybrid \\
        --drafter runs/quickstart/drafter/latest --repetition_penalty 1.2

Answers come as they are made, with drafts that the target accepted in colour; τ and tokens/s stand
below each. Tab switches between the tree and plain decoding. Lines that begin with / are commands:
/plain does the same as Tab, /again asks the last question once more, /reset forgets the
conversation. Ctrl-C stops an answer, Ctrl-D leaves. A target without a chat template continues each
line instead.
"""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import IncrementalNewlineDecoder  # \r\n and \r are \n
from typing import Any

import stree.common.threads  # noqa: F401  (before other libraries are loaded)

from rich.console import Console
from rich.text import Text

import stree
from stree.batching.batch_decoder import BatchDecoder
from stree.batching.sequences import Request
from stree.common.errors import UsageError, shown
from stree.common.words import described, ends_of, placed
from stree.generation import DecodingStats, GenerationConfig
from stree.prompts import EncodedPrompt, chat_prompt, text_prompt
from stree.text_stream import TextStream
from stree.tree_policy.names import as_tree_policy
from stree_pipelines.console.command_line import PlainParser, input_path
from stree_pipelines.evaluation.options import DEFAULTS, add_options, add_pair
from stree_pipelines.evaluation.sampling import OFF, sampling_of

ACCEPTED, QUIET = "green", "dim"
PROMPT = "> "
LARGEST_BABBLER = 50_000_000  # parameters
SWITCH = "/plain"
HELP = (
    "Tab (or /plain) switches between the tree and plain decoding, /again asks once more, /reset "
    "forgets, Ctrl-C stops an answer, Ctrl-D leaves"
)


class Chat:
    """A conversation, and the decoders of its answers."""

    def __init__(
        self, decoder: stree.Decoder, generation: GenerationConfig, console: Console
    ) -> None:
        self.generation, self.console = generation, console
        self.tokenizer: Any = decoder.tokenizer
        self.decoder = decoder.batch
        self.plain = decoder.batch
        if decoder.drafter is not None:
            self.plain = BatchDecoder(
                decoder.target, num_rows=1, max_length=decoder.max_length,
                tokenizer=self.tokenizer, num_prefixes=2,
            )
        self.is_plain = decoder.drafter is None
        self.has_template = bool(getattr(self.tokenizer, "chat_template", None))
        self.messages: list[dict[str, str]] = []

    def welcome(self) -> None:
        models = described(self.decoder.target, self.decoder.drafter, self.decoder.tree_policy)
        ends = ends_of(self.decoder.eos_token_ids)
        self.say(f"{models}, {ends}, {placed(self.decoder.target)}")
        if sum(each.numel() for each in self.decoder.target.parameters()) <= LARGEST_BABBLER:
            self.say(
                "so small a target writes sentences of the right form, about nothing: it is there "
                "to be drafted for"
            )
        if not self.has_template:
            self.say("there is no chat template: each line is a text to go on after")
        self.say(HELP)

    def say(self, line: str) -> None:
        self.console.print(Text(line, style=QUIET))

    def obey(self, line: str) -> None:
        """Run a typed line: a command, or a question to answer."""
        if not line.startswith("/"):
            self.answer(line)
        elif line == SWITCH and self.decoder is self.plain:
            self.say("there is no drafter, so decoding is plain anyway: see --drafter and --tree")
        elif line == SWITCH:
            self.is_plain = not self.is_plain
            self.say(
                "plain decoding" if self.is_plain else f"decoding with {self.decoder.tree_policy}"
            )
        elif line == "/reset":
            self.messages = []
            self.say("forgotten")
        elif line == "/again" and self.messages:
            question = self.messages[-2]["content"]
            self.messages = self.messages[:-2]
            self.answer(question)
        elif line == "/again":
            self.say("nothing was asked yet")
        else:
            self.say(HELP)

    def answer(self, question: str) -> None:
        """Stream the answer to a question; one that does not fit is reported and forgotten."""
        messages = [*self.messages, {"role": "user", "content": question}]
        try:
            prompt = (
                chat_prompt(self.tokenizer, messages)
                if self.has_template
                else text_prompt(self.tokenizer, question)
            )
            text = self._stream(prompt)
        except UsageError as error:
            self.console.print(Text(f"{error} (/reset forgets the conversation)", style="red"))
            return
        self.messages = [*messages, {"role": "assistant", "content": text}]

    def _stream(self, prompt: EncodedPrompt) -> str:
        decoder = self.plain if self.is_plain else self.decoder
        stream, lines = TextStream(self.tokenizer), IncrementalNewlineDecoder(None, translate=True)
        since = 0.0
        with stopping() as stop:
            request = Request(prompt.ids, self.generation, None, True, prompt.messages_end)
            with closing(decoder.serve([request])) as reports:
                for served in reports:
                    since = since or time.perf_counter()  # the prompt's step is the first
                    block, num_accepted = Text(), served.report.num_accepted
                    for index, token in enumerate(served.report.tokens):
                        text = shown(lines.decode(stream.add(token)))
                        block.append(text, style=ACCEPTED if index < num_accepted else None)
                    self._show(block)
                    if stop and served.report.error is None:
                        served.release()
            output = served.release()
        self._show(Text(shown(lines.decode(stream.end(), final=True))))
        stats = output.stats
        stats.decode_s = stats.decode_s or time.perf_counter() - since
        self.console.print()
        how = "plain" if self.is_plain else f"tree {decoder.tree_policy.name}"
        seed = "" if output.seed is None else f" · seed {output.seed}"
        self.say(f"{_figures(stats)} · {how}{seed}{' · stopped' if stop else ''}")
        return output.text

    def _show(self, block: Text) -> None:
        self.console.print(block, end="", soft_wrap=True)
        self.console.file.flush()


def _figures(stats: DecodingStats) -> str:
    if not stats.num_calls:
        return "one token: nothing to measure"
    return f"τ {stats.acceptance_length:.2f} · {stats.tokens_per_s:.1f} tokens/s"


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Yield a list that Ctrl-C fills, so that a step is never cut in two.

    A second Ctrl-C leaves at once.
    """
    stop: list[int] = []

    def note(number: int, frame: Any) -> None:
        stop.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def typed_lines(console: Console) -> Iterator[str]:
    """Yield typed lines until Ctrl-D; Ctrl-C drops a line."""
    with suppress(ImportError):
        import readline  # lets `input` edit lines and recall them

        readline.parse_and_bind(rf'"\t": "\C-a\C-k{SWITCH}\n"')  # replaces the typed text
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n(Ctrl-D leaves)")
            continue
        if line:
            yield line


def build_parser() -> PlainParser:
    parser = PlainParser("stree chat", description=__doc__)
    add = parser.add_argument
    add_pair(parser)
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add_options(parser, DEFAULTS, ["device", "dtype", *OFF])
    add("--seed", type=int, help="of sampling (default: a fresh one for each answer)")
    add("--max_new_tokens", type=int, default=GenerationConfig.max_new_tokens, help="an answer")
    add("--max_length", type=int, default=2048, help="tokens of a conversation")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = Console(highlight=False)
    generation = GenerationConfig(
        options.max_new_tokens, options.temperature, **sampling_of(options), seed=options.seed
    )
    tree = options.tree and as_tree_policy(options.tree, input_path)
    with warnings.catch_warnings(record=True) as caught:
        generation.warn_of_unread()
        decoder = stree.load(
            input_path(options.target), options.drafter and input_path(options.drafter),
            tree=tree, temperature=options.temperature, device=options.device,
            dtype=options.dtype, max_length=options.max_length, num_prefixes=2,
            verifier=options.verifier, backtracking=options.backtracking,
            offload=options.offload, target_dtype=options.target_dtype,
        )
        chat = Chat(decoder, generation, console)
    for note in dict.fromkeys(str(each.message) for each in caught):
        chat.say(f"note: {note}")
    chat.welcome()
    for line in typed_lines(console):
        chat.obey(line)
