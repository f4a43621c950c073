"""The command ``megatron-schedules``: plan, compare and draw schedules. Nothing here starts torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

import megatron.schedules
from megatron.schedules.ask import Ask, integer, size_flags
from megatron.schedules.planning.adaptive.plan import bound
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import NAMES, Tick, describe
from megatron.schedules.planning.simulate import Timeline
from megatron.schedules.planning.textforms import to_csv, to_json
from megatron.schedules.report import table
from megatron.schedules.report.figures import Figures, counted, figures, number, percent

PROGRAM = "megatron-schedules"
_PAGE = 100  # columns of a text that does not go to a terminal

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


_gradients = click.option(
    "--gradients",
    is_flag=True,
    help="Mark where each chunk's gradients are complete, in an SVG: to see how much of their data-parallel reduction "
    "--overlap-grad-reduce hides behind the rest of the schedule.",
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
        _emit(f"{PROGRAM} {megatron.schedules.__version__}\n", None)
        context.exit()
    if context.invoked_subcommand is None:
        raise PlanError("no command given: use plan, compare or draw; --help explains them")


@_program.command("plan", epilog=_SCHEDULES)
@_one
@size_flags
@click.option(
    "--format",
    "form",
    metavar="text|csv|json|svg",
    help="text draws the timeline in the terminal; csv is for training and for torch; json has costs and figures too, "
    f"for programs; svg is a drawing for documents. {_form_help} text.",
)
@_width
@_gradients
def _plan(
    schedule: str | None, form: str | None, output: Path | None, width: str | None, gradients: bool, **size: Any
) -> None:
    """Plan one schedule: its order, when it runs, what idles and what is held."""
    file = size["schedule_file"]
    if schedule is None and file is None:
        raise PlanError(f"--schedule is missing: name one of {', '.join(NAMES)}")
    if schedule not in (None, "file") and file is not None:
        raise PlanError(f"--schedule-file goes with --schedule file, not {schedule}: leave one of them out")
    for flag in ("memory_limit", "search_seconds"):
        if size[flag] is not None and schedule != "adaptive":
            spelt = f"--{flag.replace('_', '-')}"
            raise PlanError(f"{spelt} goes with --schedule adaptive, not {schedule or 'file'}: leave one of them out")
    form = _form(form, output, ("text", "csv", "json", "svg"))
    ask = Ask(**size)
    with _progress_bar(shown=schedule == "adaptive") as tick:
        timeline = ask.timeline(schedule or "file", tick)
    chunks = timeline.schedule.placement.chunks
    if ask.chunks not in (None, chunks) and schedule != "adaptive":
        raise PlanError(f"--chunks {ask.chunks}: {schedule or 'file'} has {chunks} a rank; leave the flag out")
    if form == "csv":
        _emit(to_csv(timeline.schedule), output)
    elif form == "json":
        extra = _extra(ask.costs, figures(timeline))
        if schedule == "adaptive":
            extra["figures"]["lower_bound"] = bound(ask.request(schedule))
        _emit(to_json(timeline.schedule, extra) + "\n", output)
    else:
        footer = _how_good(timeline, ask) if schedule == "adaptive" else ""
        _emit_drawing(form, [timeline], ask, output, width, gradients, footer)


@_program.command("compare", epilog=_SCHEDULES)
@_several
@size_flags
@click.option(
    "--format",
    "form",
    metavar="text|markdown|csv|json",
    help=f"text to read here; markdown for documents; csv and json, unrounded, for programs. {_form_help} text.",
)
def _compare(schedules: Sequence[str], form: str | None, output: Path | None, **size: Any) -> None:
    """Compare schedules at one size by bubble, memory, and throughput against 1F1B, to choose one."""
    form = _form(form, output, ("text", "markdown", "csv", "json"))
    ask = Ask(**size)
    given = {"file": ask.csv, "adaptive": ask.memory_limit}
    names = schedules or [name for name in NAMES if given.get(name, name)]
    for name in names:
        ask.known(name)
    baseline = ask.timeline("1f1b").makespan
    rows = []
    for index, name in enumerate(names):
        _progress(f"planning {name} ({index + 1} of {len(names)})")
        try:
            with _progress_bar(shown=name == "adaptive") as tick:
                found = figures(ask.timeline(name, tick))
        except PlanError as error:
            rows.append(table.Row(name, str(error)))
        else:
            rows.append(table.Row(name, found, baseline / found.makespan))
    _progress("")
    write = {"text": table.as_text, "markdown": table.as_markdown, "csv": table.as_csv, "json": table.as_json}
    _emit(write[form](rows), output)


@_program.command("draw", epilog=_SCHEDULES)
@_several
@size_flags
@click.option(
    "--format",
    "form",
    metavar="svg|text",
    help=f"svg is for documents; text for the terminal. {_form_help} svg.",
)
@_width
@_gradients
def _draw(
    schedules: Sequence[str], form: str | None, output: Path | None, width: str | None, gradients: bool, **size: Any
) -> None:
    """Draw schedules below one another on one time scale. Without --schedule: 1F1B and V-Half."""
    form = _form(form, output, ("svg", "text"))
    ask = Ask(**size)
    names = schedules or (["file"] if ask.csv else ["1f1b", "v-half"])
    _emit_drawing(form, [ask.timeline(name) for name in names], ask, output, width, gradients)


def _form(asked: str | None, output: Path | None, forms: Sequence[str]) -> str:
    """The format asked for, else the one the file's ending stands for, else the first of ``forms``."""
    if asked is None:
        ending = output.suffix[1:].lower() if output else ""
        ending = {"md": "markdown"}.get(ending, ending)
        return ending if ending in forms else forms[0]
    if asked not in forms:
        raise PlanError(f"--format {asked!r} is unknown here: use one of {', '.join(forms)}")
    return asked


