"""The example for writers of adapters in `docs/adapters.md` runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

DOC = Path(__file__).parents[1] / "docs" / "adapters.md"


def test_the_example_of_a_seam_runs(tmp_path: Path) -> None:
    text = DOC.read_text(encoding="utf-8")
    section = text[text.index("**The seam.**") : text.index("## mlx-lm")]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(code.replace("/tmp/an-example-of-a-cache", str(tmp_path / "kv")), {})
