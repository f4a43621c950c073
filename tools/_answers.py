"""Results of a search beside the user's own setting and the best that stock Megatron has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.schedules.utils.errors import PlanError
from tools._grid import Found, fastest, whole
from tools._iteration import Estimate, estimate
from tools._job_specs import MOST_WITH_A_LARGER_BUBBLE
from tools._methods import INTERLEAVED, ONE_F_ONE_B
from tools._question import Question
from tools._setting import Setting
from tools._start import Start


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
    """

    start: Start
    found: Sequence[Found]
    own: Estimate | None = None
    stock: Estimate | None = None
    ours: Estimate | None = None
    least: float = 0.0
    same: Estimate | None = None

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


def answered(start: Start, found: Sequence[Found]) -> Answer:
    """Compares the settings found with the user's own and with stock's."""
    question = start.question
    own = None
    if question.own is not None:
        try:
            own = estimate(question.own)
        except PlanError:
            own = None
    best = fastest(found)
    stock = [each for each in best if each.setting.method.is_stock] + ([own] if own else [])
    fastest_stock = min(stock, key=lambda each: each.seconds, default=None)
    ours, least, same = None, math.inf, None
    for each in best:
        if each.setting.method.is_stock:
            continue
        if each.seconds >= least:
            break
        seconds, because = _claimed(each)
        if seconds < least:
            ours, least, same = each, seconds, because
    return Answer(start, found, own, fastest_stock, ours, least, same)


def _claimed(ours: Estimate) -> tuple[float, Estimate | None]:
    """Returns the least iteration time that is claimed, and stock's setting of the same sizes that limits it."""
    limit, because = ours.seconds, None
    for setting in in_place_of(ours.setting):
        same = None if setting.wrong else whole(setting)
        if same is None or not same.fits or same.bubble >= ours.bubble:
            continue
        most = same.seconds * (1 - MOST_WITH_A_LARGER_BUBBLE)
        if most > limit:
            limit, because = most, same
    return limit, because


def in_place_of(setting: Setting) -> Iterator[Setting]:
    """Yields stock's settings with the same sizes and recompute."""
    for chunks in (1, 2, 4, 8):
        method = ONE_F_ONE_B if chunks == 1 else INTERLEAVED._replace(chunks=chunks)
        if chunks * setting.pipeline <= len(setting.model.whole.shape.layers) + 2:
            yield replace(setting, method=method)
