"""Searches parallel sizes, microbatch sizes and methods for the fastest setting that fits in memory.

The search is exhaustive: it tries settings in the order of their lower bounds, and stops when the next bound is above
the best time found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

from megatron.schedules.estimate.device_memory import RankMemory, usable
from megatron.schedules.estimate.devices import Device
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.utils.errors import PlanError
from tools._iteration import (
    Estimate,
    Setting,
    estimate,
    figures,
    least_memory,
    least_seconds,
    mfu,
    planned,
    seconds_of,
)
from tools._methods import Method

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MORE_GPUS = 2, 4, 8, 16
# Settings of each that are planned.
_TRIED = 3
# Search time of each adaptive plan, and of the fastest ones.
_SEARCH_SECONDS, _FINAL_SECONDS = 0.5, 2.0


@dataclass(frozen=True)
class Question:
    """The training run to search settings for.

    Args:
        model, device: the model and the GPU.
        gpus: number of GPUs.
        global_batch: samples of an iteration.
        correction: correction of the roofline, from a measured profile.

    Raises:
        PlanError: the device cannot compute the model's FP8 or FP4.
    """

    model: Model
    device: Device
    gpus: int
    global_batch: int
    correction: PassTimes = ONES

    def __post_init__(self) -> None:
        quantized, device = self.model.whole.quantized, self.device
        if quantized is not None and quantized.recipe not in device.recipes:
            known = ", ".join(device.recipes)
            raise PlanError(
                f"{quantized.recipe} does not run on {device.name}, which "
                + (f"has {known}: give one of them as --fp8-recipe" if known else "has no FP8: leave out --fp8-format"),
                "model",
            )

    def settings(self, method: Method) -> Iterator[Setting]:
        """Yields all settings of ``method``, including those that do not fit."""
        gpus, rest = divmod(self.gpus, self.model.args.context_parallel_size)
        for tensor in () if rest else _divisors(gpus):
            for pipeline in _divisors(gpus // tensor):
                data = gpus // tensor // pipeline
                for micro_batch in _MICRO_BATCHES:
                    sizes = data, tensor, pipeline, micro_batch, self.global_batch
                    setting = Setting(method, self.model, self.device, *sizes, self.correction)
                    if pipeline > 1 and not setting.wrong:
                        yield setting


class Short(NamedTuple):
    """The setting with the least memory, if none fits.

    Args:
        setting: the setting.
        rank: pipeline rank with the most memory.
        held: memory of that rank; a lower bound unless ``planned``.
        planned: true if there is a plan.
        gpus: factor on the number of GPUs with which a plan of some setting fits; None if 16 is not enough.
    """

    setting: Setting
    rank: int
    held: RankMemory
    planned: bool
    gpus: int | None = None

    @property
    def memory(self) -> float:
        """Bytes on the fullest GPU."""
        return self.held.device


@dataclass
class Found:
    """Result for one method.

    Args:
        method: the method.
        best: settings that fit, the fastest first.
        tried: number of settings planned.
        short: if none fits, the setting with the least memory; None if there is no setting.
    """

    method: Method
    best: list[Estimate] = field(default_factory=list)
    tried: int = 0
    short: Short | None = None


def search(question: Question, method: Method, top: int = 1) -> Found:
    """Finds the ``top`` fastest settings of ``method`` that fit in the device's memory."""
    found = Found(method)
    for least, setting in _by_promise(question, method):
        if len(found.best) >= top and mfu(setting, least) <= found.best[-1].mfu:
            break
        try:
            job = planned(setting, search_seconds=_SEARCH_SECONDS)
        except PlanError:  # too little memory for any plan, or too few microbatches for this schedule
            continue
        found.tried += 1
        if len(found.best) >= top and mfu(setting, seconds_of(setting, job)) <= found.best[-1].mfu:
            continue  # whether it fits does not matter
        result = figures(setting, job)
        if result.fits:
            found.best = sorted([*found.best, result], key=lambda each: -each.mfu)[:top]
        elif not found.best and (found.short is None or result.memory < found.short.memory):
            rank = max(range(len(result.ranks)), key=lambda rank: result.ranks[rank].device)
            found.short = Short(setting, rank, result.ranks[rank], planned=True)
    if not found.best:
        found.short = _short(question, found)
    if method.schedule == "adaptive":
        found.best = sorted(map(_longer, found.best), key=lambda each: -each.mfu)
    return found


def _longer(found: Estimate) -> Estimate:
    """Plans ``found`` again with a longer search, if that can improve it."""
    longer = estimate(found.setting, search_seconds=_FINAL_SECONDS)
    return longer if longer.fits and longer.mfu > found.mfu else found


def _short(question: Question, found: Found) -> Short | None:
    """Returns the setting of ``found``'s method with the least memory, and how many more GPUs might make it fit."""
    short = found.short
    if short is None:
        every = [(setting, *least_memory(setting)) for setting in question.settings(found.method)]
        if not every:
            return None
        setting, rank, held = min(every, key=lambda each: each[2].device)
        short = Short(setting, rank, held, planned=False)
    room = usable(question.device.memory)
    for times in _MORE_GPUS:
        larger = replace(question, gpus=times * question.gpus)
        if any(_fits(setting) for setting in _least(larger, found.method, room)):
            return short._replace(gpus=times)
    return short


def _least(question: Question, method: Method, room: float) -> list[Setting]:
    """Returns the settings with least memory, if one microbatch fits ``room`` bytes."""
    held = ((least_memory(setting)[1].device, setting) for setting in question.settings(method))
    return [setting for _, setting in sorted((each for each in held if each[0] <= room), key=itemgetter(0))[:_TRIED]]


def _fits(setting: Setting) -> bool:
    try:
        return estimate(setting, search_seconds=_SEARCH_SECONDS).fits
    except PlanError:
        return False


def fastest(found: Sequence[Found]) -> list[Estimate]:
    """Returns all settings found, the fastest first."""
    return sorted((each for of_method in found for each in of_method.best), key=lambda each: -each.mfu)


def _by_promise(question: Question, method: Method) -> list[tuple[float, Setting]]:
    """Returns lower bounds and settings that have memory for some schedule, the lowest bound first."""
    promising = [(least_seconds(setting), setting) for setting in question.settings(method)]
    return sorted((each for each in promising if each[0] < math.inf), key=lambda each: each[0])


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
