#!/usr/bin/env python3
"""Writes docs/compatibility.md from test results: which of Megatron's features work under which schedule.

    pytest tests/integration --nightly --features-to docs/compatibility.json
    python -m benchmarks.compatibility_table

``scripts/run_compatibility.sh`` does both. A test compares the table with the tests that there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.schedules.utils.output_files import write_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCHEDULES = ("zb-1p", "v-min", "v-half", "v-zb", "adaptive", "interleaved-1f1b")
ANY = "any"
GPT, HYBRID = "GPT", "hybrid"

HEAD = """# Compatibility

Which features of Megatron work under which schedule. Each was trained under the schedules in the table, and by
stock Megatron's own 1F1B with the same flags. Compared are losses, to 1e-6 in fp32, and gradients or weights, to the
bit if the arithmetic is the same. The test in the last column says what exactly. The tests run on CPUs over gloo;
`scripts/run_compatibility.sh` writes this page from their results.

- Six of the ten schedules by name are in the table. For a feature it matters where the stages are, and whether the
  backward is split. The six have every kind: one chunk per rank (`zb-1p`), two in a V (`v-min`, `v-half`, `v-zb`) and
  four in a zigzag (`adaptive`) with a split backward, and two interleaved chunks with a whole one
  (`interleaved-1f1b`). `1f1b` and `eager-1f1b` have the stages of `zb-1p` and a whole backward, `1f1b-v` has those of
  `v-zb` and a whole backward. `zb-2p` differs from `zb-1p` only in the order of passes. `auto` runs one of the ten.
- The columns of schedules are of a GPT, which has Megatron's local layers. The last but one is of the *hybrid* model of
  the same layers, one symbol each (`--hybrid-layer-pattern`), which has Transformer Engine's: it names the schedules.
  Features are trained under `zb-1p` (one chunk per rank) and `v-half` (two in a V). Many that depend on which layers a
  stage holds, and on which ranks, have one of the other four too, so that each of these meets some features. Packed
  samples and context parallelism are in bf16.
- `test_same_result.py` trains all ten with tensor, sequence and data parallelism and with the distributed optimizer.
- If more than its linear uses a weight, such as a regularizer, its gradient comes in two parts, one in I and one in W.
  Sums have another order, and hooks of the weight see the two parts
  ([troubleshooting](troubleshooting.md#hooks-that-read-or-change-gradients)).
- Dropout draws the same masks as stock if layers are on the same ranks (`zb-1p`), and other masks otherwise. Then
  losses are compared roughly, and a resumed job to the bit.
- Context parallelism, multi-latent attention and packed samples need Transformer Engine's attention. Here both sides
  use one in plain torch.

"""

# Why there is no result of hybrid models.
NOT_OF_HYBRID = {
    "documents kept apart (--reset-attention-mask)": "not read: its attention takes no mask "
    "([upstream](upstream.md)). Pack the documents",
}

GPU_HEAD = """
## Needs a GPU

Not run by these tests, because there are no kernels for CPUs:

"""

# What a CPU cannot show, with what there is of tests.
NEEDS_GPU = {
    "Transformer Engine's kernels, in bf16, FP8 and FP4": "its own Python is tested over plain torch "
    "(`test_te_itself.py`, `test_te_fp8.py`, `test_te_jobs.py`)",
    "gradient accumulation fusion": "kernels of Apex or Transformer Engine; tested on stand-ins "
    "(`test_split_linear.py`, `test_te_itself.py`)",
    "NCCL": "programs are proved to end on channels without buffers, in NCCL's order; run over gloo, a few jobs over "
    "NCCL (`tests/gpu`)",
}


def rows(results: Sequence[dict[str, Any]]) -> str:
    """Returns the table's body: a line for each feature, in the order of the tests."""
    lines = []
    for feature in dict.fromkeys(found["feature"] for found in results):
        own = [found for found in results if found["feature"] == feature and "refusal" not in found]
        if not own:
            continue
        of_gpt, of_hybrid = ([found for found in own if found["model"] == model] for model in (GPT, HYBRID))
        cells = [_cell([found for found in of_gpt if found["schedule"] == schedule]) for schedule in SCHEDULES]
        hybrid = _under(of_hybrid) or NOT_OF_HYBRID.get(feature, "")
        lines.append(f"| {feature} | {' | '.join(cells)} | {hybrid} | {_tests(own)} |")
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


def _under(found: Sequence[dict[str, Any]]) -> str:
    """Returns how a feature goes, with the schedules if they are not all."""
    outcome = _cell(found)
    schedules = {each["schedule"] for each in found}
    named = ", ".join(f"`{name}`" for name in SCHEDULES if name in schedules)
    return outcome if not found or schedules.issuperset(SCHEDULES) else f"{outcome}: {named}"


def _tests(found: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(each["test"].rpartition("/")[2].partition("[")[0] for each in found)
    return "<br>".join(f"`{name}`" for name in names)


def written(results: Sequence[dict[str, Any]]) -> str:
    """Returns the page."""
    columns = ["feature", *(f"`{name}`" for name in SCHEDULES), "hybrid model", "test"]
    table = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
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
