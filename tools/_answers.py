"""Results of a search beside the user's own setting and the best that stock Megatron has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace

from megatron.schedules.utils.progress import Parts, Progress, unheard
from tools._grid import Found, fastest, search_all, whole
from tools._iteration import Estimate
from tools._job_specs import MOST_WITH_A_LARGER_BUBBLE
from tools._methods import INTERLEAVED, ONE_F_ONE_B, Method
from tools._question import Question
from tools._setting import Setting
from tools._start import Start

# Share of the time that the search takes, and that of a plan of stock's in the comparison.
_SEARCH, _EACH = 0.9, 0.125


@dataclass(frozen=True)
class Answer:
    """Results of all methods for one training run.

    Args:
        start: what was searched.
        found: results of each method.
        own: the user's own setting; None without one, or if it has no plan.
        stock: the fastest setting of stock, the user's own included; None if nothing fits.
        ours: the fastest setting of our schedules; None if nothing fits.
        least: least iteration time of ``ours`` that is claimed, seconds.
        same: stock's setting with the sizes of ``ours`` because of which no less is claimed; None without one.
        alike: stock's settings with the sizes of ``ours``, also those that do not fit.
    """

    start: Start
    found: Sequence[Found]
    own: Estimate | None = None
    stock: Estimate | None = None
    ours: Estimate | None = None
    least: float = 0.0
    same: Estimate | None = None
    alike: Sequence[Estimate] = ()

    @property
    def question(self) -> Question:
        """The training run."""
        return self.start.question

    @property
    def over_own(self) -> float | None:
        """Speed of ``ours`` over that of the user's own setting, as claimed."""
        return None if self.own is None or self.ours is None else self.own.seconds / self.least

    @property
    def over_stock(self) -> float | None:
        """Speed of ``ours`` over that of the best of stock, as claimed."""
        return None if self.stock is None or self.ours is None else self.stock.seconds / self.least


def answers(
    pool: Executor,
    starts: Sequence[Start],
    methods: Sequence[Method],
    top: int = 1,
    jobs: int = 1,
    progress: Progress = unheard,
) -> list[Answer]:
    """Searches every method for every start, see :func:`.search_all`, and compares what it finds."""
    parts = Parts(progress, 1.0)
    own = [None if start.question.own is None else pool.submit(whole, start.question.own) for start in starts]
    tasks = [(start.question, method) for start in starts for method in methods]
    found, each = search_all(pool, tasks, top, jobs, parts.begin(_SEARCH)), len(methods)
    compared = [
        answered(start, found[at * each : (at + 1) * each], own[at], pool, parts.begin((1 - _SEARCH) / len(starts)))
        for at, start in enumerate(starts)
    ]
    parts.end()
    return compared


def answered(
    start: Start,
    found: Sequence[Found],
    planned: Future[Estimate | None] | None,
    pool: Executor,
    progress: Progress = unheard,
) -> Answer:
    """Compares the settings found with the user's own and with stock's.

    Args:
        start: what was searched.
        found: results of each method.
        planned: the plan of the user's own setting; None without one.
        pool: where stock's plans of the same sizes are made.
        progress: is called after each of them.
    """
    own = None if planned is None else planned.result()
    best = fastest(found)
    stock = [each for each in best if each.setting.method.is_stock] + ([own] if own else [])
    fastest_stock = min(stock, key=lambda each: each.seconds, default=None)
    result = Answer(start, found, own, fastest_stock, least=math.inf)
    for each in best:
        if each.setting.method.is_stock:
            continue
        if each.seconds >= result.least:
            break
        alike = _stock_in_place_of(each.setting, pool, progress)
        least, same = _claimed(each, alike)
        if least < result.least:
            result = replace(result, ours=each, least=least, same=same, alike=alike)
    return result


def _stock_in_place_of(ours: Setting, pool: Executor, progress: Progress) -> list[Estimate]:
    """Plans stock's settings with the same sizes and recompute."""
    planned = []
    for found in pool.map(whole, [each for each in in_place_of(ours) if not each.wrong]):
        progress(_EACH)
        planned += [found] if found is not None else []
    return planned


def _claimed(ours: Estimate, alike: Sequence[Estimate]) -> tuple[float, Estimate | None]:
    """Returns the least iteration time that is claimed, and stock's setting of the same sizes that limits it."""
    limits = [
        (same.seconds * (1 - MOST_WITH_A_LARGER_BUBBLE), same)
        for same in alike
        if same.fits and same.bubble < ours.bubble
    ]
    most, because = max(limits, key=lambda limit: limit[0], default=(0.0, None))
    return (most, because) if most > ours.seconds else (ours.seconds, None)


def in_place_of(setting: Setting) -> Iterator[Setting]:
    """Yields stock's settings with the same sizes and recompute."""
    for chunks in (1, 2, 4, 8):
        method = ONE_F_ONE_B if chunks == 1 else INTERLEAVED._replace(chunks=chunks)
        if chunks * setting.pipeline <= len(setting.model.whole.shape.layers) + 2:
            yield replace(setting, method=method)
