"""Lower bounds of time and memory of many settings, by arithmetic alone: no plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megatron.schedules.estimate.device_memory import model_memory
from megatron.schedules.estimate.model_build import StockRecompute, TrainedModel, recomputed_share
from megatron.schedules.estimate.parallel_sizes import sizes_of
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import Count
from megatron.schedules.schedule.model_loads import Part
from tools._iteration import after
from tools._methods import Method
from tools._setting import Setting

# Part of its layers' activations that the fullest rank holds at least: levelled layers and short pipelines hold less.
_HELD = 0.9
# Part of the microbatches on the fullest rank whose weight gradients may all be left to do, of schedules that split
# backwards: what W needs stays, whatever was recomputed.
_LEFT_TO_W = {"zb-1p": 1.0, "v-zb": 0.8, "v-half": 0.8, "v-min": 0.8}


class Bound(NamedTuple):
    """Bounds with one kind of recompute.

    Args:
        seconds: lower bound of the iteration time.
        bytes: lower bound of the memory of the fullest rank, about.
        recompute: Megatron's own recompute.
    """

    seconds: float
    bytes: float
    recompute: StockRecompute


class Promise(NamedTuple):
    """What a setting takes at least.

    Args:
        stages: the setting without its pipeline.
        pipeline, chunks: ranks, and chunks of each.
        bounds: bounds with each kind of recompute, the one that takes least time first.
    """

    stages: Setting
    pipeline: int
    chunks: int
    bounds: tuple[Bound, ...]

    @property
    def setting(self) -> Setting:
        """The setting, with the first kind of recompute."""
        one = self.stages
        return replace(
            one,
            method=one.method._replace(chunks=self.chunks),
            pipeline=self.pipeline,
            data=one.data // self.pipeline,
            recompute=self.bounds[0].recompute,
        )

    def within(self, room: float) -> Promise | None:
        """Returns the promise without recompute that does not fit in ``room`` bytes; None if none fits."""
        fitting = tuple(bound for bound in self.bounds if bound.bytes <= room)
        return self._replace(bounds=fitting) if fitting else None

    @property
    def others(self) -> Promise | None:
        """The promise with the other kinds of recompute, which take more time and less memory; None without others."""
        return self._replace(bounds=self.bounds[1:]) if len(self.bounds) > 1 else None

    @property
    def least_bytes(self) -> float:
        """Bytes with the recompute that needs least."""
        return min(bound.bytes for bound in self.bounds)


@dataclass(frozen=True)
class Stages:
    """A model as all pipelines of the same sizes run it.

    Args:
        setting: a pipeline of one rank. Its data-parallel size is that of the others with all their pipeline ranks.
    """

    setting: Setting

    @cached_property
    def _trained(self) -> TrainedModel:
        return self.setting.trained

    @cached_property
    def _times(self) -> tuple[float, float, float, float]:
        """Seconds of F and of the whole backward of all layers, of the ends, and of messages that W may hide."""
        times = self.setting.spec.times
        assert times is not None, "the model is known"
        model, count = times.model, len(times.model.layers)
        forward, backward = count * model.mean.forward, count * (model.mean.input_grad + model.mean.weight_grad)
        ends = _computing(model.first) + _computing(model.last)
        # Costs are those of half a rank's layers.
        hidden = min(2 * sum(times.layers.messages), count * model.mean.weight_grad)
        return forward, backward, ends, hidden

    @cached_property
    def _least_layer(self) -> float:
        """Time of the layer that takes least, in that of a mean one."""
        times = self.setting.spec.times
        assert times is not None, "the model is known"
        works = [_computing(layer) for layer in times.model.layers]
        return min(works) * len(works) / sum(works)

    @cached_property
    def _parameters(self) -> Count:
        """All parameters of a tensor- and expert-parallel rank."""
        known = parameters(self._trained.build)
        total = known.first.plus(known.last).plus(known.ahead).plus(known.table).plus(known.table)
        for layer in known.layers:
            total = total.plus(layer)
        return total

    def promises(
        self, recomputes: Sequence[StockRecompute], pipelines: Iterable[int], own_chunks: int
    ) -> Iterator[Promise]:
        """Yields bounds for each number of pipeline ranks.

        Args:
            recomputes: Megatron's own recompute that may be tried.
            pipelines: numbers of ranks.
            own_chunks: chunks of a rank in the user's setting, tried beside the usual ones.
        """
        setting, build, method = self.setting, self._trained.build, self.setting.method
        forward, backward, ends, hidden = self._times
        works, whole = [], sum(layer.kept for layer in model_memory(build, build.tokens).layers)
        for recompute in recomputes:
            kept = model_memory(build, build.tokens, recompute.kept)
            held = sum(kept.input if recompute.kept.layers is None else layer.kept for layer in kept.layers)
            left = _LEFT_TO_W.get(method.schedule, 0.0)
            held = max(held, left * sum(layer.weights for layer in kept.layers))
            # R of a stage brings its activations back, for the I and the W that follow.
            again = max(0.0, whole - held) if method.schedule in _LEFT_TO_W else 0.0
            work = (1 + recomputed_share(recompute.kept, build)) * forward + backward
            works.append((work, held, again, kept.most_passing, recompute))
        works.sort(key=lambda work: work[0])
        count, one = len(build.shape.layers), sizes_of(setting.args, setting.gpus)
        for pipeline in pipelines:
            data = setting.data // pipeline
            microbatches = setting.global_batch // (data * setting.micro_batch)
            numbers = replace(self._trained.numbers, shared_by=replace(one, pipeline=pipeline).optimizer_shared_by)
            mean = Count(*(number / pipeline for number in self._parameters))
            static, trained = numbers.held(mean), replace(self._trained, numbers=numbers)
            end = after(replace(setting, data=data), trained, mean, (works[0][0] + ends) / pipeline)
            # Of layers that do not divide, one rank has more.
            most = self._least_layer * ceil(count / pipeline) / count
            for chunks in _chunks(method, pipeline, count, own_chunks):
                stages = pipeline * chunks
                even = max(1, count // stages) * stages / max(count, stages) if chunks == 1 else 1.0
                rank = _HELD * even * _microbatches_held(method, chunks, pipeline, microbatches) / pipeline
                bounds = []
                for work, held, again, passing, recompute in works:
                    seconds = microbatches * (work + ends - hidden) / pipeline
                    seconds += _idle(method, chunks, pipeline, forward, work + ends)
                    seconds = max(seconds, microbatches * (work - hidden) * most) + end
                    once = _HELD * max(passing, again / stages)
                    bounds.append(Bound(seconds, static + rank * held + once, recompute))
                yield Promise(setting, pipeline, chunks, tuple(bounds))


def _computing(part: Part) -> float:
    """Seconds of F and of the whole backward of a part of the model."""
    return sum(part.split[:3]) + sum(part.whole[:3])


# Chunks of a rank that stock interleaves, as many as recipes have.
_INTERLEAVED = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)


def _chunks(method: Method, pipeline: int, layers: int, own: int) -> Iterator[int]:
    """Yields numbers of chunks that the layers allow. ``own`` is that of the user's setting."""
    if method.schedule != "interleaved-1f1b":
        yield method.chunks
    elif pipeline > 1:
        for chunks in sorted({*_INTERLEAVED, own} - {1}):
            if pipeline * chunks <= layers + 2:
                yield chunks


def _microbatches_held(method: Method, chunks: int, ranks: int, microbatches: int) -> float:
    """Microbatches' worth of activations on the fullest rank, at least (docs/which-schedule.md)."""
    held = {
        "interleaved-1f1b": (2 * (ranks - 1) + (chunks - 1) * ranks + 1) / chunks,
        "v-min": ceil((ranks + 2) / 3),
        "v-half": ranks // 2 + 1,
        "adaptive": 1.0 if method.saves_memory else ranks / 3,
    }.get(method.schedule, ranks)
    return min(microbatches, held)


def _idle(method: Method, chunks: int, ranks: int, forward: float, work: float) -> float:
    """Seconds in which the average rank is idle at least.

    In 1F1B each rank waits for all others once; with several chunks for a chunk of each. In other schedules the last
    rank waits for the first forwards to reach it.
    """
    share = (ranks - 1) / (ranks * chunks)
    return share * (work if method.is_stock else forward)