def _extra(costs: Costs, found: Figures) -> dict[str, Any]:
    return {
        "costs": {
            "forward": costs.forward,
            "input_grad": costs.input_grad,
            "weight_grad": costs.weight_grad,
            "comm": costs.comm,
        },
        "figures": {
            "makespan": found.makespan,
            "bubble": found.bubble,
            "span_bubble": found.span_bubble,
            "peak_memory": found.peak,
            "peak_memory_by_rank": list(found.peaks),
            "memory_of_1f1b": found.share,
        },
    }


def _how_good(timeline: Timeline, ask: Ask) -> str:
    """How far from the best possible an adaptive plan is at most."""
    least = bound(ask.request("adaptive"))
    return (
        f"No schedule within this memory ends before {number(least)}, a bubble of "
        f"{percent(1 - timeline.ideal / least)}: this one, which ends at {number(timeline.makespan)}, is at most "
        f"{percent(timeline.makespan / least - 1)} longer than the best there is.\n"
    )


@contextmanager
def _progress_bar(*, shown: bool) -> Iterator[Tick]:
    """How far a search is, on standard error if anybody is looking; takes the shares of the work done."""
    if not (shown and sys.stderr.isatty()):
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("searching", total=1.0)
        yield lambda share: progress.advance(task, share)


def _emit_drawing(
    form: str,
    timelines: Sequence[Timeline],
    ask: Ask,
    output: Path | None,
    width: str | None,
    gradients: bool,
    footer: str = "",
) -> None:
    """Write a drawing. The text form is as wide and as colourful as the terminal is, or plain where there is none."""
    columns = integer("--width", width, 1, "60 columns or more read well")
    if gradients and form != "svg":
        raise PlanError("--gradients marks an SVG: give --format svg, or leave the flag out")
    if form == "svg":
        from megatron.schedules.report.svg import draw_svg

        _emit(draw_svg(timelines, _caption(ask), gradients=gradients), output)
        return

    from rich.console import Console

    from megatron.schedules.report.text import draw_text

    console = Console(highlight=False)
    terminal = output is None and console.is_terminal
    # Sixteen colours do not tell a lighter chunk from another kind's; letters do.
    colour = terminal and console.color_system in ("256", "truecolor") and not console.no_color
    drawing = draw_text(timelines, columns or (console.width if terminal else _PAGE), colour)
    drawing.append(footer)
    if not terminal:
        _emit(drawing.plain, output)
        return
    with console.capture() as captured:
        console.print(drawing, soft_wrap=True, end="")
    _emit(captured.get(), None)


def _caption(ask: Ask) -> str:
    times = f"F {number(ask.costs.forward)}, I {number(ask.costs.input_grad)}, W {number(ask.costs.weight_grad)}"
    return (
        f"{counted(ask.ranks, 'pipeline rank')}, {counted(ask.microbatches, 'microbatch')}; half a rank's layers take "
        f"{times}; a hop between ranks {number(ask.costs.comm)}. Numbers in cells are microbatches."
    )


def _progress(message: str) -> None:
    """Show ``message`` on one line of the terminal in place of the last one, if anybody is looking."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{message}")
        sys.stderr.flush()


def _emit(text: str, output: Path | None) -> None:
    """Write ``text`` to ``output``, or to standard output."""
    if output is None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still in the buffer goes nowhere, lest Python complains about it at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(128 + signal.SIGPIPE) from None
        except OSError as error:
            raise PlanError(f"cannot write to standard output: {error.strerror}") from None
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--output: cannot write {output}: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; whatever is wrong with ``arguments`` ends in one line on standard error.

    Returns:
        The exit status: 0, 2 for a wrong flag or a request that cannot be planned, 130 when interrupted, 141 when the
        reader of the output went away.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and shades where the terminal knows ASCII only
    program = " ".join([PROGRAM, *[name for name in arguments if name in _program.commands][:1]])
    try:
        return _program.main(arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except click.Abort:
        return 128 + signal.SIGINT
    except PlanError as error:
        message = str(error)
    except click.ClickException as error:
        message = f"{error.format_message().rstrip('.')}; --help lists the flags"
    sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
    return 2
