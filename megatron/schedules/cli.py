"""The command ``megatron-schedules``: plan, compare and draw schedules. Nothing here starts torch."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

import megatron.schedules
from megatron.schedules.planning.costs import Costs
from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import NAMES, Request, describe, plan
from megatron.schedules.planning.simulate import Timeline, simulate
from megatron.schedules.planning.textforms import from_csv, to_csv, to_json
from megatron.schedules.report.figures import Figures, counted, figures, number

PROGRAM = "megatron-schedules"
_PAGE = 100  # columns of a text that does not go to a terminal
# Ranks x microbatches x chunks. More is a slip of the finger, and would take hours and all the memory there is.
_LARGEST = 1_000_000


_SCHEDULES = "\n\n".join(["Schedules:", *(f"* {name}: {describe(name)}" for name in NAMES)])

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

Schedule = Annotated[
    str | None,
    typer.Option("--schedule", metavar="NAME", help="Which schedule to plan; the list is below.", show_default=False),
]
Schedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Give this flag once for each schedule to choose which to show, and in what order.",
        show_default=False,
    ),
]
PipelineSize = Annotated[
    str | None,
    typer.Option(
        "--pipeline-size",
        metavar="D",
        help="Pipeline ranks, 2 or more: what training calls --pipeline-model-parallel-size. A CSV brings its own.",
        show_default=False,
    ),
]
Microbatches = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="N",
        help="Microbatches of one iteration: global batch / (micro batch x data-parallel size). A CSV brings its own.",
        show_default=False,
    ),
]
CostsText = Annotated[
    str,
    typer.Option(
        "--costs",
        metavar="F,B,W[,COMM]",
        help="Times of forward, input gradient and weight gradient over half a rank's layers, and of one hop between "
        "ranks, in any unit. Give measured ones: order and bubble depend on them.",
    ),
]
Chunks = Annotated[
    str | None,
    typer.Option(
        "--chunks",
        metavar="V",
        help="Model chunks a rank, for interleaved-1f1b (else 2): more of them shrink its bubble and multiply its "
        "messages.",
        show_default=False,
    ),
]
ScheduleFile = Annotated[
    Path | None,
    typer.Option(
        "--schedule-file",
        metavar="CSV",
        help="A compute-only CSV of your own, one row a rank, as torch.distributed.pipelining writes it; use it to try "
        "an order that has no name here.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write here instead of to the terminal; a file that exists is overwritten. Its ending (.csv, .json, .svg "
        "...) chooses the format where --format does not.",
        show_default=False,
    ),
]
Width = Annotated[
    str | None,
    typer.Option(
        "--width",
        metavar="COLUMNS",
        help="Columns of the text form: more than the terminal has show long schedules pass by pass, say in less -S. "
        f"Without it the terminal's width, or {_PAGE} where there is none.",
        show_default=False,
    ),
]


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say which version this is, and stop.")] = False,
) -> None:
    """Pipeline schedules whose activation memory is a choice: see a schedule's bubble and memory before training."""
    if version:
        _emit(f"{PROGRAM} {megatron.schedules.__version__}\n", None)
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise PlanError("no command given: use plan, compare or draw; --help explains them")


@app.command("plan", epilog=_SCHEDULES)
def _plan(
    schedule: Schedule = None,
    pipeline_size: PipelineSize = None,
    microbatches: Microbatches = None,
    costs: CostsText = "1,1,1,0",
    chunks: Chunks = None,
    schedule_file: ScheduleFile = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="text|csv|json|svg",
            help="text draws the timeline in the terminal; csv is for training and for torch; json adds costs and "
            "figures for programs; svg draws it for documents.  [default: text]",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
    width: Width = None,
) -> None:
    """Plan one schedule: its order, when it runs, what idles and what is held."""
    if schedule is None and schedule_file is None:
        raise PlanError(f"--schedule is missing: name one of {', '.join(NAMES)}")
    if schedule_file is not None and schedule not in (None, "file"):
        raise PlanError(f"--schedule-file goes with --schedule file, not {schedule}: leave one of them out")
    form = _form(form, output, ("text", "csv", "json", "svg"))
    ask = _Ask(pipeline_size, microbatches, costs, chunks, schedule_file)
    timeline = ask.timeline(schedule or "file")
    if ask.chunks not in (None, chunks_used := timeline.schedule.placement.chunks):
        raise PlanError(f"--chunks {ask.chunks}: {schedule or 'file'} has {chunks_used} a rank; leave the flag out")
    if form == "csv":
        _emit(to_csv(timeline.schedule), output)
    elif form == "json":
        _emit(to_json(timeline.schedule, _extra(ask.costs, figures(timeline))) + "\n", output)
    elif form == "svg":
        _emit(_svg([timeline], ask), output)
    else:
        _emit_drawing([timeline], output, width)


