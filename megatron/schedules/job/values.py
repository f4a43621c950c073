"""Values of a job's flags, for training and the command line.

Each function takes the flag's name (for errors) and its text, and raises :class:`.PlanError`.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.schedules.estimate.devices import SHORT, named
from megatron.schedules.job.flags import SEARCH_VARIABLE, STALL_VARIABLE
from megatron.schedules.planner.registry import AUTO, own_chunks
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import as_size, decimal, integer, not_negative, number, positive, size
from megatron.schedules.utils.printable import counted

# Largest fraction of 1F1B's memory. No schedule needs more than about 2, so a larger number is a percentage or a size.
_MOST_OF_1F1B = 10.0
_MOST_CHUNKS, _MOST_GPUS, _MOST_LAYERS = 1000, 10_000_000, 10_000
# Longer than any pass, even with compilation, and much shorter than NCCL's watchdog.
_STALL_SECONDS = 120.0
_SPEED = "the GB that a rank copies in a second, such as offload=25,"


@dataclass(frozen=True)
class ScheduleChoice:
    """Schedule by name or from a CSV.

    Args:
        text: the flag's text.
        name: name in the registry; ``file`` for a CSV.
        chunks: stages per rank; None if the flag does not set it.
        file: path of the CSV.
    """

    text: str
    name: str
    chunks: int | None = None
    file: Path | None = None

    @property
    def is_searched(self) -> bool:
        """True if the planner searches the order."""
        return self.name in ("adaptive", AUTO)


@dataclass(frozen=True)
class MemoryLimit:
    """Largest activation memory of a rank. If both fields are None, the job measures it.

    Args:
        fraction: fraction of 1F1B's activation memory.
        size: size in bytes.
        text: the flag's text.
        lacking: bytes by which parameters alone exceed what a plan may use of a device.
    """

    text: str
    fraction: float | None = None
    size: float | None = None
    lacking: float = 0.0

    @property
    def is_measured(self) -> bool:
        """True if the job measures the free memory of its devices."""
        return self.fraction is None and self.size is None


@dataclass(frozen=True)
class CostsChoice:
    """Source of the costs.

    Args:
        text: the flag's text.
        times: F, I, W and link latency; None for a file.
        file: path of a JSON file; None for times.
    """

    text: str
    times: Costs | None = None
    file: Path | None = None


@dataclass(frozen=True)
class MemorySaving:
    """Memory saving that a plan may use.

    Args:
        recompute: whether the plan may recompute layers.
        offload: whether the plan may offload activations.
        gbps: copy bandwidth in one direction, 10**9 bytes per second; None to read it from the cost file.
    """

    recompute: bool = False
    offload: bool = False
    gbps: float | None = None


@dataclass(frozen=True)
class Measuring:
    """Settings of a job that measures itself.

    Args:
        folder: folder for costs and timeline.
        iterations: the iteration in which bytes are counted, and the last timed iteration; None for the default.
    """

    folder: Path
    iterations: tuple[int, int] | None = None


@dataclass(frozen=True)
class DryRun:
    """Settings of a dry run.

    Args:
        gpus: GPUs of the job; None to read the number from the launcher.
        device_bytes: memory of one GPU, bytes; None for no comparison.
        device: name of the GPU, as in :data:`.devices.DEVICES`; empty if only its memory is given.
    """

    gpus: int | None = None
    device_bytes: float | None = None
    device: str = ""


Layers = Literal["even", "auto"] | tuple[int, ...]
"""Even, chosen by the planner, or the decoder layers of each stage."""


def schedule_choice(flag: str, text: str) -> ScheduleChoice:
    """Reads ``NAME[:CHUNKS]`` or ``FILE.csv``."""
    if text.lower().endswith(".csv"):
        return ScheduleChoice(text, "file", file=Path(text))
    name, colon, count = text.partition(":")
    if name == "file":
        raise PlanError(f"{flag} file: name the CSV itself, such as {flag} mine.csv")
    if not colon:
        return ScheduleChoice(text, name)
    chunks = integer(f"{flag} {name}:", count, 1, "a rank holds 1 chunk or more", _MOST_CHUNKS)
    own = own_chunks(name)
    if own is not None:
        raise PlanError(f"{flag} {text}: {name} has {counted(own, 'chunk')} a rank; leave out :{chunks}")
    return ScheduleChoice(text, name, chunks)


def memory_limit(flag: str, text: str | None) -> MemoryLimit | None:
    """Reads a fraction, a percentage, a size such as 20GiB, or ``auto``."""
    if text is None:
        return None
    if text.lower() == "auto":
        return MemoryLimit(text)
    bytes_ = as_size(text)
    fraction = decimal(text[:-1]) / 100 if text.endswith("%") else decimal(text)
    value = fraction if bytes_ is None else bytes_
    if not 0 < value < math.inf:
        raise PlanError(f"{flag} {text!r} is neither a fraction such as 0.5 nor such as 20GiB, nor auto")
    if bytes_ is None and value > _MOST_OF_1F1B:
        raise PlanError(
            f"{flag} {text} is {value:g} times 1F1B's activation memory, and no schedule needs more than some twice: "
            "give a fraction such as 0.5, a percentage such as 50% or a size such as 20GiB"
        )
    return MemoryLimit(text, fraction=value) if bytes_ is None else MemoryLimit(text, size=value)


def costs_choice(flag: str, text: str | None) -> CostsChoice | None:
    """Reads ``F,I,W[,LATENCY[,MESSAGES]]`` or ``FILE.json``."""
    if text is None:
        return None
    if text.lower().endswith(".json"):
        return CostsChoice(text, file=Path(text))
    try:
        return CostsChoice(text, times=Costs.parse(text))
    except PlanError as error:
        raise PlanError(f"{flag}: {error}; or name a FILE.json") from None


def layers_choice(flag: str, text: str | None) -> Layers | None:
    """Reads ``even``, ``auto`` or ``N,N,...``."""
    if text is None:
        return None
    if text == "even":
        return "even"
    if text == "auto":
        return "auto"
    what = "even, auto or the layers of each stage such as 3,4,4,3"
    counts = [number(flag, part, what) for part in text.split(",")]
    if any(count != int(count) or not 0 <= count <= _MOST_LAYERS for count in counts):
        raise PlanError(f"{flag} {text!r} is not a list of whole numbers up to {_MOST_LAYERS}: use {what}")
    return tuple(map(int, counts))


def memory_saving(flag: str, text: str | None) -> MemorySaving:
    """Reads ``none``, ``recompute``, ``offload[=GB/s]`` or ``both[=GB/s]``. The default is none."""
    how, equals, speed = (text or "none").partition("=")
    if text == "" or how not in ("none", "recompute", "offload", "both"):
        raise PlanError(f"{flag} {text!r} is unknown: use none, recompute, offload[=GB/s] or both[=GB/s]")
    if equals and how in ("none", "recompute"):
        raise PlanError(f"{flag} {text}: {how} copies nothing; leave out ={speed}")
    gbps = positive(f"{flag} {how}=", speed, _SPEED) if equals else None
    return MemorySaving(how in ("recompute", "both"), how in ("offload", "both"), gbps)


def measuring(flag: str, text: str | None) -> Measuring | None:
    """Reads ``DIR[:A-B]``."""
    if text is None:
        return None
    folder, colon, iterations = text.rpartition(":")
    if not colon:
        folder = text
    if not folder:
        raise PlanError(f"{flag} {text!r} names no folder: write it such as out or out:5-10")
    if not colon:
        return Measuring(Path(folder))
    written = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", iterations)
    first, last = map(int, written.groups()) if written else (0, 0)
    if not written or first < 1:
        raise PlanError(
            f"{flag} {text!r} ends with {iterations!r}, which is not two iterations with a dash between, from 1 on: "
            f"write it as in {folder}:5-10"
        )
    if last <= first:
        raise PlanError(
            f"{flag} {text} has no iteration that is timed: the first counts bytes, the others are timed; give two or "
            f"more, such as {folder}:{first}-{first + 5}"
        )
    return Measuring(Path(folder), (first, last))


def dry_run(flag: str, text: str | None) -> DryRun | None:
    """Reads ``[GPUS][xSIZE]`` or ``[GPUS][xNAME]``, such as 64, 64x80GiB, x80GiB or 64xH100; the text may be empty."""
    if text is None:
        return None
    gpus, times, memory = text.partition("x")
    what = "the number of GPUs that the job would have"
    count = integer(flag, gpus, 1, what, _MOST_GPUS) if gpus else None
    if not times:
        return DryRun(count)
    if memory[:1].isalpha():
        device = named(memory)
        if device is None:
            raise PlanError(f"{flag} {text}: no GPU is known as {memory}: give one of {', '.join(SHORT)}, or its GiB")
        return DryRun(count, device.memory, device.name)
    return DryRun(count, size(f"{flag} {gpus}x", memory))


def batch_steps(flag: str, text: str) -> list[int]:
    """Reads Megatron's ``TOKENS:BATCH TOKENS:BATCH ...``, whose numbers may end in K, M, B or T.

    Returns:
        The batch sizes in the order of training.
    """
    try:
        steps = [tuple(map(_in_thousands, step.split(":", 1))) for step in text.replace(",", " ").split()]
        batches = [batch for _, batch in sorted(steps, key=lambda step: step[0])]
    except (ValueError, OverflowError):
        batches = []
    if not batches:
        raise PlanError(f"{flag} {text!r} is not a list of TOKENS:BATCH such as '0:768 250B:1536'")
    return batches


def _in_thousands(text: str) -> int:
    """Reads a number that may end in K, M, B or T."""
    number = text.strip().upper()
    power = " KMBT".find(number[-1:] or " ")
    return int(float(number[:-1] if power > 0 else number) * 1000 ** max(power, 0))


def search_seconds() -> float | None:
    """Search time for an adaptive plan on a typical core, seconds, from the environment; None for the default."""
    text = os.environ.get(SEARCH_VARIABLE) or None
    return positive(f"${SEARCH_VARIABLE}", text, "a positive number of seconds")


def stall_seconds() -> float:
    """Longest time without a finished pass before the job stops, seconds, from the environment; 0 for no limit."""
    text = os.environ.get(STALL_VARIABLE) or None
    seconds = not_negative(f"${STALL_VARIABLE}", text, "a number of seconds, or 0 for no limit,")
    return _STALL_SECONDS if seconds is None else seconds
