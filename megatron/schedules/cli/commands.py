"""Command ``megatron-schedules``: plans, compares and draws schedules without torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

import megatron.schedules
from megatron.schedules.cli.ending import emit, run
from megatron.schedules.cli.options import FLAGS, plan_of, plans_of, schedule_flag, size_flags
from megatron.schedules.job.plans import JobPlans
from megatron.schedules.job.spec import JobSpec
from megatron.schedules.job.stage_layers import written
from megatron.schedules.measure.recorded_run import read_recorded
from megatron.schedules.planner.registry import AUTO, CHOICES, NAMES, WRITTEN, describe
from megatron.schedules.planner.service import Plan
from megatron.schedules.report import table
from megatron.schedules.report.drawing import FORMS, PICTURES, Drawing, check_library, drawn, of_plans, of_run, picture
from megatron.schedules.report.figures import figures, number, title
from megatron.schedules.report.frontier_svg import draw_comparison
from megatron.schedules.report.memory_table import NOT_COUNTED
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import size
from megatron.schedules.utils.printable import amount, counted, percent

PROGRAM = "megatron-schedules"
_PAGE = 100  # columns of text that is not written to a terminal
# New objects after which Python looks for unreachable cycles. A large plan has a million passes, and none in a cycle.
_OBJECTS = 200_000
_LIMITING = 0.02  # least bubble that uneven ranks leave, from which a line says so

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# \b keeps click from joining the lines.
_LINES = (f"  {chosen.ljust(18)}{describe(name)}" for chosen, name in WRITTEN.items())
_SCHEDULES = "\n".join(["\b", "Schedules:", *_LINES])

_one = schedule_flag(multiple=False, more="The list of names is below.")
_several = schedule_flag(
    "schedules", multiple=True, more="Give this flag once for each schedule, in the order in which they are shown."
)
_form_help = "Without it the ending of --output's file decides, and otherwise it is"
_PLAN_FORMS = ("text", "csv", "json", "svg", "html", *PICTURES)
_COMPARE_FORMS = ("text", "markdown", "csv", "json", "svg", *PICTURES)
_DRAW_FORMS = ("svg", "text", "html", "trace", *PICTURES)
# File extensions of formats whose name differs from the extension.
_ENDINGS = {"text": "txt", "markdown": "md", "trace": "json"}

_ADAPTIVE = "\nadaptive is not shown: --memory-limit 0.5 adds the shortest schedule within half of 1F1B's memory.\n"


@click.group(invoke_without_command=True, context_settings=_HELP)
@click.option("--version", is_flag=True, help="Print the version.")
@click.pass_context
def _program(context: click.Context, version: bool) -> None:
    """Pipeline schedules with controllable activation memory: see bubble and memory before you train."""
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
def _plan(
    schedule: str | None,
    form: str | None,
    output: Path | None,
    **size: Any,
) -> None:
    """Plan one schedule: its order, timeline, bubble and activation memory."""
    if schedule is None:
        raise PlanError(f"--schedule is missing: name one of {', '.join(WRITTEN)}")
    form = _form(form, output, _PLAN_FORMS)
    plans = plans_of([schedule], [], **size)
    job = plan_of(plans.specs[0])
    plan = job.plan
    if form == "csv":
        emit(plan.to_csv(), output)
    elif form == "json":
        emit(plan.to_json(), output)
    else:
        footer = plan.explanation + "\n" if plan.asked.schedule == AUTO else ""
        footer += f"{job.left_out}\n" if job.left_out else ""
        footer += _how_good(plan) + _where(job.spec, plan.decisions.layers) + _savings(plan.decisions)
        footer += _uneven([schedule]) if plans.has_uneven_stages(job) else ""
        if job.memory:
            most = max(rank.activations for rank in job.memory)
            footer += f"Activations: {amount(most)} on the rank that holds most; {plans.counted_for}.\n"
        drawing = of_plans([plan.timeline], _caption(plans), _unit(plans), plans.microbatch_bytes)
        _emit_drawing(form, drawing, output, footer)


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
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="With --model: the memory of one GPU, such as 80GiB. Shows weights, gradients, optimizer, activations "
    "and messages of the fullest rank, and whether they fit.",
)
def _compare(
    schedules: Sequence[str],
    form: str | None,
    output: Path | None,
    device_memory: str | None,
    **sizes: Any,
) -> None:
    """Compare schedules at one size by bubble, memory, and throughput against 1F1B, to choose one."""
    form = _form(form, output, _COMPARE_FORMS)
    room = None if device_memory is None else size("--device-memory", device_memory)
    plans = plans_of(schedules, NAMES if sizes["model"] is None else CHOICES, **sizes)
    if room is not None and not plans.knows_bytes:
        why = "which is missing"
        if plans.has_model:
            why = f"and {plans.instead_of_bytes[0]} goes before them: leave one of the two out"
        raise PlanError(f"--device-memory compares the bytes of --model, {why}")
    rows, uneven, limiting, left_out = [], [], 0.0, ""
    for name, job, throughput in plans.compared(partial(plan_of, device=room)):
        if isinstance(job, str):
            rows.append(table.Row(name, job))
            continue
        uneven += [name] * plans.has_uneven_stages(job)
        timeline = job.plan.timeline
        if name == AUTO and job.left_out:
            left_out = f"{name}: {job.left_out}\n"
        limiting = max(limiting, 0.0 if job.plan.decisions.layers else timeline.least_bubble)
        row = table.Row(name, figures(timeline, plans.microbatch_bytes), throughput, layers=_layers(job.plan))
        if room is not None:
            worst = job.memory[job.worst]
            row = replace(row, memory=worst.parts | {"together": worst.device}, fits=job.fits(room))
        rows.append(row)
    if form in ("svg", *PICTURES):
        emit(picture(draw_comparison(rows, _caption(plans)), form), output)
        return
    write = {"text": table.as_text, "markdown": table.as_markdown, "csv": table.as_csv, "json": table.as_json}
    notes = [
        _counted_for(plans, room) + "\n" if plans.knows_bytes else "",
        _uneven(uneven) if uneven else "",
        left_out,
        _limited(limiting) if limiting >= _LIMITING else "",
    ]
    note = "".join(f"\n{line}" for line in notes if line) if form in ("text", "markdown") else ""
    without = (
        form == "text" and not schedules and "adaptive" not in [spec.settings.schedule.name for spec in plans.specs]
    )
    emit(write[form](rows) + note + (_ADAPTIVE if without else ""), output)


@_program.command("draw", epilog=_SCHEDULES)
@_several
@size_flags
@click.option(
    "--recorded",
    metavar="FILE",
    type=Path,
    help="A run that was recorded, rather than plans: the recorded.json that training with --pipeline-measure writes. "
    "Draws the plan and what happened, and where each rank idled.",
)
@click.option(
    "--format",
    "form",
    metavar="|".join(_DRAW_FORMS),
    help="svg, png and pdf are for documents; text for the terminal; html is a page to zoom and point at, with each "
    f"rank's memory and idle time; trace is for Perfetto and chrome://tracing. {_form_help} text on a terminal and svg "
    "elsewhere.",
)
def _draw(
    schedules: Sequence[str],
    recorded: Path | None,
    form: str | None,
    output: Path | None,
    **size: Any,
) -> None:
    """Draw schedules, or a recorded run, below one another on one time scale. Without either: 1F1B and V-Half."""
    if form is None and output is None and sys.stdout is not None and sys.stdout.isatty():
        form = "text"
    form = _form(form, output, _DRAW_FORMS)
    if recorded is not None:
        if given := [name for name, value in {"schedule": schedules, **size}.items() if value]:
            flag = f"--{given[0].replace('_', '-')}"
            raise PlanError(f"--recorded brings its own schedule, size and costs: leave out {flag}")
        _emit_drawing(form, of_run(read_recorded(recorded)), output)
        return
    plans = plans_of(schedules, ["1f1b", "v-half"], **size)
    timelines = [plan_of(spec).plan.timeline for spec in plans.specs]
    drawing = of_plans(timelines, _caption(plans), _unit(plans), plans.microbatch_bytes)
    _emit_drawing(form, drawing, output)


def _counted_for(plans: JobPlans, room: float | None) -> str:
    """Describes the model and the memory that the byte counts cover."""
    of = "Activations, in GiB," if room is None else f"Memory, compared with {room / 2**30:.2f} GiB,"
    return f"{of} of the rank that holds most: {plans.counted_for}. Not counted: {NOT_COUNTED}."


def _form(asked: str | None, output: Path | None, forms: Sequence[str]) -> str:
    """Returns the given format, else the format of the file's extension, else the first of ``forms``."""
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


