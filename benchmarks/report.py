"""What was measured: a table for the terminal and for Markdown, JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.rounds import Result

mpl.use("Agg")

import matplotlib.pyplot as plt


def verdict(result: Result) -> str:
    """What the median must reach, and whether it does."""
    if result.holds is None:
        return ""
    asked = f"at least {result.at_least:g}" if result.at_least is not None else f"at most {result.at_most:g}"
    return f"{asked}: {'yes' if result.holds else 'NO'}"


def line(result: Result) -> str:
    """One line of the terminal's table."""
    spread = f"{min(result.ratios):.2f} to {max(result.ratios):.2f}"
    figure = f"{result.median:.3g}{'' if result.unit == 'x' else ' ' + result.unit}"
    return f"{figure:>8}  ({spread})  {result.measure}, against {result.against}  {verdict(result)}"


def markdown(results: Sequence[Result], machine: dict[str, Any]) -> str:
    """The same as a Markdown table."""
    where = ", ".join(f"{key.replace('_gib', ' (GiB)')} {value}" for key, value in machine.items())
    rows = [
        f"Measured on: {where}.",
        "",
        "| measure | against | median | least to most | asked |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| {r.measure} | {r.against} | {r.median:.3g} | {min(r.ratios):.2f} to {max(r.ratios):.2f} | {verdict(r)} |"
        for r in results
    ]
    return "\n".join(rows) + "\n"


def write(folder: Path, results: Sequence[Result], machine: dict[str, Any]) -> None:
    """`bench.json`, `bench.md`, `bench.svg` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine, "results": [result.as_dict() for result in results]}
    (folder / "bench.json").write_text(json.dumps(_rounded(found), indent=1) + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(markdown(results, machine), encoding="utf-8")
    plot(folder / "bench.svg", results)


def plot(path: Path, results: Sequence[Result]) -> None:
    """Ratios of speeds as bars, with the spread of the rounds; growth as lines."""
    speeds = [r for r in results if r.at_least is not None]
    growth = [r for r in results if r.shown and all(key.isdigit() for key in r.shown)]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 0.28 * max(len(speeds), 12) + 1.2), width_ratios=(3, 2), layout="constrained"
    )
    for i, r in enumerate(reversed(speeds)):
        color = "#2f7d6d" if r.holds else "#b4532a"
        left.barh(i, r.median, color=color, height=0.7)
        left.plot([min(r.ratios), max(r.ratios)], [i, i], color="#22302d", linewidth=1)
        left.plot([r.at_least, r.at_least], [i - 0.4, i + 0.4], color="#22302d", linewidth=2)
    left.set_yticks(range(len(speeds)), [f"{r.measure}\nagainst {r.against}" for r in reversed(speeds)], fontsize=5.5)
    left.set_xlabel("times as fast (mark: asked; line: least to most)", fontsize=7)
    left.set_xlim(0, min(4.0, max([1.2, *(r.median * 1.1 for r in speeds)])))
    for r in growth:
        sizes = sorted(map(int, r.shown))
        right.plot(sizes, [1e3 * r.shown[str(n)] for n in sizes], marker="o", markersize=3, label=r.measure)
    right.set(xscale="log", yscale="log")
    right.set_xlabel("records or index rows", fontsize=7)
    right.set_ylabel("ms", fontsize=7)
    if growth:
        right.legend(fontsize=6)
    for axes in (left, right):
        axes.tick_params(labelsize=6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
