"""The pieces of the GPU tests: promise, number of GPUs, and function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
"""One result of a piece; its ``FAULT`` is what is wrong, empty for nothing, None where it was left out."""
FAULT = "fault"

# Under the ten minutes that some machines give a command, start and report included.
LIMIT_S = 570.0


class Skipped(Exception):  # noqa: N818 - no error
    """Raised by a piece where the machine lacks what it tests; says what."""


class Setting(NamedTuple):
    """Where a piece runs.

    Args:
        on_cpu: with tiny models, over the CPU stand-in and gloo, to try the steps.
        gpus: how many there are.
    """

    on_cpu: bool
    gpus: int


Body = Callable[[Setting], Iterator[Row]]


class Piece(NamedTuple):
    """One test that is run separately.

    Args:
        name: on the command line.
        promise: what it shows, in the report.
        body: where the function is that yields the rows, ``module:function``, and what else it takes.
        gpus: the fewest it runs on.
        limit_s: how long it may take.
    """

    name: str
    promise: str
    body: tuple[str, tuple[Any, ...]]
    gpus: int = 1
    limit_s: float = LIMIT_S

    def load(self) -> Body:
        """Imports and returns the function; that imports torch and Megatron."""
        (path, arguments) = self.body
        module, name = path.split(":")
        function = getattr(importlib.import_module(module), name)
        return lambda setting: function(setting, *arguments)


VOCABULARY = "--pipeline-vocabulary-parallel"
# Each together in one piece; ten schedules and their baselines take more than one piece's time.
FAMILIES = {
    "one-chunk": ("1f1b", "eager-1f1b", "zb-1p", "zb-2p"),
    "chunks": ("interleaved-1f1b", "1f1b-v", "v-min", "v-half", "v-zb", "adaptive"),
}
LAYOUTS = {
    "pp": "pipeline alone",
    "tp-pp": "tensor parallel 2 with sequence parallelism",
    "tp-pp-dp": "the same with data parallel 2, distributed optimizer, overlapped",
}
CONNECTIONS = (1, 8)
FEWEST_OF_MANY = 4

_ONE, _MANY = "tools.gpu_tests.one_gpu", "tools.gpu_tests.many_gpus"


def _trains(layout: str, connections: int, family: str) -> Piece:
    return Piece(
        f"{layout}-{connections}-{family}",
        f"{', '.join(FAMILIES[family])} train as stock does: {LAYOUTS[layout]}, over NCCL with "
        f"CUDA_DEVICE_MAX_CONNECTIONS={connections}; nothing hangs",
        (f"{_MANY}:trains", (layout, connections, family)),
        FEWEST_OF_MANY,
    )


PIECES = (
    Piece(
        "te-split",
        "Transformer Engine's linears, split, give the outputs and gradients of their whole backward, to the bit",
        (f"{_ONE}:transformer_engine", ()),
    ),
    Piece(
        "apex-fused",
        "Local linears that add to main_grad by Apex's kernel train as stock's",
        (f"{_ONE}:apex_fused", ()),
    ),
    Piece(
        "no-waits",
        "No pass makes the host wait for the device, after the first iteration",
        (f"{_ONE}:no_waits", ()),
    ),
    Piece(
        "offload",
        "Activations that go to the host and come back change nothing, to the bit; and how fast they go",
        ("tools.gpu_tests.offloaded:to_the_host", ()),
    ),
    Piece(
        "profile",
        "A job that measures itself tells what its passes take within 3 %, and waits for no mark",
        ("tools.gpu_tests.profiled:measures_itself", ()),
    ),
    Piece(
        "replan",
        "A job says its bubble and peak, replans within the memory that is left, and keeps its losses to the bit",
        ("tools.gpu_tests.replanned:replans", ()),
    ),
    Piece("memory", "Bytes of activations are those of the plan, within 10 %", (f"{_ONE}:memory_as_planned", ())),
    Piece(
        "reuse",
        "Memory of a message is used again in its stream's order, however far the host is ahead",
        (f"{_ONE}:reuse", ()),
    ),
    *(
        Piece(
            f"shared-{family}",
            f"{', '.join(schedules)} train as stock does, by ranks that share a GPU, messages through the host",
            (f"{_ONE}:shared", (family,)),
        )
        for family, schedules in FAMILIES.items()
    ),
    Piece(
        "fp8",
        "zb-1p and v-half train in FP8, FP8 weights too, and FP4 as stock does, with each recipe of the GPU",
        (f"{_ONE}:fp8", ()),
    ),
    Piece(
        "vocabulary",
        "Schedules with vocabulary parallelism train as stock does, by ranks that share a GPU",
        (f"{_ONE}:vocabulary", ()),
    ),
    Piece(
        "recompute",
        "Recomputed forwards (R), with dropout, give the gradients of the same schedule without R",
        (f"{_ONE}:recompute", ()),
    ),
    Piece("ranges", "A profile names every pass and message, as 3F12 and 3SEND_F12", (f"{_ONE}:ranges", ())),
    *(_trains(layout, connections, family) for layout in LAYOUTS for connections in CONNECTIONS for family in FAMILIES),
    *(
        Piece(
            f"vocabulary-{connections}",
            "Schedules with vocabulary parallelism train as stock does: tensor parallel 2 with sequence "
            f"parallelism, over NCCL with CUDA_DEVICE_MAX_CONNECTIONS={connections}; nothing hangs",
            (f"{_MANY}:vocabulary", ("tp-pp", connections)),
            FEWEST_OF_MANY,
        )
        for connections in CONNECTIONS
    ),
    Piece(
        "userbuffers",
        "zb-1p, v-half and v-zb with --tp-comm-overlap train as stock does with it: tensor parallel 2; nothing hangs",
        (f"{_MANY}:userbuffers", ()),
        FEWEST_OF_MANY,
    ),
    Piece(
        "cold-start",
        "Nothing hangs where every kernel is compiled and loaded within the first program, with timers in every pass",
        (f"{_MANY}:cold_start", ()),
        FEWEST_OF_MANY,
    ),
    Piece(
        "little-memory",
        "Nothing hangs near the end of memory, where the allocator gives blocks back and tries again",
        (f"{_MANY}:little_memory", ()),
        FEWEST_OF_MANY,
    ),
    Piece(
        "timeline",
        "Passes start when the simulator says, at the costs measured; how far off is in the figures",
        (f"{_MANY}:timeline", ()),
        FEWEST_OF_MANY,
    ),
)


def chosen(names: Sequence[str], pieces: Sequence[Piece] = PIECES) -> list[Piece]:
    """Returns the pieces of these names in the table's order; all without names.

    Raises:
        ValueError: for a name that none has.
    """
    known = [piece.name for piece in pieces]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no piece {unknown[0]!r}; --list says which there are")
    return [piece for piece in pieces if not names or piece.name in names]


def lacking(piece: Piece, setting: Setting) -> str:
    """Returns why ``piece`` cannot be run here; empty where it can."""
    if setting.on_cpu or setting.gpus >= piece.gpus:
        return ""
    return f"takes {piece.gpus} GPUs or more; found {setting.gpus}"