def _how_good(plan: Plan) -> str:
    """Describes how far an adaptive plan is from the lower bound."""
    least, timeline, by_name = plan.lower_bound, plan.timeline, plan.schedule.name
    if least is None:
        return ""
    chosen = "" if by_name == "adaptive" else f"The shortest found within this memory is {title(by_name)}. "
    # Recompute, and weight gradients behind messages, differ between plans, and with them what counts as computing.
    comparable = not (timeline.costs.saved or timeline.costs.has_messages)
    bubble = f", a bubble of {percent(1 - timeline.ideal / least)}" if comparable else ""
    return (
        f"{chosen}"
        f"No schedule within this memory ends before {number(least)}{bubble}: this one, which ends at "
        f"{number(timeline.makespan)}, is at most {percent(timeline.makespan / least - 1)} longer than the best there "
        "is.\n"
    )


def _where(spec: JobSpec, layers: tuple[int, ...] | None) -> str:
    """Formats the layer partition as Megatron's flag does."""
    return f"Layers: {written(spec.layers, layers)}\n" if layers else ""


def _uneven(names: Sequence[str]) -> str:
    """Says what training needs for schedules whose stages have different numbers of layers."""
    return (
        f"The model's layers do not divide by the stages of {', '.join(names)}: give training --pipeline-layers auto "
        "or N,N,...\n"
    )


