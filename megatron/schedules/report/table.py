"""Comparison of schedules: one line each, as text, Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill

from megatron.schedules.report.figures import Figures, above_itself, number
from megatron.schedules.utils.errors import one_line
from megatron.schedules.utils.printable import percent, printable_name


@dataclass(frozen=True)
class Row:
    """One schedule in a comparison: its figures, or the reason for their absence.

    Args:
        name: name of the schedule.
        result: its figures, or one line that says why it cannot be planned.
        throughput: microbatches per second over those of 1F1B; None without figures.
        memory: bytes of each sort on the rank with the most memory, and their sum; empty unless compared with a device.
        fits: true if they fit the device; None unless compared with one.
        layers: number of layers of a stage, or the fewest and the most; empty if the model is unknown.
    """

    name: str
    result: Figures | str
    throughput: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    fits: bool | None = None
    layers: str = ""


_Column = tuple[tuple[str, str], Callable[[Row, Figures], str]]
"""Heading of two lines, and the cell of a row with figures."""
_PAGE = 78  # width of text below a table, columns


def gib(size: float) -> str:
    """Formats bytes in GiB, without the unit."""
    return f"{size / 2**30:.2f}"


def as_text(rows: Sequence[Row]) -> str:
    """Returns an aligned table, with a reason instead of missing figures, and a note below."""
    note = _note(rows)
    return aligned(*_table(rows)) + (f"\n{fill(note, _PAGE)}\n" if note else "")


def aligned(headings: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]) -> str:
    """Aligns columns under headings of two lines each. A row of two cells has a reason instead of numbers."""
    widths = [
        max(len(heading[0]), len(heading[1]), *(len(row[column]) for row in cells if len(row) > 2 or column == 0))
        for column, heading in enumerate(headings)
    ]
    heads = [_aligned([heading[line] for heading in headings], widths) for line in (0, 1)]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    body = [_aligned(row, widths) if len(row) > 2 else f"{row[0].ljust(widths[0])}  {row[1]}" for row in cells]
    return "\n".join([*heads, rule, *body]) + "\n"


def as_markdown(rows: Sequence[Row]) -> str:
    """Returns a table for a README or an issue."""
    note = _note(rows)
    return markdown(*_table(rows)) + (f"\n{note}\n" if note else "")


def markdown(headings: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. Short rows are filled with empty cells."""
    heads = [" ".join(heading).strip() for heading in headings]
    rows = [[cell.replace("|", "\\|") for cell in row] + [""] * (len(heads) - len(row)) for row in cells]
    lines = ["| --- |" + " ---: |" * (len(heads) - 1), *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(["| " + " | ".join(heads) + " |", *lines]) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """Returns every figure unrounded, with a header; shares, not percentages."""
    text = io.StringIO()
    records = as_records(rows)
    names = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_json(rows: Sequence[Row]) -> str:
    """Returns a list of objects, every figure unrounded."""
    return json.dumps(as_records(rows), indent=2) + "\n"


def as_records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Returns one mapping per row; one without figures has only ``schedule`` and ``reason``."""
    records: list[dict[str, object]] = []
    for row in rows:
        result = row.result
        if isinstance(result, str):
            records.append({"schedule": row.name, "reason": one_line(result)})
        else:
            records.append(
                {
                    "schedule": row.name,
                    "bubble": result.bubble,
                    "span_bubble": result.span_bubble,
                    "peak_memory": result.peak,
                    "memory_of_1f1b": result.share,
                    "chunks": result.chunks,
                    **({"layers": row.layers} if row.layers else {}),
                    "throughput_of_1f1b": row.throughput,
                    "makespan": result.makespan,
                    "recomputed": result.recomputed,
                    "useful": result.useful,
                    "copying": result.copying,
                    **({"hidden": result.hidden, "exposed": result.exposed} if result.has_messages else {}),
                    **{f"{part}_bytes": held for part, held in row.memory.items()},
                    **({} if row.fits is None else {"fits": row.fits}),
                    **({"peak_memory_bytes": result.peak_bytes} if result.peak_bytes else {}),
                }
            )
    return records


def _note(rows: Sequence[Row]) -> str:
    return above_itself(row.result for row in rows if not isinstance(row.result, str))


def _table(rows: Sequence[Row]) -> tuple[Sequence[tuple[str, str]], list[list[str]]]:
    """Returns headings of two lines, and the cells below them; a row without figures has only its reason."""
    columns, cells = list(_columns(rows)), []
    for row in rows:
        result = row.result
        own = [one_line(result)] if isinstance(result, str) else [cell(row, result) for _, cell in columns]
        cells.append([printable_name(row.name), *own])
    return [("schedule", ""), *(heading for heading, _ in columns)], cells


def _columns(rows: Sequence[Row]) -> Iterator[_Column]:
    """Yields the columns after the schedule's name; most of the later ones only if any row has them."""
    plans = [row.result for row in rows if not isinstance(row.result, str)]
    parts = dict.fromkeys(part for row in rows for part in row.memory)
    yield ("bubble", ""), lambda row, plan: percent(plan.bubble)
    yield ("span bubble", ""), lambda row, plan: percent(plan.span_bubble)
    yield ("peak memory", "microbatches"), lambda row, plan: number(plan.peak)
    if not parts and any(plan.peak_bytes for plan in plans):
        yield ("peak memory", "GiB"), lambda row, plan: gib(plan.peak_bytes)
    if all(plan.is_plain for plan in plans):
        yield ("of 1F1B's", "memory"), lambda row, plan: percent(plan.share, 1)
    yield ("chunks", "a rank"), lambda row, plan: str(plan.chunks)
    if any(row.layers for row in rows):
        yield ("layers", "a stage"), lambda row, plan: row.layers
    yield ("throughput", "to 1F1B's"), lambda row, plan: "" if row.throughput is None else f"{row.throughput:.3f}"
    if any(plan.recomputed or plan.copying for plan in plans):
        yield ("recomputed", "of computing"), lambda row, plan: percent(plan.recomputed, 1)
        yield ("copying", "of the time"), lambda row, plan: percent(plan.copying, 1)
    if any(plan.has_messages for plan in plans):
        yield ("messages", "hidden"), lambda row, plan: percent(plan.hidden, 1)
        yield ("messages", "exposed"), lambda row, plan: percent(plan.exposed, 1)
    for part in parts:
        yield (part, "GiB"), lambda row, plan, part=part: gib(row.memory[part])  # type: ignore[misc]
    if any(row.fits is not None for row in rows):
        yield ("fits", ""), lambda row, plan: "yes" if row.fits else "no"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    columns = zip(cells, widths, strict=True)
    return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(columns)).rstrip()
