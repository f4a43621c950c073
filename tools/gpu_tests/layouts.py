"""The division of several GPUs among pipeline, tensor and data parallelism; plain data."""

from __future__ import annotations

from typing import NamedTuple

_TENSOR = ("--tensor-model-parallel-size", "2")
_DATA = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


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
        name: of :data:`.pieces.LAYOUTS`.
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
