"""In which iterations a job measures itself, and where it writes that."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from megatron.schedules.integration.flags.declared import FLAGS
from megatron.schedules.integration.flags.timeline import timeline_asked, usual_iterations
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import objection


class ProfileAsked(NamedTuple):
    """What the flags ask for.

    Args:
        counted: the iteration in which bytes are counted; those after it are timed.
        last: the last that is timed.
        file: where the costs go; None for nowhere.
        timeline: the folder of the timeline; None for none.
    """

    counted: int
    last: int
    file: Path | None
    timeline: Path | None = None

    @property
    def timed(self) -> tuple[int, int]:
        """The first and the last iteration that is timed."""
        return self.counted + 1, self.last


def profile_asked(args: Any) -> ProfileAsked | None:
    """What ``args`` ask for; None where nothing is to be measured.

    Raises:
        PlanError: naming the flag that cannot be read, or what it lacks.
    """
    text, file = args.pipeline_profile_iterations, args.pipeline_save_costs
    flag, to_file = FLAGS["profile_iterations"], FLAGS["save_costs"]
    timeline = timeline_asked(args)
    if text is None and timeline is not None:
        text = usual_iterations(args)
    if text is None:
        if file is not None:
            raise PlanError(
                f"{to_file} writes what {flag} measures, which is missing: give it too, such as {flag} 5-10"
            )
        return None
    found = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", text)
    counted, last = map(int, found.groups()) if found else (0, 0)
    if not found or counted < 1:
        raise PlanError(f"{flag} {text!r} is not two iterations with a dash between, from 1 on: write it as in 5-10")
    if last <= counted:
        raise PlanError(
            f"{flag} {text} has no iteration that is timed: the first counts bytes, the others are timed, so two or "
            f"more are needed, such as {counted}-{counted + 5}"
        )
    iterations = getattr(args, "train_iters", None)
    if iterations and last > iterations:
        raise PlanError(f"{flag} {text} goes on after the job's end: --train-iters is {iterations}; end it by then")
    return ProfileAsked(counted, last, None if file is None else _writable(to_file, Path(file)), timeline)


def _writable(flag: str, file: Path) -> Path:
    """``file``, which the first rank writes: what other nodes have in its place is nobody's business."""
    elsewhere = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0")) != "0"
    if elsewhere:
        return file
    if why := objection(file):
        raise PlanError(f"{flag} {file} cannot be written: name a file in a folder that is there and writable ({why})")
    return file
