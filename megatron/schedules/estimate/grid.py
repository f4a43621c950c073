"""The search over data, tensor and pipeline parallel sizes, microbatch sizes and methods for what is fastest and fits.

Nothing is left out for want of time: settings are tried in the order of what no schedule could do better than, and a
method is done when that falls below what it has found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron.schedules.estimate.device_memory import RankMemory
from megatron.schedules.estimate.hardware import Device
from megatron.schedules.estimate.iteration import (
    RESERVED,
    Estimate,
    Method,
    Setting,
    estimate,
    least_memory,
    least_seconds,
    mfu,
)
from megatron.schedules.estimate.models import Model
from megatron.schedules.estimate.times import ONES, PassTimes
from megatron.schedules.utils.errors import PlanError

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MORE_GPUS = 2, 4, 8, 16
# Of an adaptive plan, for there are many; and of those that were the fastest.
_SEARCH_SECONDS, _FINAL_SECONDS = 0.5, 2.0


@dataclass(frozen=True)
class Question:
    """What is to be trained on what.

    Args:
        model, device: the model and the GPU.
        gpus: how many.
        global_batch: samples of an iteration.
        correction: of the roofline, by a measured profile.
    """

    model: Model
    device: Device
    gpus: int
    global_batch: int
    correction: PassTimes = ONES

    def settings(self, method: Method) -> Iterator[Setting]:
        """All that can be run with ``method``, whether they fit or not."""
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
    """The setting that needs least of those that do not fit.

    Args:
        setting: the setting.
        rank: its pipeline rank that holds most, and what that holds; at least, where ``planned`` is false.
        held: see there.
        planned: whether there is a plan of it.
        gpus: with how many times as many GPUs one microbatch of some setting fits; None where 16 are not enough.
    """

    setting: Setting
    rank: int
    held: RankMemory
    planned: bool
    gpus: int | None = None

    @property
    def memory(self) -> float:
        """Bytes on the GPU that needs most, with what is set aside."""
        return RESERVED + self.held.device


@dataclass
class Found:
    """What the search gave for one method.

    Args:
        method: the method.
        best: settings that fit, the fastest first.
        tried: settings that were planned.
        short: where none fits, what keeps the nearest setting from it; None where there is no setting.
    """

    method: Method
    best: list[Estimate] = field(default_factory=list)
    tried: int = 0
    short: Short | None = None


def search(question: Question, method: Method, top: int = 1, tick: Callable[[], None] = lambda: None) -> Found:
    """The ``top`` fastest settings of ``method`` that fit in the device's memory.

    Args:
        question: what is to be trained.
        method: how.
        top: how many to find.
        tick: called after each setting that was planned.
    """
    found = Found(method)
    for least, setting in _by_promise(question, method):
        if len(found.best) >= top and mfu(setting, least) <= found.best[-1].mfu:
            break
        try:
            result = estimate(setting, search_seconds=_SEARCH_SECONDS)
        except PlanError:  # too little memory for any plan, or too few microbatches for this schedule
            continue
        found.tried += 1
        tick()
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
    """The setting of ``found`` planned with more time, where that gains."""
    again = estimate(found.setting, search_seconds=_FINAL_SECONDS)
    return again if again.fits and again.mfu > found.mfu else found


def _short(question: Question, found: Found) -> Short | None:
    """What keeps ``found``'s method from fitting, and how many GPUs might change that."""
    short = found.short
    if short is None:
        every = [(setting, *least_memory(setting)) for setting in question.settings(found.method)]
        if not every:
            return None
        setting, rank, held = min(every, key=lambda each: each[2].device)
        short = Short(setting, rank, held, planned=False)
    room = question.device.memory - RESERVED
    for times in _MORE_GPUS:
        larger = replace(question, gpus=times * question.gpus)
        if any(least_memory(setting)[1].device <= room for setting in larger.settings(found.method)):
            return short._replace(gpus=times)
    return short


def fastest(found: Sequence[Found]) -> list[Estimate]:
    """All settings found, the fastest first."""
    return sorted((each for of_method in found for each in of_method.best), key=lambda each: -each.mfu)


def _by_promise(question: Question, method: Method) -> list[tuple[float, Setting]]:
    """Settings that something fits in, each with seconds that nothing that fits is faster than; the best first."""
    promising = [(least_seconds(setting), setting) for setting in question.settings(method)]
    return sorted((each for each in promising if each[0] < math.inf), key=lambda each: each[0])


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
