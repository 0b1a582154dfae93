"""Bring the generated parts of README.md up to date: the tables of options, and the measured table.

    python tools/update_readme.py                       the options, from the configuration dataclasses
    python tools/update_readme.py demo.json "MACHINE"   also the measured table, from the output of kvist demo --json

Generated parts stand between ``<!-- NAME -->`` and ``<!-- end -->``. Needs the package to be installed.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from kvist.cli.options import markdown_table
from kvist.config import EngineConfig, ServerConfig

README = Path(__file__).resolve().parents[1] / "README.md"


def measured_table(demo: dict[str, Any], machine: str) -> str:  # Any: JSON values
    """Return the table of one run of the demo, and what it was run on."""
    lines = [
        "| step | TTFT | against cold | prompt tokens | reused | computed |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for step in demo["steps"]:
        count = len(step["answers"])
        ttft_s = statistics.median(step["ttft_s"])
        prompt, reused = sum(step["prompt_tokens"]), sum(step["reused_tokens"])
        ratio = "" if step["name"] == "cold" else f"{demo['cold_ttft_s'] / ttft_s:.1f}x"
        name = step["name"] if count == 1 else f"{step['name']}, {count} at once"
        shown = f"{ttft_s * 1000:,.0f} ms"
        lines.append(
            f"| {name} | {shown} | {ratio} | {prompt:,} | {reused:,} | {prompt - reused:,} |"
        )
    speed = demo["fanout_output_tokens_per_s"]
    note = (
        f"One run of {demo['model']} on {machine}, with a document of {demo['document_bytes'] / 1000:.0f} kB. "
        f"The eight answers came at {speed:.0f} tokens/s together."
    )
    lines += ["", note]
    return "\n".join(lines)


def replaced(text: str, name: str, content: str) -> str:
    """Return the text with the part called ``name`` replaced; refuse when it is not there exactly once."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    changed, count = pattern.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if count != 1:
        sys.exit(f"README.md should hold one part <!-- {name} -->, found {count}")
    return changed


def main() -> None:
    """Rewrite README.md in place."""
    text = README.read_text(encoding="utf-8")
    text = replaced(text, "engine options", markdown_table(EngineConfig))
    text = replaced(text, "server options", markdown_table(ServerConfig))
    if len(sys.argv) == 3:
        demo = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()[-1])
        text = replaced(text, "measured", measured_table(demo, sys.argv[2]))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
