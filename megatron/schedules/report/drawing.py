"""Drawings of plans and of recorded runs, in any form.

PNG and PDF are made from SVG by typst, an optional library that needs no other program and includes its own fonts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.schedules.measure.recorded_run import Recorded, to_text
from megatron.schedules.report.figures import title
from megatron.schedules.report.views import View, explained, views
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.output_files import make_folder, write_text
from megatron.schedules.utils.printable import counted, percent, printable_name

PICTURES = ("png", "pdf")
_PIXELS = 192.0  # pixels of a PNG per inch: two per SVG pixel
# Without a date, equal drawings give equal files.
_PAGE = """\
#set document(date: none)
#set page(width: auto, height: auto, margin: 0pt)
#image(bytes(sys.inputs.svg), format: "svg")
"""


def check_library(form: str) -> None:
    """Checks that typst is installed if ``form`` needs it.

    Raises:
        PlanError: if it is not.
    """
    if form in PICTURES and importlib.util.find_spec("typst") is None:
        raise PlanError(
            f"{form} takes the library typst, which is not installed: pip install 'typst>=0.13', which is the extra "
            "[pictures], or use svg"
        )


def picture(svg: str, form: str) -> str | bytes:
    """Converts ``svg`` to one of :data:`PICTURES`; returns it as it is for other forms."""
    if form not in PICTURES:
        return svg
    check_library(form)
    import typst

    try:
        return typst.compile(
            _PAGE.encode(), format="png" if form == "png" else "pdf", ppi=_PIXELS, sys_inputs={"svg": svg}
        )
    except typst.TypstError as error:
        raise PlanError(one_line(f"typst makes no {form} of this drawing: {error}")) from None


# Forms of a drawing, and the largest number of passes with which viewers still open them.
FORMS: Mapping[str, int] = {"svg": 200_000, "png": 200_000, "pdf": 200_000, "html": 1_000_000, "trace": 500_000}
# Drawings of a recorded run and their forms. The run itself is written too.
FILES: Mapping[str, str] = {"timeline.html": "html", "timeline.svg": "svg", "timeline.trace.json": "trace"}
RUN = "recorded.json"


@dataclass(frozen=True)
class Drawing:
    """Contents of a drawing.

    Args:
        shown: one or more views, in one unit of time.
        heading: title.
        caption: a sentence or two.
        unit: unit of time; empty if unknown.
    """

    shown: Sequence[View]
    heading: str
    caption: str
    unit: str = ""

    @property
    def passes(self) -> int:
        """Number of passes."""
        return sum(len(row) for view in self.shown for row in view.timeline.schedule.order)

    @property
    def microbatch_bytes(self) -> float:
        """Bytes of a microbatch's activations on an average rank; 0 if unknown."""
        return max(view.microbatch_bytes for view in self.shown)

    @property
    def labels(self) -> Sequence[str]:
        """Labels that distinguish views of one schedule."""
        return [view.label if title(view.timeline.schedule.name) != view.label else "" for view in self.shown]


def of_plans(timelines: Sequence[Timeline], caption: str, unit: str, microbatch_bytes: float = 0.0) -> Drawing:
    """Draws plans one below another, each with its name."""
    shown = [View(title(timeline.schedule.name), timeline, microbatch_bytes=microbatch_bytes) for timeline in timelines]
    return Drawing(shown, " and ".join(view.label for view in shown), caption, unit)


def of_run(recorded: Recorded) -> Drawing:
    """Draws a recorded run below its plan, in milliseconds."""
    schedule = recorded.timeline.schedule
    caption = (
        f"{counted(schedule.ranks, 'pipeline rank')}, {counted(schedule.microbatches, 'microbatch')}, measured on "
        f"{printable_name(recorded.device)}. {explained(recorded)}"
    )
    return Drawing(views(recorded), f"{title(schedule.name)}, iteration {recorded.iteration}", caption, "ms")


def drawn(drawing: Drawing, form: str) -> str | bytes:
    """Returns ``drawing`` in one of :data:`FORMS`.

    Args:
        drawing: with no more passes than the form allows.
        form: name of the form.
    """
    if form in ("svg", *PICTURES):
        from megatron.schedules.report.svg import draw_svg

        timelines = [view.timeline for view in drawing.shown]
        svg = draw_svg(
            timelines,
            drawing.caption,
            labels=drawing.labels,
            unit=drawing.unit,
            microbatch_bytes=drawing.microbatch_bytes,
        )
        return picture(svg, form)
    if form == "html":
        from megatron.schedules.report.timeline_page import timeline_page

        return timeline_page(drawing.shown, drawing.heading, drawing.caption, drawing.unit)
    from megatron.schedules.report.trace import draw_trace

    return draw_trace(drawing.shown)


def write_run(recorded: Recorded, folder: Path) -> list[str]:
    """Writes ``recorded`` into ``folder`` as data and in every form that allows its size. Returns the files' names.

    Raises:
        OSError: if a file cannot be written.
    """
    make_folder(folder)
    drawing = of_run(recorded)
    written = [name for name, form in FILES.items() if drawing.passes <= FORMS[form]]
    write_text(folder / RUN, to_text(recorded))
    for name in written:
        write_text(folder / name, drawn(drawing, FILES[name]))
    return [*written, RUN]


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
