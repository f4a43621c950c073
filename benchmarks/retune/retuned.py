"""What a search over settings found for a recipe: NVIDIA's setting, the best of stock, and the best of ours."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.schedules.estimate.calibration import CALIBRATED
from megatron.schedules.estimate.devices import GIB
from tools._answers import Answer
from tools._iteration import Estimate
from tools._tables import recompute_of, sizes_of

NUMBERS = f"{zlib.crc32(repr(CALIBRATED).encode()):08x}"
"""Checksum of what estimates are computed with."""


@dataclass(frozen=True)
class Figures:
    """A setting and its estimate.

    Args:
        schedule: the schedule's flag.
        sizes: parallel sizes and samples of a microbatch.
        microbatches: microbatches of an iteration.
        recompute: what Megatron recomputes; empty for nothing.
        seconds: iteration time.
        mfu: model FLOPs utilization, of the peak in the recipe's precision.
        bubble: share of the pipeline's time in which an average rank is idle.
        gib: memory of the fullest rank, GiB.
        layers: layers of each stage.
    """

    schedule: str
    sizes: str
    microbatches: int
    recompute: str
    seconds: float
    mfu: float
    bubble: float
    gib: float
    layers: str

    @classmethod
    def of(cls, found: Estimate | None) -> Figures | None:
        """Returns the figures of an estimate; None for None."""
        if found is None:
            return None
        setting = found.setting
        return cls(
            setting.choice.text if setting.pipeline > 1 else "no pipeline",
            sizes_of(setting),
            setting.microbatches,
            recompute_of(setting),
            round(found.seconds, 3),
            round(found.mfu, 4),
            round(found.bubble, 4),
            round(found.memory / GIB, 1),
            ",".join(map(str, found.outcome.layers)),
        )


@dataclass(frozen=True)
class Retuned:
    """What was found for a recipe.

    Args:
        name: the recipe.
        gpus, device, gib: GPUs, their name, and memory of each, GiB.
        precision: precision of the linears.
        own: NVIDIA's setting.
        stock, ours: the fastest settings of stock, NVIDIA's included, and of our schedules; None if nothing fits.
        beside: stock's fastest setting with the sizes of ``ours``, also if it does not fit.
        over_own, over_stock: claimed speed of ``ours`` over these two.
        is_limited: true if no more is claimed because the bubble of ``beside`` is smaller.
        left_out: Megatron's arguments that our schedules lose.
        unknown: parts of the model that the estimate leaves out.
        gap: part of the time by which a setting of ours that was not planned might be faster.
        numbers: :data:`NUMBERS` when the recipe was searched; empty for results from before they were recorded.
    """

    name: str
    gpus: int
    device: str
    gib: float
    precision: str
    own: Figures | None
    stock: Figures | None
    ours: Figures | None
    beside: Figures | None
    over_own: float | None
    over_stock: float | None
    is_limited: bool
    left_out: tuple[str, ...]
    unknown: tuple[str, ...]
    gap: float
    numbers: str = ""

    @classmethod
    def of(cls, answer: Answer) -> Retuned:
        """Returns the record of an answer."""
        question = answer.question
        # What fits goes before.
        beside = min(answer.alike, key=lambda each: (not each.fits, each.seconds), default=None)
        ours = [found for found in answer.found if not found.method.is_stock and found.best]
        return cls(
            question.model.name.removesuffix("_config"),
            question.gpus,
            question.device.name.partition("-")[0],
            round(question.device.memory / GIB, 1),
            str(question.model.whole.quantized or "bf16"),
            Figures.of(answer.own),
            Figures.of(answer.stock),
            Figures.of(answer.ours),
            Figures.of(beside),
            answer.over_own and round(answer.over_own, 3),
            answer.over_stock and round(answer.over_stock, 3),
            answer.same is not None,
            tuple(sorted(answer.start.left_out)),
            answer.start.unknown,
            round(max((found.gap for found in ours), default=0.0), 3),
            NUMBERS,
        )

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Retuned:
        """Returns what a record of a JSON file holds."""
        names = "own", "stock", "ours", "beside"
        figures = {name: record[name] and Figures(**record[name]) for name in names}
        lists = {name: tuple(record[name]) for name in ("left_out", "unknown")}
        return cls(**{**record, **figures, **lists})
