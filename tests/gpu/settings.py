"""What the GPU tests run: schedules, and the division of several GPUs among kinds of parallelism; plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Shows = Callable[..., None]
"""Prints figures, and fails where there is a fault: the fixture ``shows``."""

FAMILIES = {
    "one-chunk": ("1f1b", "eager-1f1b", "zb-1p", "zb-2p"),
    "chunks": ("interleaved-1f1b", "1f1b-v", "v-min", "v-half", "v-zb", "adaptive"),
}
SCHEDULES = tuple(name for family in FAMILIES.values() for name in family)
FEW = ("1f1b", "zb-1p", "v-half")
"""Where only a few are tried, these: the baseline, one chunk split, a V."""
VOCABULARY = "--pipeline-vocabulary-parallel"
LAYOUTS = ("pp", "tp-pp", "tp-pp-dp")
"""Pipeline alone; with tensor parallel 2 and sequence parallelism; that with data parallel 2, overlapped."""
CONNECTIONS = (1, 8)
"""Hardware queues: CUDA_DEVICE_MAX_CONNECTIONS."""
FEWEST_OF_MANY = 4

_TENSOR = ("--tensor-model-parallel-size", "2")
_DATA = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


class Setting(NamedTuple):
    """Where the tests run.

    Args:
        on_cpu: with tiny models, over the CPU stand-in and gloo, to try the steps.
        gpus: how many there are.
    """

    on_cpu: bool
    gpus: int


class Layout(NamedTuple):
    """One division.

    Args:
        pipeline, tensor, data: ranks of each.
        flags: Megatron's, beside that for the pipeline.
        note: what could not be as promised.
    """

    pipeline: int
    tensor: int
    data: int
    flags: tuple[str, ...]
    note: str = ""

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.pipeline * self.tensor * self.data


def layout_of(name: str, gpus: int, norms: bool) -> Layout:
    """Returns the layout of this name for eight GPUs, or for four where there are fewer than eight.

    Args:
        name: of :data:`LAYOUTS`.
        gpus: how many there are, four at least.
        norms: whether there are norms that know sequence parallelism.
    """
    world = 8 if gpus >= 8 else 4
    tensor = (*_TENSOR, "--sequence-parallel") if norms else _TENSOR
    note = "" if norms else "without --sequence-parallel, for which there is neither Apex nor Transformer Engine"
    if name == "pp":
        return Layout(world, 1, 1, ())
    if name == "tp-pp":
        return Layout(world // 2, 2, 1, tensor, note)
    if world < 8:
        return Layout(2, 1, 2, _DATA, "without tensor parallelism: four GPUs are too few")
    return Layout(2, 2, 2, (*tensor, *_DATA), note)
