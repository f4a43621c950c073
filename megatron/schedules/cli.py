"""The command ``megatron-schedules``: plan, compare and draw schedules. Nothing here starts torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

import megatron.schedules
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import NAMES, Request, describe, plan
from megatron.schedules.planning.simulate import Timeline, simulate
from megatron.schedules.planning.textforms import from_csv, to_csv, to_json
from megatron.schedules.report import table
from megatron.schedules.report.figures import Figures, counted, figures, number

PROGRAM = "megatron-schedules"
_PAGE = 100  # columns of a text that does not go to a terminal
# Ranks x microbatches x chunks. More is a slip of the finger, and would take hours and all the memory there is.
_LARGEST = 1_000_000


_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# The mark keeps click from filling the lines into one paragraph.
_SCHEDULES = "\n".join(["\b", "Schedules:", *(f"  {name.ljust(18)}{describe(name)}" for name in NAMES)])

Command = Callable[..., None]

_one = click.option("--schedule", metavar="NAME", help="Which schedule to plan; the list is below.")
_several = click.option(
    "--schedule",
    "schedules",
    metavar="NAME",
    multiple=True,
    help="Give this flag once for each schedule to choose which are shown, and in what order.",
)
_form_help = "Without it the ending of --output's file decides, and otherwise it is"


def _size(command: Command) -> Command:
    """The flags every command has: what is planned, and where the result goes."""
    for flag in reversed(
        (
            click.option(
                "--pipeline-size",
                metavar="D",
                help="Pipeline ranks, 2 or more: what Megatron calls --pipeline-model-parallel-size. May be left out "
                "where a CSV says it.",
            ),
            click.option(
                "--microbatches",
                metavar="N",
                help="Microbatches of one iteration: global batch / (micro batch x data-parallel size). May be left "
                "out where a CSV says it.",
            ),
            click.option(
                "--costs",
                metavar="F,B,W[,COMM]",
                default="1,1,1,0",
                show_default=True,
                help="Times of forward, input gradient and weight gradient over half a rank's layers, and of one hop "
                "between ranks, in any unit. Give measured ones: order and bubble depend on them.",
            ),
            click.option(
                "--chunks",
                metavar="V",
                help="Model chunks a rank, for interleaved-1f1b (2 without this flag): more of them shrink its bubble "
                "and multiply its messages.",
            ),
            click.option(
                "--schedule-file",
                metavar="CSV",
                type=Path,
                help="A compute-only CSV of your own, one row a rank, as torch.distributed.pipelining writes it: for "
                "an order that has no name here.",
            ),
            click.option(
                "--output",
                metavar="FILE",
                type=Path,
                help="Write here rather than to the terminal. A file that exists is overwritten.",
            ),
        )
    ):
        command = flag(command)
    return command


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
@_size
@click.option(
    "--format",
    "form",
    metavar="text|csv|json|svg",
    help="text draws the timeline in the terminal; csv is for training and for torch; json has costs and figures too, "
    f"for programs; svg is a drawing for documents. {_form_help} text.",
)
@_width
def _plan(schedule: str | None, form: str | None, output: Path | None, width: str | None, **size: Any) -> None:
    """Plan one schedule: its order, when it runs, what idles and what is held."""
    file = size["schedule_file"]
    if schedule is None and file is None:
        raise PlanError(f"--schedule is missing: name one of {', '.join(NAMES)}")
    if schedule not in (None, "file") and file is not None:
        raise PlanError(f"--schedule-file goes with --schedule file, not {schedule}: leave one of them out")
    form = _form(form, output, ("text", "csv", "json", "svg"))
    ask = _Ask(**size)
    timeline = ask.timeline(schedule or "file")
    chunks = timeline.schedule.placement.chunks
    if ask.chunks not in (None, chunks):
        raise PlanError(f"--chunks {ask.chunks}: {schedule or 'file'} has {chunks} a rank; leave the flag out")
    if form == "csv":
        _emit(to_csv(timeline.schedule), output)
    elif form == "json":
        _emit(to_json(timeline.schedule, _extra(ask.costs, figures(timeline))) + "\n", output)
    else:
        _emit_drawing(form, [timeline], ask, output, width)


@_program.command("compare", epilog=_SCHEDULES)
@_several
@_size
@click.option(
    "--format",
    "form",
    metavar="text|markdown|csv|json",
    help=f"text to read here; markdown for documents; csv and json, unrounded, for programs. {_form_help} text.",
)
def _compare(schedules: Sequence[str], form: str | None, output: Path | None, **size: Any) -> None:
    """Compare schedules at one size by bubble, memory, and throughput against 1F1B, to choose one."""
    form = _form(form, output, ("text", "markdown", "csv", "json"))
    ask = _Ask(**size)
    names = schedules or [name for name in NAMES if name != "file" or ask.csv]
    for name in names:
        ask.known(name)
    baseline = ask.timeline("1f1b").makespan
    rows = []
    for index, name in enumerate(names):
        _progress(f"planning {name} ({index + 1} of {len(names)})")
        try:
            found = figures(ask.timeline(name))
        except PlanError as error:
            rows.append(table.Row(name, str(error)))
        else:
            rows.append(table.Row(name, found, baseline / found.makespan))
    _progress("")
    write = {"text": table.as_text, "markdown": table.as_markdown, "csv": table.as_csv, "json": table.as_json}
    _emit(write[form](rows), output)


@_program.command("draw", epilog=_SCHEDULES)
@_several
@_size
@click.option(
    "--format",
    "form",
    metavar="svg|text",
    help=f"svg is for documents; text for the terminal. {_form_help} svg.",
)
@_width
def _draw(schedules: Sequence[str], form: str | None, output: Path | None, width: str | None, **size: Any) -> None:
    """Draw schedules below one another on one time scale. Without --schedule: 1F1B and V-Half."""
    form = _form(form, output, ("svg", "text"))
    ask = _Ask(**size)
    names = schedules or (["file"] if ask.csv else ["1f1b", "v-half"])
    _emit_drawing(form, [ask.timeline(name) for name in names], ask, output, width)


class _Ask:
    """What the flags ask for, checked: a size, costs, and perhaps a CSV. Raises :class:`PlanError`."""

    def __init__(
        self,
        pipeline_size: str | None,
        microbatches: str | None,
        costs: str,
        chunks: str | None,
        schedule_file: Path | None,
    ) -> None:
        d = _integer("--pipeline-size", pipeline_size, 2, "a pipeline has 2 ranks or more")
        n = _integer("--microbatches", microbatches, 1, "an iteration has 1 microbatch or more")
        self.chunks = _integer("--chunks", chunks, 1, "a rank holds 1 chunk or more")
        self.costs = _named("--costs", lambda: Costs.parse(costs))
        self.csv = csv = None if schedule_file is None else _read(schedule_file)
        if csv is not None and (d is None or n is None):
            own = _named("--schedule-file", lambda: from_csv(csv))
            d, n = d or own.ranks, n or own.microbatches
        if d is None:
            raise PlanError("--pipeline-size is missing: give the number of pipeline ranks, 2 or more")
        if n is None:
            raise PlanError("--microbatches is missing: give the number of microbatches in an iteration")
        if d * n * (self.chunks or 1) > _LARGEST:
            raise PlanError(
                f"--pipeline-size {d} with --microbatches {n} is too large to plan: "
                f"ranks x microbatches x chunks may be {_LARGEST} at most"
            )
        self.ranks, self.microbatches = d, n

    def known(self, name: str) -> None:
        """Raise for a name that no schedule has, or that lacks its CSV."""
        if name not in NAMES or (name == "file" and self.csv is None):
            _named("--schedule", lambda: plan(Request(name, self.ranks, self.microbatches)))

    def timeline(self, name: str) -> Timeline:
        """Schedule ``name`` at this size, timed under these costs."""
        self.known(name)
        chunks = {} if self.chunks is None else {"chunks": self.chunks}
        schedule = plan(Request(name, self.ranks, self.microbatches, self.costs, csv=self.csv, **chunks))
        return simulate(schedule, self.costs.on(schedule.placement))


def _named[T](flag: str, compute: Callable[[], T]) -> T:
    """``compute()``, its error preceded by the flag it is about."""
    try:
        return compute()
    except PlanError as error:
        raise PlanError(f"{flag}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--schedule-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"--schedule-file: {path} is not a text file; a CSV in UTF-8 is needed") from None


def _integer(flag: str, text: str | None, least: int, why: str) -> int | None:
    """The number given for ``flag``, None where there is none."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise PlanError(f"{flag} {text!r} is not a whole number: {why}") from None
    if value < least:
        raise PlanError(f"{flag} {value} is too small: {why}")
    return value


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


def _emit_drawing(form: str, timelines: Sequence[Timeline], ask: _Ask, output: Path | None, width: str | None) -> None:
    """Write a drawing. The text form is as wide and as colourful as the terminal is, or plain where there is none."""
    columns = _integer("--width", width, 1, "60 columns or more read well")
    if form == "svg":
        from megatron.schedules.report.svg import draw_svg

        _emit(draw_svg(timelines, _caption(ask)), output)
        return

    from rich.console import Console

    from megatron.schedules.report.text import draw_text

    console = Console(highlight=False)
    terminal = output is None and console.is_terminal
    # Sixteen colours do not tell a lighter chunk from another kind's; letters do.
    colour = terminal and console.color_system in ("256", "truecolor") and not console.no_color
    drawing = draw_text(timelines, columns or (console.width if terminal else _PAGE), colour)
    if not terminal:
        _emit(drawing.plain, output)
        return
    with console.capture() as captured:
        console.print(drawing, soft_wrap=True, end="")
    _emit(captured.get(), None)


def _caption(ask: _Ask) -> str:
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
