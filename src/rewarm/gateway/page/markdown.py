"""A reply's Markdown as HTML that can do nothing: no HTML of the model's own, no images, only plain links.

An image would be fetched by the browser, and its address could carry the conversation to another host.
Code is coloured here, by Pygments, so that the browser needs no library for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

_LINK = {"target": "_blank", "rel": "noopener noreferrer nofollow"}
_LANGUAGE_CHARS = 24
_COLOURED_CHARS = 40_000
"""Longer code is shown plain: colouring it would hold up everything else."""


def to_html(text: str) -> str:
    """`text` as HTML; tags in it are shown as they were written."""
    return str(_renderer.render(text))


class _Renderer(RendererHTML):
    def link_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        tokens[index].attrs.update(_LINK)
        return self.renderToken(tokens, index, options, env)

    def fence(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        info = tokens[index].info.split()
        return _code(tokens[index].content, info[0] if info else "")

    def code_block(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return _code(tokens[index].content, "")


def _code(code: str, language: str) -> str:
    """A block of code under a line with its language; the page's script adds the button that copies it."""
    head = f'<div class="rw-code-head"><span>{escape(language[:_LANGUAGE_CHARS])}</span></div>'
    return f'<div class="rw-code">{head}<pre><code>{_coloured(code, language[:_LANGUAGE_CHARS])}</code></pre></div>\n'


@functools.lru_cache(maxsize=256)
def _coloured(code: str, language: str) -> str:
    if not language or len(code) > _COLOURED_CHARS:
        return escape(code)
    try:
        lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return escape(code)
    return str(highlight(code, lexer, _formatter))


_formatter = HtmlFormatter(nowrap=True, classprefix="rwc-")
_renderer = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
_renderer.disable("image")
