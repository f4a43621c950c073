"""Cost files: written by hand, and profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def custom_costs(folder: Path, **fields: Any) -> str:
    """The path of a cost file with these fields."""
    path = folder / f"custom-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps({"version": 3, **fields}))
    return str(path)


PASSES = ("forward", "input_grad", "weight_grad")


def written(path: Path, layers: int = 32, **changes: Any) -> Path:
    """A profile of so many layers, each with F, I and W of 10, 12 and 8 ms, and 3 of 4 bytes that wait for W."""
    times = {name: {"median": s, "low": s, "high": s} for name, s in zip(PASSES, (0.02, 0.024, 0.016), strict=True)}
    profile = {
        "version": 1,
        "device": "a GPU",
        "model": {"layers": layers, "hidden_size": 64, "heads": 4, "sequence_length": 128},
        "micro_batch_size": 1,
        "tensor_parallel": 2,
        "chunk": {"layers": 2, **times, "activation_bytes": 4000, "weight_bytes": 3000},
    }
    path.write_text(json.dumps(profile | changes))
    return path
