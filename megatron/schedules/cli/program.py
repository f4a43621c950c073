"""The command ``megatron-schedules``: plan, compare and draw schedules. Nothing here starts torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

import megatron.schedules
from megatron.schedules.cli.ending import emit, run
from megatron.schedules.cli.options import FLAGS, Ask, size_flags
from megatron.schedules.measure.recorded_run import read_recorded
from megatron.schedules.planner.adaptive import bound
from megatron.schedules.planner.layer_partition import as_layout
from megatron.schedules.planner.plan_json import PlanForm, to_text
from megatron.schedules.planner.registry import NAMES, describe
from megatron.schedules.report import table
from megatron.schedules.report.comparison_svg import draw_comparison
from megatron.schedules.report.drawing import FORMS, Drawing, drawn, of_plans, of_run
from megatron.schedules.report.figures import as_form, figures, number, percent, title
from megatron.schedules.report.pictures import PICTURES, check_library, picture
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.simulator import Timeline
from megatron.schedules.schedule.text_forms import to_csv
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import integer
from megatron.schedules.utils.printable import counted

PROGRAM = "megatron-schedules"
_PAGE = 100  # columns of a text that does not go to a terminal
_WIDEST = 100_000  # columns that a pager still shows

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# The mark keeps click from filling the lines into one paragraph.
_SCHEDULES = "\n".join(["\b", "Schedules:", *(f"  {name.ljust(18)}{describe(name)}" for name in NAMES)])

_one = click.option("--schedule", metavar="NAME", help="Which schedule to plan; the list is below.")
_several = click.option(
    "--schedule",
    "schedules",
    metavar="NAME",
    multiple=True,
    help="Give this flag once for each schedule to choose which are shown, and in what order.",
)
_form_help = "Without it the ending of --output's file decides, and otherwise it is"
_PLAN_FORMS = ("text", "csv", "json", "svg", "html", *PICTURES)
_COMPARE_FORMS = ("text", "markdown", "csv", "json", "svg", *PICTURES)
_DRAW_FORMS = ("svg", "text", "html", "trace", *PICTURES)
# Of the forms whose files do not end in their name.
_ENDINGS = {"text": "txt", "markdown": "md", "trace": "json"}

# Below a comparison without it.
_ADAPTIVE = "\nadaptive is not shown: --memory-limit 0.5 adds the shortest schedule within half of 1F1B's memory.\n"

_gradients = click.option(
    "--gradients",
    is_flag=True,
    help="Mark where each chunk's gradients are complete, in an SVG, PNG or PDF: to see how much of their "
    "data-parallel reduction --overlap-grad-reduce hides behind the rest of the schedule.",
)
_width = click.option(
    "--width",
    metavar="COLUMNS",
    help="Columns of the text form: more than the terminal has show a long schedule pass by pass, say in less -S. "
    f"Without it as wide as the terminal, or {_PAGE} columns where there is none.",
)


@click.group(invoke_without_command=True, context_settings=_HELP)
@click.option("--version", is_flag=True, help="Say which version this is, and stop.")
@click.pass_context
def _program(context: click.Context, version: bool) -> None:
    """Pipeline schedules whose activation memory is a choice: see bubble and memory before you train."""
    if version:
        emit(f"{PROGRAM} {megatron.schedules.__version__}\n", None)
        context.exit()
    if context.invoked_subcommand is None:
        raise PlanError("no command given: use plan, compare or draw; --help explains them")


@_program.command("plan", epilog=_SCHEDULES)
@_one
@size_flags
@click.option(
    "--format",
    "form",
    metavar="|".join(_PLAN_FORMS),
    help="text draws the timeline in the terminal; csv is for training and for torch; json has costs and figures too, "
    "for programs; svg, png and pdf are drawings for documents; html is a page to zoom and point at. "
    f"{_form_help} text.",
)
@_width
@_gradients
def _plan(
    schedule: str | None, form: str | None, output: Path | None, width: str | None, gradients: bool, **size: Any
) -> None:
    """Plan one schedule: its order, when it runs, what idles and what is held."""
    if schedule is None and size["schedule_file"] is None:
        raise PlanError(f"--schedule is missing: name one of {', '.join(NAMES)}")
    form = _form(form, output, _PLAN_FORMS)
    columns = _drawn_as(form, width, gradients)
    ask = Ask([] if schedule is None else [schedule], ["file"], **size)
    (name,) = ask.names
    timeline = ask.timeline(name)
    if form == "csv":
        emit(to_csv(timeline.schedule), output)
    elif form == "json":
        least = bound(ask.planned[name]) if name == "adaptive" else None
        found = as_form(figures(timeline), least)
        emit(to_text(PlanForm.of(timeline, ask.request(name), ask.planned[name], found)) + "\n", output)
    else:
        footer = _how_good(timeline, ask) if name == "adaptive" else ""
        footer += _where(ask.planned[name].costs.layers) + _relieved(ask.planned[name].costs)
        drawing = of_plans([timeline], _caption(ask), _unit(size), _microbatch_bytes(ask))
        _emit_drawing(form, drawing, output, columns, gradients, footer)


@_program.command("compare", epilog=_SCHEDULES)
@_several
@size_flags
@click.option(
    "--format",
    "form",
    metavar="|".join(_COMPARE_FORMS),
    help="text to read here; markdown for documents; csv and json, unrounded, for programs; svg, png and pdf show each "
    f"schedule's bubble against its memory. {_form_help} text.",
)
def _compare(schedules: Sequence[str], form: str | None, output: Path | None, **size: Any) -> None:
    """Compare schedules at one size by bubble, memory, and throughput against 1F1B, to choose one."""
    form = _form(form, output, _COMPARE_FORMS)
    ask = Ask(schedules, NAMES, **size)
    baseline = ask.timeline("1f1b").makespan
    rows = []
    for name in ask.names:
        try:
            found = figures(ask.timeline(name), _microbatch_bytes(ask))
        except PlanError as error:
            rows.append(table.Row(name, str(error)))
        else:
            rows.append(table.Row(name, found, baseline / found.makespan))
    if form in ("svg", *PICTURES):
        emit(picture(draw_comparison(rows, _caption(ask)), form), output)
        return
    write = {"text": table.as_text, "markdown": table.as_markdown, "csv": table.as_csv, "json": table.as_json}
    without = form == "text" and not schedules and "adaptive" not in ask.names
    emit(write[form](rows) + (_ADAPTIVE if without else ""), output)


@_program.command("draw", epilog=_SCHEDULES)
@_several
@size_flags
@click.option(
    "--recorded",
    metavar="FILE",
    type=Path,
    help="A run that was recorded, rather than plans: the recorded.json that training with --pipeline-timeline writes. "
    "Draws the plan and what happened, and where each rank idled.",
)
@click.option(
    "--format",
    "form",
    metavar="|".join(_DRAW_FORMS),
    help="svg, png and pdf are for documents; text for the terminal; html is a page to zoom and point at, with each "
    f"rank's memory and idle time; trace is for Perfetto and chrome://tracing. {_form_help} svg.",
)
@_width
@_gradients
def _draw(
    schedules: Sequence[str],
    recorded: Path | None,
    form: str | None,
    output: Path | None,
    width: str | None,
    gradients: bool,
    **size: Any,
) -> None:
    """Draw schedules, or a recorded run, below one another on one time scale. Without either: 1F1B and V-Half."""
    form = _form(form, output, _DRAW_FORMS)
    columns = _drawn_as(form, width, gradients)
    if recorded is not None:
        if given := [name for name, value in {"schedule": schedules, **size}.items() if value]:
            flag = f"--{given[0].replace('_', '-')}"
            raise PlanError(f"--recorded brings its own schedule, size and costs: leave out {flag}")
        _emit_drawing(form, of_run(read_recorded(recorded)), output, columns, gradients)
        return
    ask = Ask(schedules, ["1f1b", "v-half"] if size["schedule_file"] is None else ["file"], **size)
    timelines = [ask.timeline(name) for name in ask.names]
    drawing = of_plans(timelines, _caption(ask), _unit(size), _microbatch_bytes(ask))
    _emit_drawing(form, drawing, output, columns, gradients)


def _form(asked: str | None, output: Path | None, forms: Sequence[str]) -> str:
    """The format asked for, else the one the file's ending stands for, else the first of ``forms``."""
    if asked is None:
        ending = output.suffix[1:].lower() if output else ""
        meant = {_ENDINGS.get(form, form): form for form in forms} | {form: form for form in forms}
        asked = meant.get({"htm": "html"}.get(ending, ending)) if ending else forms[0]
        if asked is None:
            known = ", ".join(f".{_ENDINGS.get(form, form)}" for form in forms)
            raise PlanError(f"--output {output} ends in .{ending}, which is not known here: use {known}; or --format")
    elif asked not in forms:
        raise PlanError(f"--format {asked!r} is unknown here: use one of {', '.join(forms)}")
    check_library(asked)
    return asked