@app.command("compare", epilog=_SCHEDULES)
def _compare(
    pipeline_size: PipelineSize = None,
    microbatches: Microbatches = None,
    costs: CostsText = "1,1,1,0",
    schedule: Schedules = None,
    chunks: Chunks = None,
    schedule_file: ScheduleFile = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="text|markdown|csv|json",
            help="text for reading here; markdown for documents; csv and json, unrounded, for programs.  "
            "[default: text]",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Compare schedules at one size: bubble, memory and throughput against 1F1B, to choose one by."""
    from megatron.schedules.report import table

    ask = _Ask(pipeline_size, microbatches, costs, chunks, schedule_file)
    names = schedule or [name for name in NAMES if name != "file" or schedule_file]
    for name in names:
        ask.known(name)
    form = _form(form, output, ("text", "markdown", "csv", "json"))
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
    write: dict[str, Callable[[Sequence[table.Row]], str]] = {
        "text": table.as_text,
        "markdown": table.as_markdown,
        "csv": table.as_csv,
        "json": table.as_json,
    }
    _emit(write[form](rows), output)


@app.command("draw", epilog=_SCHEDULES)
def _draw(
    schedule: Schedules = None,
    pipeline_size: PipelineSize = None,
    microbatches: Microbatches = None,
    costs: CostsText = "1,1,1,0",
    chunks: Chunks = None,
    schedule_file: ScheduleFile = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="svg|text",
            help="svg for documents; text for the terminal.  [default: svg]",
            show_default=False,
        ),
    ] = None,
    output: Output = None,
    width: Width = None,
) -> None:
    """Draw schedules below one another on one time scale. Without --schedule: 1F1B and V-Half."""
    ask = _Ask(pipeline_size, microbatches, costs, chunks, schedule_file)
    form = _form(form, output, ("svg", "text"))
    timelines = [ask.timeline(name) for name in schedule or (["file"] if schedule_file else ["1f1b", "v-half"])]
    if form == "svg":
        _emit(_svg(timelines, ask), output)
    else:
        _emit_drawing(timelines, output, width)


class _Ask:
    """What the flags ask for, checked: a size, costs, and perhaps a CSV. Raises :class:`PlanError`."""

    def __init__(
        self, size: str | None, microbatches: str | None, costs: str, chunks: str | None, file: Path | None
    ) -> None:
        d = _integer("--pipeline-size", size, 2, "a pipeline has 2 ranks or more")
        n = _integer("--microbatches", microbatches, 1, "an iteration has 1 microbatch or more")
        self.chunks = _integer("--chunks", chunks, 1, "a rank holds 1 chunk or more")
        self.costs = _named("--costs", lambda: Costs.parse(costs))
        self.csv = csv = None if file is None else _read(file)
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


def _svg(timelines: Sequence[Timeline], ask: _Ask) -> str:
    from megatron.schedules.report.svg import draw_svg

    costs = ask.costs
    times = ", ".join(
        f"{what} {number(time)}"
        for what, time in (("F", costs.forward), ("I", costs.input_grad), ("W", costs.weight_grad))
    )
    return draw_svg(
        timelines,
        f"{counted(ask.ranks, 'pipeline rank')}, {counted(ask.microbatches, 'microbatch')}; half a rank's layers take "
        f"{times}; a hop between ranks {number(costs.comm)}. Numbers in cells are microbatches.",
    )


def _emit_drawing(timelines: Sequence[Timeline], output: Path | None, width: str | None) -> None:
    """The text form: as wide and as colourful as the terminal is, or plain where there is none."""
    from rich.console import Console

    from megatron.schedules.report.text import draw_text

    columns = _integer("--width", width, 1, "60 columns or more read well")
    console = Console(highlight=False)
    terminal = output is None and console.is_terminal
    colour = terminal and console.color_system is not None and not console.no_color
    drawing = draw_text(timelines, columns or (console.width if terminal else _PAGE), colour)
    if not terminal:
        _emit(drawing.plain, output)
        return
    with console.capture() as captured:
        console.print(drawing, soft_wrap=True, end="")
    _emit(captured.get(), None)


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
            raise typer.Exit(128 + signal.SIGPIPE) from None
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
    command = typer.main.get_command(app)
    program = " ".join([PROGRAM, *[name for name in arguments if name in ("plan", "compare", "draw")][:1]])
    try:
        return command.main(arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except typer.Abort:
        return 128 + signal.SIGINT
    except Exception as error:
        message = str(error) if isinstance(error, PlanError) else _usage(error)
        sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
        return 2


def _usage(error: Exception) -> str:
    """What the argument parser has to say; any other error is a bug and goes on."""
    said = getattr(error, "format_message", None)
    if said is None:
        raise error
    return f"{said().rstrip('.')}; --help lists the flags"
