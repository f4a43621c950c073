"""The benchmark's command line: all parts, or one of them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks import emulated, host, lengths, memory, messages, recording, saving, split, tables, vocabulary
from benchmarks.accuracy.page import as_page
from benchmarks.accuracy.report import measured, report
from benchmarks.parts import Kept, Part, Row, Say, claims_table
from megatron.schedules.cli.ending import run
from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.output_files import write_text

PARTS = (
    emulated.PART,
    saving.PART,
    messages.PART,
    vocabulary.PART,
    lengths.PART,
    split.PART,
    host.PART,
    memory.PART,
    recording.PART,
    tables.PART,
)
_PAGE, _SAMPLE = Path("docs"), Path(".benchmark/quick")


def _say(text: str) -> None:
    click.echo(text, err=True)


_quick = click.option("--quick", is_flag=True, help="A sample, in minutes; its page goes to .benchmark/quick.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row, and write no page.")


def _run(part: Part, rows: Callable[[Say], Iterable[Row]], quick: bool, as_json: bool, *, whole: bool) -> None:
    """Measures parts; writes the page if these are whole parts, else prints the rows."""
    found: list[Row] = []
    for row in rows(_say):
        found.append(row)
        if as_json:
            click.echo(json.dumps(row))
    if as_json:
        return
    if not whole:
        click.echo(claims_table([(part, found)]))
        click.echo(part.section(found))
        return
    kept = Kept(_SAMPLE if quick else _PAGE)
    with _whole_files():
        kept.keep(part, found, shlex.join(["bash", "scripts/benchmark.sh", *sys.argv[1:]]))
        _write(kept)
    _say(f"it has a new section: {part.title}")


def _write(kept: Kept) -> None:
    page = kept.folder / "benchmarks.md"
    write_text(page, kept.page(PARTS))
    _say(f"wrote {page}")


@contextmanager
def _whole_files() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlanError(f"cannot write {error.filename}: {error.strerror}") from None


@click.group(invoke_without_command=True)
@_quick
@click.pass_context
def main(context: click.Context, quick: bool) -> None:
    """Measure everything (under two hours on 2 cores), or one part, and write docs/benchmarks.md."""
    if context.invoked_subcommand is None:
        for part in PARTS:
            _say(f"== {part.name}")
            _run(part, lambda say, part=part: part.measure(quick, say), quick, False, whole=True)  # type: ignore[misc]
    elif quick:
        raise click.UsageError(f"--quick goes after {context.invoked_subcommand}")


@main.command("emulated", help=emulated.__doc__)
@_quick
@_json
@click.option("--pipeline-size", type=click.IntRange(2), help="Ranks; with --microbatches, this size only.")
@click.option("--microbatches", type=click.IntRange(1), help="Microbatches of an iteration.")
@click.option("--costs", metavar="F,I,W", help="Times of the passes, in units: only these.")
def _emulated(quick: bool, as_json: bool, **only: Any) -> None:
    whole = not any(only.values())
    _run(emulated.PART, lambda say: emulated.measure(quick, say, **only), quick, as_json, whole=whole)


def _plain(part: Part, text: str | None) -> None:
    @main.command(part.name, help=text)
    @_quick
    @_json
    def command(quick: bool, as_json: bool) -> None:
        _run(part, lambda say: part.measure(quick, say), quick, as_json, whole=True)


for _module in (saving, messages, vocabulary, lengths, split, host, memory, recording):
    _plain(_module.PART, _module.__doc__)


@main.command("page")
def _page() -> None:
    """Write docs/benchmarks.md from the recorded data, without measuring anything."""
    with _whole_files():
        _write(Kept(_PAGE))


@main.command("accuracy")
@click.option("--rows", type=click.Path(path_type=Path, exists=True), help="Other measurements, in the same form.")
@click.option("--page", type=click.Path(path_type=Path), default=_PAGE / "accuracy.md", show_default=True)
def _accuracy(rows: Path | None, page: Path) -> None:
    """Hold estimates against published measurements, and write docs/accuracy.md."""
    with _whole_files():
        write_text(page, as_page(report(measured(rows), _say)))
    _say(f"wrote {page}")


@main.command("tables", help=tables.__doc__)
@_quick
@_json
@click.option(
    "--costs-file", type=Path, help="A cost profile from tools/profile_passes.py: the roofline is corrected by it."
)
def _tables(quick: bool, as_json: bool, costs_file: Path | None) -> None:
    _run(tables.PART, lambda say: tables.measure(quick, say, costs_file), quick, as_json, whole=True)


if __name__ == "__main__":
    sys.exit(run(main, "benchmark.sh", flags={"costs_file": "--costs-file"}))
