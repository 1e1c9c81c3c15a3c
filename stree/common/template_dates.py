"""Fix the date that chat templates print, for runs that go on tomorrow.

A template prints it by `strftime_now(format)`, and some (Llama 3's) first look for `date_string`.
Both are defined in front of the template's text, in its own language: `transformers` renders it in
its sandbox, which takes no functions from outside.
"""

import re
from datetime import datetime

FIXED_DATE = datetime(2024, 7, 26)
PATTERN = re.compile(r"\b(strftime_now|date_string)\b")
_DIRECTIVES = "aAbBcdDeFfGHIjklmMpRsSTuUVwWxXyY"


def template_date(template: str) -> str | None:
    """Return the fixed date (YYYY-MM-DD) if a template can print one; None for other templates.

    >>> template_date("{{ strftime_now('%d %B') }}"), template_date("{{ messages }}")
    ('2024-07-26', None)
    """
    return f"{FIXED_DATE:%Y-%m-%d}" if PATTERN.search(template) else None


def with_fixed_date(template: str) -> str:
    """Return a Jinja template that prints `FIXED_DATE` for the day on which it is rendered.

    A template that prints no date is returned as it is.
    """
    if template_date(template) is None:
        return template
    text = "format | replace('%%', '\\ufdd0')"  # a character that is in no text
    for directive in (flag + letter for letter in _DIRECTIVES for flag in ("", "-")):
        text += f" | replace('%{directive}', '{FIXED_DATE.strftime('%' + directive)}')"
    text += " | replace('\\ufdd0', '%')"
    clock = f"{{% macro strftime_now(format) %}}{{{{ {text} }}}}{{% endmacro +%}}"
    return f"{{% set date_string = '{FIXED_DATE:%d %b %Y}' %}}{clock}{template}"
