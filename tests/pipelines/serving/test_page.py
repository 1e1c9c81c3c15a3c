"""The page to chat, in a real browser: it streams, colours drafts, and reads no text as HTML."""

from __future__ import annotations

import pytest
from browser import CHROMIUM, Browser

SEND = """
document.getElementById("text").value = TEXT;
document.getElementById("most").value = 40;
document.getElementById("send").click();
"""
DONE = 'document.getElementById("stop").disabled && document.querySelectorAll(".assistant").length'


@pytest.mark.costly
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_the_page_chats(running, tmp_path):
    page = Browser(running.url, tmp_path / "profile")
    try:
        page.wait('document.getElementById("model").textContent === "docs"')
        page.run(SEND.replace("TEXT", '"What is a <b>list</b>?"'))
        page.wait(f"{DONE} === 1")
        assert page.run('document.querySelector(".user").textContent') == "What is a <b>list</b>?"
        assert page.run('document.querySelector(".user b")') is None
        answer = page.run('document.querySelector(".assistant").firstChild.textContent')
        assert answer
        assert "τ" in page.run('document.querySelector(".figures").textContent')
        page.run('document.getElementById("beside").click()')
        page.run(SEND.replace("TEXT", '"Say it again, <img src=x onerror=alert(1)>"'))
        page.wait(f"{DONE} === 3")
        assert page.run('document.querySelectorAll(".pair .assistant").length') == 2
        plain, drafted = page.run(
            '[...document.querySelectorAll(".pair .assistant")].map((box) => '
            '[...box.querySelectorAll("span")].map((each) => each.textContent).join(""))'
        )
        assert plain == drafted
        drafts_of_plain = 'document.querySelectorAll(".pair .assistant:first-child .draft").length'
        assert page.run(drafts_of_plain) == 0
        assert page.run('document.querySelectorAll("img").length') == 0
        page.screenshot(tmp_path / "page.png")
        page.run('document.getElementById("most").value = 99999')
        page.run('document.getElementById("text").value = "x"')
        page.run('document.getElementById("send").click()')
        page.wait('document.querySelectorAll(".error").length === 1')
    finally:
        page.close()
