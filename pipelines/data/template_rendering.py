"""Rendering chat templates: those of others in a process of its own, under a limit.

A template is a program. Jinja's sandbox keeps it from files and from the interpreter, but lets it
loop for ever and fill the memory, even while it is compiled (`'a' * 10**10` is a constant). So what
did not come with this package is rendered by a child that the kernel stops: by its processor time,
which a busy machine does not use up, and by its address space. The two speak JSON, a line each.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

RENDER_CPU_S = 1.0  # a conversation of 200,000 characters takes some hundredths
MEMORY_BYTES = 512 << 20
# What a template may add to the conversation: tools' instructions have some thousand characters.
MOST_ADDED_CHARS, MOST_CHARS_PER_CHAR = 1 << 20, 4

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
DATA, TEMPLATE = "data", "template"

Message = Mapping[str, str]


class Refused(Exception):
    """Why there is no rendering; `culprit` is DATA (the template says that the conversation does
    not suit it) or TEMPLATE."""

    def __init__(self, culprit: str, reason: str) -> None:
        super().__init__(reason)
        self.culprit = culprit


class Rendering(NamedTuple):
    """A conversation as text, and where the assistant speaks (only of a template with marks)."""

    text: str
    spans: list[tuple[int, int]]


# (template, messages, whether to open an assistant turn, further variables) → a rendering
Renderer = Callable[[str, Sequence[Message], bool, Mapping[str, Any]], Rendering]


def render(
    template: str, messages: Sequence[Message], prompt: bool, variables: Mapping[str, Any]
) -> Rendering:
    """Render here, for as long as it takes. Raises Refused."""
    marks = bool(GENERATION_MARK.search(template))
    try:
        # annotated as str, returns ([text, …], [spans, …])
        rendered: Any = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **variables,
        )
    except (jinja2.TemplateSyntaxError, jinja2.sandbox.SecurityError) as error:
        raise Refused(TEMPLATE, f"{type(error).__name__}: {error}") from error
    except jinja2.TemplateError as error:
        raise Refused(DATA, str(error)) from error
    except MemoryError as error:
        raise Refused(TEMPLATE, f"it takes more than {MEMORY_BYTES >> 20} MiB") from error
    except Exception as error:  # whatever an expression of the template's can raise
        raise Refused(TEMPLATE, f"{type(error).__name__}: {error}") from error
    text = rendered[0][0]
    given = sum(len(message["content"]) for message in messages)
    if len(text) > MOST_ADDED_CHARS + MOST_CHARS_PER_CHAR * given:
        raise Refused(TEMPLATE, f"it makes {len(text):,} characters of {given:,}")
    return Rendering(text, [tuple(span) for span in rendered[1][0]] if marks else [])


class ChildRenderer:
    """`render` in a child process, which is started at the first call and stopped when a rendering
    takes more than RENDER_CPU_S or MEMORY_BYTES."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None

    def __call__(
        self, template: str, messages: Sequence[Message], prompt: bool, variables: Mapping[str, Any]
    ) -> Rendering:
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps([template, messages, prompt, variables]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._child = None
            raise Refused(TEMPLATE, _reason_of_end(child.wait()))
        answer = json.loads(line)
        if "text" not in answer:
            raise Refused(answer["culprit"], answer["reason"])
        return Rendering(answer["text"], [tuple(span) for span in answer["spans"]])

    def _start(self) -> subprocess.Popen[str]:
        # By its path: the child needs nothing of this package, whose import brings PyTorch along.
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii",
            start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _end, child)
        assert child.stdout is not None
        if child.stdout.readline() != "ready\n":
            raise RuntimeError("the process that renders chat templates did not start")
        return child


def _reason_of_end(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {RENDER_CPU_S:g} s of processor time"
    return f"the process that rendered it ended with code {code}"


def _end(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.kill()  # it holds nothing that could be lost
    child.wait()
    child.stdin.close()
    child.stdout.close()


def _serve() -> None:
    """The child: a rendering for each line, until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent, with whom it ends
    print("ready", flush=True)
    _limit_memory(MEMORY_BYTES)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)  # SIGPROF ends a process
        template, messages, prompt, variables = json.loads(line)
        try:
            answer: dict[str, Any] = render(template, messages, prompt, variables)._asdict()
        except Refused as refused:
            answer = {"culprit": refused.culprit, "reason": str(refused)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _limit_memory(more_bytes: int) -> None:
    """Allow the process so much address space beyond what it has (where the system tells)."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


if __name__ == "__main__":
    _serve()
