"""Templates that print the date, on a day of the test's choice."""

from datetime import datetime

from transformers.utils import chat_template_utils

# As Granite 3.1 and 3.3 without a system turn
DATED = (
    "{{- 'Today is ' + strftime_now('%d %B %Y') + '.' -}}"
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' + m.content + '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def set_day(monkeypatch, day: int) -> None:
    """Let the clock of templates show a day of November 2026."""

    class Day(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 11, day, 12)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
