"""Where a job writes its timeline, and which iterations it measures for that unless told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.utils.errors import PlanError

# Late enough that caches and kernels have settled: the first counts bytes, the others are timed.
_FIRST, _LAST = 3, 5


def timeline_asked(args: Any) -> Path | None:
    """The folder that ``args`` ask a timeline into; None where they do not. It is not made yet.

    Raises:
        PlanError: where it cannot be written, nor made.
    """
    if args.pipeline_timeline is None:
        return None
    folder, flag = Path(args.pipeline_timeline), FLAGS["timeline"]
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
    return folder


def usual_iterations(args: Any) -> str:
    """What is measured for a timeline, as ``--pipeline-profile-iterations`` has it: by the end of the job.

    Raises:
        PlanError: where the job ends before anything could be timed.
    """
    iterations = getattr(args, "train_iters", None) or _LAST
    if iterations < 2:
        raise PlanError(f"{FLAGS['timeline']} takes two iterations, and --train-iters is {iterations}: train for more")
    last = min(_LAST, iterations)
    return f"{min(_FIRST, last - 1)}-{last}"
