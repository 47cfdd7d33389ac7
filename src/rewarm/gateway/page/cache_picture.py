"""The picture of which conversations share which prefixes: a bar each, light as far as it is shared, branches below."""

from __future__ import annotations

import html

from rewarm.gateway.branches import Branch, Picture
from rewarm.gateway.page.cache_words import share, tokens

_ROW = 2.25
"""Height of a row, in rem."""


def draw(pictures: list[Picture]) -> str:
    """HTML of the pictures; a list, so that it reads as one where it cannot be seen."""
    return "".join(_draw_one(picture) for picture in pictures)


def _draw_one(picture: Picture) -> str:
    rows = "".join(_row(picture, at) for at in range(len(picture.branches)))
    name = html.escape(picture.model)
    return f'<h3 class="rc-tree-model">{name}</h3><ul class="rc-tree" aria-label="{name}">{rows}</ul>'


def _row(picture: Picture, at: int) -> str:
    branch = picture.branches[at]
    n_tokens = branch.row.entry.n_tokens
    whole, shared = share(n_tokens, picture.n_tokens), share(branch.fork_tokens, picture.n_tokens)
    join = ""
    if branch.parent_at is not None:
        height = (at - branch.parent_at) * _ROW
        join = f'<span class="rc-join" style="left:{shared:.2%};height:{height:g}rem" aria-hidden="true"></span>'
    bars = (
        f'<span class="rc-bar-own" style="left:{shared:.2%};width:{max(0.004, whole - shared):.2%}"></span>'
        f'<span class="rc-bar-shared" style="width:{shared:.2%}"></span>'
    )
    title = html.escape(branch.row.title)
    return (
        f'<li class="rc-branch" title="{title}: {html.escape(told(branch))}">'
        f'<span class="rc-branch-name" style="padding-left:{min(branch.depth, 4) * 0.8:g}rem">{title}</span>'
        f'<span class="rc-bars" aria-hidden="true">{bars}{join}</span>'
        f'<span class="rc-branch-told" aria-hidden="true">{_numbers(branch)}</span>'
        f'<span class="rw-visually-hidden">{html.escape(told(branch))}</span></li>'
    )


def _numbers(branch: Branch) -> str:
    said = tokens(branch.row.entry.n_tokens)
    return f"{said}, {branch.fork_tokens:,} shared" if branch.fork_tokens else said


def told(branch: Branch) -> str:
    """What the bars of a conversation say, in words."""
    said = tokens(branch.row.entry.n_tokens)
    if not branch.fork_tokens:
        return said
    return f"{said}, the first {branch.fork_tokens:,} shared with “{branch.of}”"