def _how_good(timeline: Timeline, ask: Ask) -> str:
    """How far from the best possible an adaptive plan is at most."""
    least = bound(ask.planned["adaptive"])
    by_name = timeline.schedule.name
    chosen = "" if by_name == "adaptive" else f"The shortest found within this memory is {title(by_name)}. "
    bubble = "" if timeline.costs.relieved else f", a bubble of {percent(1 - timeline.ideal / least)}"
    return (
        f"{chosen}"
        f"No schedule within this memory ends before {number(least)}{bubble}: this one, which ends at "
        f"{number(timeline.makespan)}, is at most {percent(timeline.makespan / least - 1)} longer than the best there "
        "is.\n"
    )


def _where(layers: tuple[int, ...] | None) -> str:
    """The layout, for Megatron's own flag too."""
    return f"Layers: {as_layout(layers)}\n" if layers else ""


def _relieved(costs: Costs) -> str:
    """What is recomputed and what offloaded of the layers of all stages together, in words."""
    said = {"redone": "done again", "offloaded": "offloaded"}
    parts = [f"{percent(share)} of the layers {said[name]}" for name, share in costs.mean_relief.items()]
    return f"Relief: {', '.join(parts)}.\n" if parts else ""


def _drawn_as(form: str, width: str | None, gradients: bool) -> int | None:
    """The columns asked for of a drawing in text; refuses what the form would ignore."""
    columns = integer("--width", width, 1, "60 columns or more read well", _WIDEST)
    if columns is not None and form != "text":
        raise PlanError("--width is of the text form: give --format text, or leave the flag out")
    if gradients and form not in ("svg", *PICTURES):
        raise PlanError("--gradients marks an SVG, or a picture of one: give --format svg, or leave the flag out")
    return columns


