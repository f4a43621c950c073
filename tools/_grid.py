"""Searches parallel sizes, microbatch sizes, recompute and schedules for the fastest settings that fit in memory.

Each method's settings are tried in the order of lower bounds, which arithmetic gives. A plan with few microbatches says
what a setting takes and whether it fits; the fastest are planned as a whole. The search ends when the next bound is
above the best times found.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megatron.schedules.estimate.device_memory import RankMemory, usable
from megatron.schedules.estimate.model_build import StockRecompute
from megatron.schedules.search.polish import many_plans
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.progress import Progress, unheard
from tools._bounds import Promise
from tools._iteration import Estimate, estimate, least_memory, quick_estimate
from tools._methods import Method
from tools._question import Question
from tools._setting import Setting

_MORE_GPUS = 2, 4, 8, 16
# Settings of each that are planned.
_TRIED = 3
# Search time of each adaptive plan, and of the fastest ones.
_SEARCH_SECONDS, _FINAL_SECONDS = 0.3, 2.0
# Settings that are planned for each method at most, and of those with a searched order.
_MOST, _MOST_SEARCHED = 60, 8
# V-Min is idle in its steady state, a fifth of the time, where passes take unequal times. So its bounds are this share
# of a time that other plans show: for recompute of the same kind, and as many ranks or fewer, which idle less.
_IDLE, _EXPECTED = "v-min", 0.95
# Settings up to so many times slower than the fastest are planned as a whole at the same time.
_CLOSE = 1.02
# Sizes that a searched order is planned with, and their most pipeline ranks: with 64 each search takes half a minute.
_NEAR, _MOST_RANKS = 6, 32
# Progress of a method when its bounds have met the best time, and only whole plans are left.
_WITHOUT_PLANS = 0.6
# Time that a method with a searched order takes, in that of another.
_SEARCHED = 4
# Bounds of each method that are kept.
_KEPT = 400


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
        gap: part of the best time by which a setting that was not planned might be faster; 0 if the search ended.
        is_cut: true if settings that may fit were not planned.
        short: if none fits, the setting with the least memory; None if there is no setting.
    """

    method: Method
    best: list[Estimate] = field(default_factory=list)
    tried: int = 0
    gap: float = 0.0
    is_cut: bool = False
    short: Short | None = None


class _Candidate(NamedTuple):
    """A setting on its way: bound, quick estimate, estimate.

    Args:
        seconds: what is known of its iteration time.
        number: orders candidates of the same time.
        promise: its bounds, and those with more recompute.
        estimate: its estimate, once it is made.
        is_whole: true for that of the whole plan.
    """

    seconds: float
    number: int
    promise: Promise
    estimate: Estimate | None = None
    is_whole: bool = False


How = Callable[[Setting], Estimate | None]
"""Estimates a setting; None if it has no plan."""


