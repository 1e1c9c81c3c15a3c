"""Rendering chat templates: those of others in a process of its own, under a limit.

A template is a program. Jinja's sandbox keeps it from files and from the interpreter, but lets it
loop for ever and fill the memory, even while it is compiled (`'a' * 10**10` is a constant). So what
did not come with this package is rendered by a child that the kernel stops: by its processor time,
which a busy machine does not use up, and by its address space. The two speak JSON, a line each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from stree_pipelines.data.limited_child import ChildEnded, LimitedChild, serve

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
        self._child = LimitedChild(__file__)

    def __call__(
        self, template: str, messages: Sequence[Message], prompt: bool, variables: Mapping[str, Any]
    ) -> Rendering:
        try:
            answer = self._child.ask([template, messages, prompt, variables], RENDER_CPU_S)
        except ChildEnded as ended:
            raise Refused(TEMPLATE, str(ended)) from ended
        if "text" not in answer:
            raise Refused(answer["culprit"], answer["reason"])
        return Rendering(answer["text"], [tuple(span) for span in answer["spans"]])


def _serve() -> None:
    """The child: a rendering for each question."""

    def answer(question: Any) -> Any:
        template, messages, prompt, variables = question
        try:
            return render(template, messages, prompt, variables)._asdict()
        except Refused as refused:
            return {"culprit": refused.culprit, "reason": str(refused)}

    serve(answer, MEMORY_BYTES)


if __name__ == "__main__":
    _serve()