def _emit_drawing(
    form: str, drawing: Drawing, output: Path | None, columns: int | None, gradients: bool, footer: str = ""
) -> None:
    """Write a drawing. The text form is as wide and as colourful as the terminal is, or plain where there is none."""
    if form in FORMS:
        if drawing.passes > FORMS[form]:
            instead = "html or text" if drawing.passes <= FORMS["html"] else "text"
            raise PlanError(
                f"{form} of {drawing.passes} passes would be too large to look at: {FORMS[form]} at most; use --format "
                f"{instead}"
            )
        emit(drawn(drawing, form, gradients=gradients), output)
        return

    from rich.console import Console

    from megatron.schedules.report.text import draw_text

    console = Console(highlight=False)
    terminal = output is None and console.is_terminal
    # Sixteen colours do not tell a lighter chunk from another kind's; letters do.
    colour = terminal and console.color_system in ("256", "truecolor") and not console.no_color
    timelines = [view.timeline for view in drawing.shown]
    wide = columns or (console.width if terminal else _PAGE)
    text = draw_text(timelines, wide, colour, drawing.labels, drawing.microbatch_bytes)
    text.append(footer)
    if not terminal:
        emit(text.plain, output)
        return
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    emit(captured.get(), None)


def _caption(ask: Ask) -> str:
    times = f"F {number(ask.costs.forward)}, I {number(ask.costs.input_grad)}, W {number(ask.costs.weight_grad)}"
    if ask.costs.model is not None:
        times += f", the output layer as long as {number(ask.costs.last_in_layers)} layers"
        times += ", shared by all ranks" if ask.costs.shared_vocabulary else ""
    copies = f", a copy of what these hold {number(ask.costs.copy)} one way" if ask.costs.copy else ""
    return (
        f"{counted(ask.ranks, 'pipeline rank')}, {counted(ask.microbatches, 'microbatch')}; half a rank's layers take "
        f"{times}{copies}; P2P latency {number(ask.costs.comm)}."
    )


def _microbatch_bytes(ask: Ask) -> float:
    """What one microbatch's worth of one rank's activations takes; 0 where no model says it."""
    return 0.0 if ask.costs.memory is None else ask.costs.memory.of_rank(ask.ranks)


def _unit(size: Mapping[str, Any]) -> str:
    """What times are in: a profile's milliseconds, or any unit."""
    return "" if size["costs_file"] is None else "ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, or the process's own; the exit status, see :func:`.ending.run`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and shades where the terminal knows ASCII only
    spoken = " ".join([PROGRAM, *[name for name in arguments if name in _program.commands][:1]])
    return run(_program, PROGRAM, arguments, flags=FLAGS, spoken=spoken)
