"""Templates print one fixed date in runs, and today's where a user chats."""

from pathlib import Path

import pytest
from other_days import DATED, set_day
from transformers.utils.chat_template_utils import render_jinja_template

from stree.checkpoints.tokenizer import load_tokenizer
from stree.common.template_dates import FIXED_DATE, template_date, with_fixed_date
from stree.prompts import chat_prompt

REPOSITORY = Path(__file__).resolve().parents[3]
MESSAGES = [{"role": "user", "content": "b"}]


def render(template):
    (text,), _ = render_jinja_template([MESSAGES], chat_template=template)
    return text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (DATED, "Today is 26 July 2024.<|user|>b<|end|>"),
        ("{{ strftime_now('%Y-%m-%d %A %-d %j %%d') }}", "2024-07-26 Friday 26 208 %d"),
        ("\n {{ strftime_now(format='%H:%M:%S %p') | lower }}\n", "\n 00:00:00 am"),
        ("{% if strftime_now is defined %}{{ strftime_now('%e') }}{% endif %}", "26"),
        ("{% macro day() %}{{ strftime_now('%d') }}{% endmacro %}{{ day() }}", "26"),
        ("{{ date_string }}", "26 Jul 2024"),
        ("{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
         "{% endif %}{{ date_string }}", "26 Jul 2024"),
    ],
)  # fmt: skip
def test_a_template_prints_the_fixed_date(template, text):
    assert render(with_fixed_date(template)) == text
    assert template_date(template) == "2024-07-26"


def test_every_directive_of_strftime_is_known():
    directives = " ".join(f"%{each} %-{each}" for each in "aAbBcdDeFGHIjklmMpRsSTuUVwWxXyY")
    fixed = with_fixed_date(f"{{{{ strftime_now('{directives}') }}}}")
    assert render(fixed) == FIXED_DATE.strftime(directives)


def test_a_template_without_dates_keeps_its_text():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert with_fixed_date(template) == template and template_date(template) is None


def test_a_chat_with_a_user_has_todays_date(monkeypatch):
    tokenizer = load_tokenizer(REPOSITORY / "checkpoints/python-docs-hybrid")
    llama = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}"
    for day in (26, 27):
        set_day(monkeypatch, day)
        said = tokenizer.decode(chat_prompt(tokenizer, MESSAGES, chat_template=DATED).ids)
        assert said.startswith(f"Today is {day} November 2026.")
        ids = chat_prompt(tokenizer, MESSAGES, chat_template=llama).ids
        assert tokenizer.decode(ids) == f"{day} Nov 2026"
    ids = chat_prompt(tokenizer, MESSAGES, chat_template=llama, date_string="1 May 2001").ids
    assert tokenizer.decode(ids) == "1 May 2001"
