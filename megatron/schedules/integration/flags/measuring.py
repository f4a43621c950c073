"""In which iterations a job measures itself, and where it writes that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.job.values import Measuring
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import objection

# Late enough that caches and kernels have settled: the first counts bytes, the others are timed.
_FIRST, _LAST = 3, 5
COSTS = "costs.json"


class Measured(NamedTuple):
    """What a job measures of itself.

    Args:
        counted: the iteration in which bytes are counted; those after it are timed.
        last: the last that is timed.
        file: for the costs; None for nowhere.
        timeline: the folder of the timeline; None for none.
    """

    counted: int
    last: int
    file: Path | None = None
    timeline: Path | None = None

    @property
    def timed(self) -> tuple[int, int]:
        """The first and the last iteration that is timed."""
        return self.counted + 1, self.last


def measured_iterations(asked: Measuring | None, iterations: int | None) -> Measured | None:
    """What ``asked`` comes to in a job of so many iterations; None where nothing is to be measured.

    Raises:
        PlanError: where the job ends before, or nothing can be written.
    """
    if asked is None:
        return None
    flag = FLAGS["measure"]
    counted, last = asked.iterations or _usual_iterations(iterations)
    if iterations and last > iterations:
        raise PlanError(
            f"{flag} {asked.folder}:{counted}-{last} goes on after the job's end: --train-iters is {iterations}; end "
            "it by then"
        )
    _check_folder(flag, asked.folder)
    return Measured(counted, last, asked.folder / COSTS, asked.folder)


def _usual_iterations(iterations: int | None) -> tuple[int, int]:
    """Those measured where nobody says which: by the end of the job."""
    end = iterations or _LAST
    if end < 2:
        raise PlanError(f"{FLAGS['measure']} takes two iterations, and --train-iters is {end}: train for more")
    last = min(_LAST, end)
    return min(_FIRST, last - 1), last


def _check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be written or made by the first rank, which other nodes need not have."""
    elsewhere = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")) != "0"
    if elsewhere:
        return
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is made later, or a file is in its place
    except OSError as error:  # a name that is too long, or links that go in a circle
        raise PlanError(f"{flag} {folder}: {error.strerror}; give another name") from None
    except ValueError:  # a NUL, or half of a surrogate pair
        raise PlanError(f"{flag} {folder}: no folder can have this name; give another") from None
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        raise PlanError(f"{flag} {folder}: {there} is no folder; name a folder, there or to be made")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PlanError(f"{flag} {folder}: {there} cannot be written; name a folder that can")
    if folder.exists() and (why := objection(folder / COSTS)):
        raise PlanError(f"{flag} {folder}: {COSTS} there cannot be written: name another folder ({why})")
