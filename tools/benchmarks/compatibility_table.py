#!/usr/bin/env python3
"""Writes docs/compatibility.md from test results: which of Megatron's features work under which schedule.

    pytest tests/integration --full-matrix --features-to docs/compatibility.json
    python -m tools.benchmarks.compatibility_table

``scripts/run_compatibility.sh`` does both. A test compares the table with the tests that there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.schedules.utils.output_files import write_text

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCHEDULES = ("zb-1p", "v-min", "v-half", "v-zb", "adaptive", "interleaved-1f1b")
ANY = "any"

HEAD = """# What works with what

Every feature of Megatron's below was trained under every schedule and by stock Megatron's own 1F1B with the same flags,
and compared: losses to 1e-6 in fp32, gradients or weights equal to the bit where the arithmetic is the same. Written by
`scripts/run_compatibility.sh` from the tests, which say what exactly is compared; the tests run on CPUs over gloo.
Dropout draws the masks of stock where layers lie as in stock's run (`zb-1p`), and others elsewhere: there losses are
compared roughly, and a resumed job to the bit. Context parallelism, multi-latent attention and packed samples need
Transformer Engine's attention, for which both sides have one in plain torch here.

"""

GPU_HEAD = """
## Needs a GPU

Not run by these tests, for want of kernels on a CPU:

"""

# What a CPU cannot show, with what there is of tests.
NEEDS_GPU = {
    "Transformer Engine's linears under a split backward": "built from its source and tested on a stand-in with its "
    "interface (`test_split_te.py`); `test_te_itself.py` runs where Transformer Engine and a GPU are",
    "grouped GEMM experts (`--moe-grouped-gemm`)": "Transformer Engine's, as above",
    "gradient accumulation fusion": "Apex's kernel; tested on a stand-in (`test_split_linear.py`)",
    "NCCL": "programs are proved to end on channels without buffers, in NCCL's order; run over gloo only",
}


def rows(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table's body: a line for each feature, in the order of the tests."""
    lines = []
    for feature in dict.fromkeys(found["feature"] for found in results):
        own = [found for found in results if found["feature"] == feature and "refusal" not in found]
        if not own:
            continue
        cells = [_cell([found for found in own if found["schedule"] == schedule]) for schedule in SCHEDULES]
        lines.append(f"| {feature} | {' | '.join(cells)} | {_tests(own)} |")
    return "\n".join(lines)


def refused(results: Sequence[dict[str, Any]]) -> str:
    """Returns a line for everything that is refused at start-up, with its message."""
    lines = []
    for found in results:
        if "refusal" in found:
            line = found["refusal"].replace("|", "\\|")
            lines.append(f"| {found['feature']} | {found['schedule']} | {line} | {_tests([found])} |")
    return "\n".join(lines)


def _cell(found: Sequence[dict[str, Any]]) -> str:
    outcomes = {each.get("outcome") for each in found}
    if not found:
        return ""
    return "works" if outcomes == {"passed"} else "**fails**"


def _tests(found: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(each["test"].rpartition("/")[2].partition("[")[0] for each in found)
    return "<br>".join(f"`{name}`" for name in names)


def written(results: Sequence[dict[str, Any]]) -> str:
    """Returns the page."""
    table = f"| feature | {' | '.join(f'`{name}`' for name in SCHEDULES)} | test |\n|{'---|' * (len(SCHEDULES) + 2)}\n"
    page = HEAD + table + rows(results) + "\n"
    if no := refused(results):
        page += "\n## Refused at start-up\n\n| what | under | what it says | test |\n|---|---|---|---|\n" + no + "\n"
    return page + GPU_HEAD + "\n".join(f"- {what}: {why}." for what, why in NEEDS_GPU.items()) + "\n"


def main() -> None:
    """Reads the results and writes the page."""
    results = json.loads((DOCS / "compatibility.json").read_text())
    write_text(DOCS / "compatibility.md", written(results))
    failed = [found["test"] for found in results if found.get("outcome") not in ("passed", "skipped")]
    print(f"{len(results)} results, {len(failed)} failed" + "".join(f"\n  {test}" for test in failed))


if __name__ == "__main__":
    main()
