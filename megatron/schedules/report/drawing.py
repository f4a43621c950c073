"""A drawing in any of its forms: of a recorded run, or of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.schedules.measure.recorded_run import Recorded, to_text
from megatron.schedules.report.figures import title
from megatron.schedules.report.pictures import PICTURES, picture
from megatron.schedules.report.views import View, explained, views
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.utils.output_files import make_folder, write_text
from megatron.schedules.utils.printable import counted, printable_name

# The form of a drawing, and the most passes of one that still opens.
FORMS: Mapping[str, int] = {"svg": 200_000, "png": 200_000, "pdf": 200_000, "html": 1_000_000, "trace": 500_000}
# What a recorded run is written as, by the name of the file; the run itself stands beside them.
FILES: Mapping[str, str] = {"timeline.html": "html", "timeline.svg": "svg", "timeline.trace.json": "trace"}
RUN = "recorded.json"


@dataclass(frozen=True)
class Drawing:
    """What is drawn.

    Args:
        shown: one or more views, in one unit of time.
        heading: what it is of.
        caption: what else there is to know, in a sentence or two.
        unit: of time; empty where it is any.
    """

    shown: Sequence[View]
    heading: str
    caption: str
    unit: str = ""

    @property
    def passes(self) -> int:
        """How many passes it has."""
        return sum(len(row) for view in self.shown for row in view.timeline.schedule.order)

    @property
    def microbatch_bytes(self) -> float:
        """What one microbatch's worth of one rank's activations takes; 0 where no model says it."""
        return max(view.microbatch_bytes for view in self.shown)

    @property
    def labels(self) -> Sequence[str]:
        """What tells views of one schedule apart."""
        return [view.label if title(view.timeline.schedule.name) != view.label else "" for view in self.shown]


def of_plans(timelines: Sequence[Timeline], caption: str, unit: str, microbatch_bytes: float = 0.0) -> Drawing:
    """Plans below one another, each under its name; bytes as :class:`.View` has them."""
    shown = [View(title(each.schedule.name), each, microbatch_bytes=microbatch_bytes) for each in timelines]
    return Drawing(shown, " and ".join(view.label for view in shown), caption, unit)


def of_run(recorded: Recorded) -> Drawing:
    """A recorded run: its plan above what happened, in milliseconds."""
    schedule = recorded.timeline.schedule
    caption = (
        f"{counted(schedule.ranks, 'pipeline rank')}, {counted(schedule.microbatches, 'microbatch')}, measured on "
        f"{printable_name(recorded.device)}. {explained(recorded)}"
    )
    return Drawing(views(recorded), f"{title(schedule.name)}, iteration {recorded.iteration}", caption, "ms")


def drawn(drawing: Drawing, form: str, *, gradients: bool = False) -> str | bytes:
    """``drawing`` as a file of one of :data:`FORMS`.

    Args:
        drawing: of no more passes than the form is for.
        form: its name.
        gradients: mark where each chunk's gradients are complete, in an SVG or a picture of one.
    """
    if form in ("svg", *PICTURES):
        from megatron.schedules.report.svg import draw_svg

        timelines = [view.timeline for view in drawing.shown]
        svg = draw_svg(
            timelines,
            drawing.caption,
            gradients=gradients,
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
    """Write ``recorded`` into ``folder``: as data, and in every form that is not too large for it; the files' names.

    Raises:
        OSError: where it cannot be written.
    """
    make_folder(folder)
    drawing = of_run(recorded)
    written = [name for name, form in FILES.items() if drawing.passes <= FORMS[form]]
    write_text(folder / RUN, to_text(recorded))
    for name in written:
        write_text(folder / name, drawn(drawing, FILES[name]))
    return [*written, RUN]
