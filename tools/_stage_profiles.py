"""Profiles of a model's parts on one device: the embedding, chunks of layers, and the output layer.

Importing this imports Megatron, as :mod:`tools._pass_times` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import astuple

from megatron.schedules.measure.job_profile import Measured, StageProfile
from megatron.schedules.schedule.kinds import SEEN_BY, Kind, Share
from tools import _pass_times as times

WARM_UP = 3


def timed(
    model: times.Model, stage: int, name: str, repetitions: int, say: Callable[[str, bool], None]
) -> StageProfile:
    """Measures ``stage``, named so to the user. Returns it as if it had no decoder layers, and without R."""
    held, passes, wholes = times.held(model, stage), times.time_passes(model, stage), []
    if stage not in (times.EMBEDDING, model.output):
        whole = times.time_passes(model, stage, split=False)
        wholes = [next(whole).backward for _ in range(WARM_UP + repetitions)][WARM_UP:]
    found = []
    for repetition in range(1, WARM_UP + repetitions + 1):
        found.append(next(passes))
        done = repetition - WARM_UP
        say(f"{name}: {max(0, done)} of {repetitions} repetitions", done < repetitions)
    seconds = dict(zip((Kind.F, Kind.I, Kind.W), zip(*found[WARM_UP:], strict=True), strict=True))
    seconds |= {Kind.B: tuple(wholes)} if wholes else {}
    sizes = dict.fromkeys(SEEN_BY, 0.0) | {Share.WEIGHTS: float(held.after_input_grad)}
    measured = {kind: Measured.of([1e3 * each for each in every]) for kind, every in seconds.items()}
    return StageProfile(0, measured, held=held.after_forward, sizes=sizes)


def with_recompute(model: times.Model, stage: int, chunk: StageProfile, repetitions: int) -> StageProfile:
    """Returns ``chunk``, measured as this ``stage``, with R of all its layers; the model recomputes from then on."""
    forwards = times.time_recompute(model, stage)
    found = [next(forwards) for _ in range(WARM_UP + repetitions)][WARM_UP:]
    again = Measured.of([1e3 * each.seconds for each in found])
    freed = max(0.0, chunk.held - found[0].input_bytes)
    return replace(
        chunk,
        times={**chunk.times, Kind.R: again},
        sizes={**chunk.sizes, Share.RECOMPUTED: freed},
        recomputed=1.0,
    )


def of_layers(chunk: StageProfile, measured: int, layers: int) -> StageProfile:
    """Returns a stage of ``layers`` decoder layers, each as those of ``chunk``, of which so many were measured."""
    scale = layers / measured
    return replace(
        chunk,
        layers=layers,
        times={kind: Measured(*(scale * each for each in astuple(time))) for kind, time in chunk.times.items()},
        held=scale * chunk.held,
        sizes={share: scale * size for share, size in chunk.sizes.items()},
    )
