"""Iterations in which a job measures itself, and the output folder."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from megatron.schedules.job.flags import TRAINING
from megatron.schedules.job.values import Measuring
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import make_folder, objection

# Late enough for caches and kernels to have settled. Bytes are counted in the first, the others are timed.
_FIRST, _LAST = 3, 5
_FLAG = f"{TRAINING}measure"
COSTS = "costs.json"


class MeasuredIterations(NamedTuple):
    """Measurement of a job.

    Args:
        counted: iteration in which bytes are counted. The following ones are timed.
        last: last timed iteration.
        file: output file for the costs; None for none.
        timeline: output folder for the timeline; None for none.
    """

    counted: int
    last: int
    file: Path | None = None
    timeline: Path | None = None

    @property
    def timed(self) -> tuple[int, int]:
        """First and last timed iteration."""
        return self.counted + 1, self.last


def measured_iterations(how: Measuring | None, iterations: int | None) -> MeasuredIterations | None:
    """Measurement of a job with this number of iterations; None without one.

    Raises:
        PlanError: the job ends before the measurement.
    """
    if how is None:
        return None
    counted, last = how.iterations or _usual_iterations(iterations)
    if iterations and last > iterations:
        raise PlanError(
            f"{_FLAG} {how.folder}:{counted}-{last} goes on after the job's end: --train-iters is "
            f"{iterations}; end it by then"
        )
    return MeasuredIterations(counted, last, how.folder / COSTS, how.folder)


def _usual_iterations(iterations: int | None) -> tuple[int, int]:
    """Default measured iterations, at latest the job's last ones."""
    end = iterations or _LAST
    if end < 2:
        raise PlanError(f"{_FLAG} takes two iterations, and --train-iters is {end}: train for more")
    last = min(_LAST, end)
    return min(_FIRST, last - 1), last


def check_folder(folder: Path) -> None:
    """Creates the folder and checks that it is writable, on the first node. Other nodes do not need it.

    Raises:
        PlanError: the folder is not writable.
    """
    if os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")) != "0":
        return
    said = f"{_FLAG} {folder}:"
    try:
        make_folder(folder)
        with TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        raise PlanError(f"{said} {file} is no folder; name a folder, there or to be made") from None
    except OSError as error:
        raise PlanError(f"{said} cannot be made and written: {error.strerror}; give another name") from None
    if why := objection(folder / COSTS):
        raise PlanError(f"{said} {COSTS} there cannot be written: name another folder ({why})")