def _layers(plan: Plan) -> str:
    """Formats the number of layers of each stage as a number or as a range; empty if the model is unknown."""
    counts = plan.request.layers_on(plan.schedule.placement)
    if counts is None:
        return ""
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least}-{most}"


def _limited(bubble: float) -> str:
    """Says what limits schedules with even layers."""
    return (
        f"With even layers the rank with the output layer computes most: a bubble of {percent(bubble)} is left in any "
        "order. --layers auto partitions the layers for that, as auto does.\n"
    )


def _savings(decisions: Decisions) -> str:
    """Describes the layers that all stages together recompute and offload."""
    parts = [f"{percent(share)} of the layers {name}" for name, share in decisions.mean_savings.items()]
    return f"Memory saving: {', '.join(parts)}.\n" if parts else ""


def _emit_drawing(form: str, drawing: Drawing, output: Path | None, footer: str = "") -> None:
    """Writes a drawing. On a terminal the text format uses its width and colours; elsewhere it is plain."""
    if form in FORMS:
        if drawing.passes > FORMS[form]:
            instead = "html or text" if drawing.passes <= FORMS["html"] else "text"
            raise PlanError(
                f"{form} of {drawing.passes} passes would be too large to look at: {FORMS[form]} at most; use --format "
                f"{instead}"
            )
        emit(drawn(drawing, form), output)
        return

    from rich.console import Console

    from megatron.schedules.report.text import draw_text

    console = Console(highlight=False)
    terminal = output is None and console.is_terminal
    # With only 16 colours, letters are clearer than shades.
    colour = terminal and console.color_system in ("256", "truecolor") and not console.no_color
    timelines = [view.timeline for view in drawing.shown]
    wide = console.width if terminal else _PAGE
    text = draw_text(timelines, wide, colour, drawing.labels, drawing.microbatch_bytes)
    text.append(footer)
    if not terminal:
        emit(text.plain, output)
        return
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    emit(captured.get(), None)


def _caption(plans: JobPlans) -> str:
    costs, size = plans.costs, f"{counted(plans.ranks, 'pipeline rank')}, {counted(plans.microbatches, 'microbatch')}"
    forward, input_grad, weight_grad = map(number, costs.layers.passes)
    times = f"F {forward}, I {input_grad}, W {weight_grad}"
    if not costs.model.divisible:
        times += f", the output layer as long as {number(costs.last_in_layers)} layers"
        times += ", shared by all ranks" if costs.model.shared_vocabulary else ""
    copies = f", a copy of what these hold {number(costs.copies.time)} one way" if costs.copies.time else ""
    return f"{size}; half a rank's layers take {times}{copies}; P2P latency {number(costs.link.latency)}."


def _unit(plans: JobPlans) -> str:
    """Unit of times: milliseconds with a profile, otherwise empty."""
    return "ms" if plans.is_measured else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with ``arguments`` (by default the process's own).

    Returns the exit status of :func:`.ending.run`.
    """
    gc.set_threshold(_OBJECTS)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and shades on an ASCII-only terminal
    spoken = " ".join([PROGRAM, *[name for name in arguments if name in _program.commands][:1]])
    return run(_program, PROGRAM, arguments, flags=FLAGS, spoken=spoken)