class Search:
    """The search for one method, a step at a time.

    Args:
        question, method: what is searched.
        bounds: bounds of its settings.
        top: number of settings to find.
    """

    def __init__(self, question: Question, method: Method, bounds: Bounds, top: int) -> None:
        self.question, self.found, self._top = question, Found(method), top
        self._room, self._least = usable(question.device.memory), bounds.least
        self._numbers, self._queue = itertools.count(), list[_Candidate]()
        for promise in bounds.fitting:
            self._push(promise)
        self._first = self._queue[0].seconds if self._queue else 0.0
        self._most = _MOST_SEARCHED if method.is_searched else _MOST
        self._running: dict[Setting, tuple[How, _Candidate]] = {}
        self._slower: dict[StockRecompute, dict[int, float]] = {}  # V-Min's estimates over its bounds, by ranks
        self.known = list[Estimate]()  # what fits, from quick estimates

    @property
    def is_done(self) -> bool:
        """True if nothing is left to try."""
        return not self._running and (not self._queue or len(self.found.best) >= self._top)

    @property
    def progress(self) -> float:
        """Part of the way from the first bound to the best time that bounds have come."""
        if self.is_done:
            return 1.0
        known = [each.seconds for each in self._queue if each.estimate is not None and not each.is_whole]
        best = self.found.best[0].seconds if self.found.best else min(known, default=0.0)
        if not self._queue or best <= self._first:
            return 0.0
        return _WITHOUT_PLANS * min(1.0, (self._queue[0].seconds - self._first) / (best - self._first))

    def step(self) -> tuple[How, Setting] | None:
        """Returns what to estimate next, and how; None if the results of others have to come first."""
        while self._queue and len(self.found.best) < self._top:
            first = self._queue[0]
            if first.estimate is not None:
                if self._running if first.is_whole else not self._is_next(first):
                    return None  # another one may be faster
                heapq.heappop(self._queue)
                if not first.is_whole:
                    return self._begin(whole, first.estimate.setting, first)
                self.found.best.append(first.estimate)
            elif self.found.tried >= self._most:
                self._cut()
            elif (seconds := self._expected(first.promise)) > first.seconds:
                heapq.heapreplace(self._queue, first._replace(seconds=seconds))
            else:
                heapq.heappop(self._queue)
                setting = first.promise.setting
                if not setting.wrong:
                    self.found.tried += 1
                    return self._begin(quick, setting, first)
        return None

    def _begin(self, how: How, setting: Setting, candidate: _Candidate) -> tuple[How, Setting]:
        self._running[setting] = how, candidate
        return how, setting

    def _is_next(self, first: _Candidate) -> bool:
        """Returns whether a candidate may be planned as a whole, which takes long, beside what runs now."""
        running = self._running.values()
        return all(how is whole and first.seconds <= _CLOSE * other.seconds for how, other in running)

    def tell(self, how: How, setting: Setting, result: Estimate | None) -> None:
        """Takes a result of :meth:`step`."""
        promise = self._running.pop(setting)[1].promise
        if result is not None and how is quick and self.found.method.schedule == _IDLE:
            self._learn(promise, result.seconds / promise.bounds[0].seconds)
        if result is not None and result.fits:
            self.known += [result] if how is quick else []
            candidate = _Candidate(result.seconds, next(self._numbers), promise, result, how is whole)
            heapq.heappush(self._queue, candidate)
            return
        if promise.others is not None:
            self._push(promise.others)
        if result is not None:
            self._note(result)

    def _push(self, promise: Promise) -> None:
        if (fitting := promise.within(self._room)) is not None:
            heapq.heappush(self._queue, _Candidate(fitting.bounds[0].seconds, next(self._numbers), fitting))

    def _learn(self, promise: Promise, slower: float) -> None:
        """Takes the quick estimate of a promise over its bound."""
        of_ranks = self._slower.setdefault(promise.bounds[0].recompute, {})
        of_ranks[promise.pipeline] = min(slower, of_ranks.get(promise.pipeline, math.inf))

    def _expected(self, promise: Promise) -> float:
        """Returns about the least time of a promise, after what other plans showed."""
        first = promise.bounds[0]
        of_ranks = self._slower.get(first.recompute, {})
        least = min((slower for ranks, slower in of_ranks.items() if ranks <= promise.pipeline), default=1.0)
        return first.seconds * max(1.0, _EXPECTED * least)

    def end(self, *, asks_more: bool = True) -> Found:
        """Returns the result; if nothing fits and ``asks_more``, with the number of GPUs that do."""
        found = self.found
        if not found.best:
            found.short = self._shortest(asks_more)
        return found

    def _cut(self) -> None:
        """Drops what was not planned."""
        self.found.is_cut = True
        bound = min(each.promise.bounds[0].seconds for each in self._queue if each.estimate is None)
        self._queue = [each for each in self._queue if each.estimate is not None]
        heapq.heapify(self._queue)
        best = self.found.best[0].seconds if self.found.best else self._queue[0].seconds if self._queue else 0.0
        self.found.gap = 1 - bound / best if best > bound else 0.0

    def _note(self, result: Estimate) -> None:
        short = self.found.short
        if short is None or result.memory < short.memory:
            rank = max(range(len(result.ranks)), key=lambda rank: result.ranks[rank].device)
            self.found.short = Short(result.setting, rank, result.ranks[rank], planned=True)

    def _shortest(self, asks_more: bool) -> Short | None:
        """Returns the setting with the least memory, and how many more GPUs might make it fit."""
        short, question, method = self.found.short, self.question, self.found.method
        if short is None:
            if self._least is None:
                return None
            setting = self._least.setting
            short = Short(setting, *least_memory(setting), planned=False)
        for times in _MORE_GPUS if asks_more else ():
            least = bounds_of(replace(question, gpus=times * question.gpus), method).smallest
            if any(_fits(setting) for setting in least):
                return short._replace(gpus=times)
        return short


class Bounds(NamedTuple):
    """Bounds of a method's settings.

    Args:
        fitting: those that may fit, with the least bounds.
        least: the one with the least memory; None without any.
        smallest: a few settings with least memory that may fit.
    """

    fitting: tuple[Promise, ...]
    least: Promise | None
    smallest: tuple[Setting, ...]


class Sizes(NamedTuple):
    """Tensor, context, expert and pipeline parallel sizes, and samples of a microbatch."""

    tensor: int
    context: int
    expert: int
    pipeline: int
    micro_batch: int


def bounds_of(question: Question, method: Method, near: Collection[Sizes] | None = None) -> Bounds:
    """Returns bounds of the settings of ``method``, or of those with sizes in ``near``."""
    room, every = usable(question.device.memory), list(question.promises(method))
    every = every if near is None else [each for each in every if _sizes(each.setting) in near]
    fitting = [each for promise in every if (each := promise.within(room)) is not None]
    smallest = heapq.nsmallest(_TRIED, fitting, key=lambda each: each.least_bytes)
    return Bounds(
        tuple(heapq.nsmallest(_KEPT, fitting, key=lambda each: each.bounds[0].seconds)),
        _with_least(min(every, key=lambda each: each.least_bytes, default=None)),
        tuple(each.setting for promise in smallest if (each := _with_least(promise)) is not None),
    )


