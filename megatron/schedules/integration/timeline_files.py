"""Timeline files of a job that measured itself."""

from __future__ import annotations

from pathlib import Path

from megatron.schedules.measure.recorded_run import Recorded
from megatron.schedules.report.drawing import write_run
from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.printable import percent


def saved_timeline(recorded: Recorded, folder: Path) -> str:
    """Writes ``recorded`` into ``folder``.

    Returns a log line with the files, or with the reason why they are missing.
    """
    try:
        names = write_run(recorded, folder)
    except OSError as error:  # a failed write must not lose hours of training
        return one_line(f"pipeline schedule: the timeline could not be written to {folder}: {error.strerror}")
    bubbles = f"bubble {percent(recorded.timeline.bubble)}, planned {percent(recorded.planned.bubble)}"
    return one_line(
        f"pipeline schedule: timeline of iteration {recorded.iteration} ({bubbles}) written to {folder}: "
        f"{', '.join(names)}"
    )
