"""A reply can format its text, and can do nothing else."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")

from rewarm.gateway.page.markdown import to_html

ALLOWED = {"a", "blockquote", "br", "code", "em", "hr", "li", "ol", "p", "pre", "s", "strong", "ul"}
ALLOWED |= {"div", "span", "table", "tbody", "td", "th", "thead", "tr"} | {f"h{level}" for level in range(1, 7)}


def tags(html: str) -> set[str]:
    return set(re.findall(r"<\s*/?\s*([a-zA-Z!][\w-]*)", html))


def test_markdown_is_rendered() -> None:
    html = to_html("# T\n\n- a\n- **b**\n\n|x|y|\n|-|-|\n|1|2|\n\n```py\na<b\n```\n\n~~c~~ [l](https://example.org)")
    assert tags(html) <= ALLOWED
    assert {"h1", "ul", "strong", "table", "pre", "s", "a"} <= tags(html)
    assert "a&lt;b" in re.sub("</?span[^>]*>", "", html)
    assert 'rel="noopener noreferrer nofollow"' in html


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "a <b onclick=x>c</b>",
        "<div>\n\n<iframe src='http://outside.example'></iframe>\n\n</div>",
        "<!-- <style>*{background:url(http://outside.example)}</style> -->",
        "![a](http://outside.example/b.png)",
        "![a][r]\n\n[r]: http://outside.example/b.png",
        "[a](javascript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "<javascript:alert(1)>",
        '[a](https://example.org "x\\" onmouseover=\\"alert(1)")',
        "| <svg onload=alert(1)> |\n|-|\n| <x> |",
        "```<script>\nx\n```",
        "&lt;script&gt;",
    ],
)
def test_nothing_active_comes_through(text: str) -> None:
    html = to_html(text)
    assert tags(html) <= ALLOWED
    for attributes in re.findall(r"<\w+\s([^>]*)>", html):
        assert not re.search(r"(?:^|\s)on\w+\s*=", re.sub(r'"[^"]*"', '""', attributes))
        assert "javascript:" not in attributes
        assert "data:" not in attributes


@pytest.mark.parametrize("text", ["", "**", "```", "[", "| a", "<", "\x00", "* " * 500, "> " * 500, "[" * 2000])
def test_an_unfinished_reply_is_rendered_too(text: str) -> None:
    assert isinstance(to_html(text), str)
