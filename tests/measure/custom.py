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


def stage(layers: int, *ms: float, held: float, weights: float = 0.0, **more: Any) -> dict[str, Any]:
    """A stage of a profile, with F, I and W of so many milliseconds and these bytes."""
    passes = {kind: {"median": time, "low": time, "high": time} for kind, time in zip("FIW", ms, strict=True)}
    parts = {"recompute_bytes": 0, "offload_bytes": 0, "vocabulary_bytes": 0}
    sizes = {"activation_bytes": held, "weight_bytes": weights, **parts}
    return {"layers": layers, "passes": passes, "halved": False, "recomputed": 0, **sizes, **more}


def profiled(layers: int = 32, ends: Any = None, **changes: Any) -> dict[str, Any]:
    """A profile as ``tools/profile_passes.py`` writes it, with ``changes`` of its fields.

    Args:
        layers: the model's. Each has F, I and W of 10, 12 and 8 ms, and 2000 bytes, 3 of 4 of which wait for W.
        ends: stages of the embedding and of the output layer; without them these take nothing.
        changes: other values of fields.
    """
    first, last = ends or [stage(0, 0, 0, 0, held=0)] * 2
    middle = stage(layers, 10 * layers, 12 * layers, 8 * layers, held=2000 * layers, weights=1500 * layers)
    model = {"layers": layers, "hidden_size": 64, "heads": 4, "sequence_length": 128, "vocabulary": 512}
    profile = {"version": 2, "device": "a GPU", "model": model, "micro_batch_size": 1, "tensor_parallel": 2}
    profile |= {"context_parallel": 1, "dtype": "bf16", "schedule": "no pipeline", "microbatches": 1, "replicas": 2}
    profile |= {"placement": {"name": "interleaved", "rank_of": [0, 0, 0]}, "iterations": [4, 23], "latencies": []}
    return {**profile, "stages": [first, middle, last], **changes}


def written(path: Path, layers: int = 32, **changes: Any) -> Path:
    """The file of a profile, see :func:`profiled`."""
    path.write_text(json.dumps(profiled(layers, **changes)))
    return path
