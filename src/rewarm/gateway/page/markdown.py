"""A reply's Markdown as HTML that can do nothing: no HTML of the model's own, no images, only plain links.

An image would be fetched by the browser, and its address could carry the conversation to another host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

_LINK = {"target": "_blank", "rel": "noopener noreferrer nofollow"}


def to_html(text: str) -> str:
    """`text` as HTML; tags in it are shown as they were written."""
    return str(_renderer.render(text))


class _Renderer(RendererHTML):
    def link_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        tokens[index].attrs.update(_LINK)
        return self.renderToken(tokens, index, options, env)


_renderer = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
_renderer.disable("image")