def _sizes(setting: Setting) -> Sizes:
    return Sizes(setting.tensor, setting.context, setting.expert, setting.pipeline, setting.micro_batch)


def _with_least(promise: Promise | None) -> Promise | None:
    return promise and promise._replace(bounds=(min(promise.bounds, key=lambda bound: bound.bytes),))


def quick(setting: Setting) -> Estimate | None:
    """Estimates a setting by plans with few microbatches; None if it has no plan."""
    with many_plans(math.inf):  # compiled code pays off for many settings
        return _estimated(quick_estimate, setting, _SEARCH_SECONDS)


def whole(setting: Setting) -> Estimate | None:
    """Estimates a setting by its plan; None if it has none."""
    with many_plans(math.inf):
        return _estimated(estimate, setting, _FINAL_SECONDS)


def _estimated(how: Callable[[Setting, float], Estimate], setting: Setting, seconds: float) -> Estimate | None:
    try:
        # A copy, without what was computed for it: it travels between processes.
        return replace(how(setting, seconds), setting=replace(setting))
    except PlanError:  # too little memory for any plan, or too few microbatches for this schedule
        return None


def _fits(setting: Setting) -> bool:
    found = None if setting.wrong else quick(setting)
    return found is not None and found.fits


def search(question: Question, method: Method, top: int = 1) -> Found:
    """Finds the ``top`` fastest settings of ``method`` that fit in the device's memory."""
    state = Search(question, method, bounds_of(question, method), top)
    while (job := state.step()) is not None:
        how, setting = job
        state.tell(how, setting, how(setting))
    return state.end()


def search_all(
    pool: Executor, tasks: Sequence[tuple[Question, Method]], top: int, jobs: int, progress: Progress = unheard
) -> list[Found]:
    """Searches each method for its question with ``jobs`` processes of ``pool``; see :func:`search`.

    Plans that are searched take long. They are made at the end, with the sizes that are fastest with other schedules.

    Args:
        pool: where bounds and plans are made.
        tasks: questions and methods.
        top: number of settings of each.
        jobs: plans that are made at the same time.
        progress: is told what part of the way the bounds have come to the best times.
    """
    states: dict[int, Search] = {}
    named = {at for at, (_, method) in enumerate(tasks) if not method.is_searched}
    first = named or set(range(len(tasks)))
    running: dict[Future[Any], tuple[int, How | None, Setting | None]] = {
        pool.submit(bounds_of, *tasks[at]): (at, None, None) for at in sorted(first)
    }
    work = [_SEARCHED if method.is_searched else 1 for _, method in tasks]
    waiting, told = set(range(len(tasks))) - first, 0.0
    while running or waiting:
        for at in sorted(waiting) if not running else ():
            waiting.remove(at)
            running[pool.submit(bounds_of, *tasks[at], near(tasks, states, at))] = at, None, None
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            at, how, setting = running.pop(future)
            if how is None or setting is None:
                states[at] = Search(*tasks[at], future.result(), top)
            else:
                states[at].tell(how, setting, future.result())
        for at in sorted(states, key=lambda at: states[at].progress):
            while len(running) <= jobs and (job := states[at].step()) is not None:
                how, setting = job
                running[pool.submit(how, setting)] = at, how, setting
        done = sum(work[at] * state.progress for at, state in states.items()) / sum(work)
        progress(max(0.0, done - told))
        told = max(done, told)
    progress(1 - told)
    # It takes seconds to find out how many GPUs a method needs, of which nobody thinks where another one fits.
    fitting = {id(tasks[at][0]) for at, state in states.items() if state.found.best}
    return [states[at].end(asks_more=id(question) not in fitting) for at, (question, _) in enumerate(tasks)]


def near(tasks: Sequence[tuple[Question, Method]], states: Mapping[int, Search], at: int) -> list[Sizes] | None:
    """Returns the fastest sizes of other methods for the same question.

    None if none fits, and for plans that save memory by themselves, which also fit where others do not. Long pipelines
    are left out if shorter ones fit.
    """
    question, method = tasks[at]
    if method.saves_memory:
        return None
    known = [each for other, state in states.items() if tasks[other][0] is question for each in state.known]
    fastest_first = sorted(known, key=lambda each: each.seconds)
    sizes = list(dict.fromkeys(_sizes(each.setting) for each in fastest_first if each.setting.pipeline > 1))
    short = [each for each in sizes if each.pipeline <= _MOST_RANKS]
    return (short or sizes)[:_NEAR] or None


def fastest(found: Sequence[Found]) -> list[Estimate]:
    """Returns all settings found, the fastest first."""
    return sorted((each for of_method in found for each in of_method.best), key=lambda each: -each.mfu)
