"""Claims and a Markdown table about recompute and offload in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.parts import Claim, Row, markdown_table, verdict

WITHIN, WITHIN_BYTES, NOISE = 0.03, 0.05, 0.01
"""Allowed errors of the simulator's time and of the planned bytes; allowed difference of two timings."""

_HOW = """\
Measured as in "Throughput", costs F,I,W,P2P 1,1.1,0.75,0.05, {milliseconds:.0f} ms where the cost is 1. Forwards keep
real tensors, {mebibytes:g} MiB per microbatch and rank. Copying them one way takes a quarter of the computing. Stock
1F1B recomputes one of {layers} layers at a time. Time and the worst rank's peak memory are relative to the stock 1F1B
that keeps everything."""

_SAVING = {"nothing": "none", "R": "recompute", "O, L": "offload", "R, O, L": "both"}


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, and a table."""
    return "\n\n".join([_HOW.format(**rows[0]["emulated"]), _table(rows)]) + "\n"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the simulator, the planned bytes, and stock's own recompute."""
    return list(_claims(rows))


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    ours = [row for row in rows if row["engine"] == "ours"]
    worst = max(ours, key=lambda row: abs(row["error"]))
    yield Claim(
        f"With recompute and offload, our schedules take the simulated time, within {WITHIN:.0%}",
        f"{worst['error']:+.1%} at worst ({_named(worst)})",
        verdict(abs(worst["error"]) <= WITHIN),
    )
    off = {_named(row): max(map(_bytes_off, row["measured_bytes"], row["planned_bytes"]), key=abs) for row in ours}
    name = max(off, key=lambda name: abs(off[name]))
    yield Claim(
        f"With recompute and offload, every rank holds the planned bytes, within {WITHIN_BYTES:.0%}",
        f"{off[name]:+.1%} at worst ({name})",
        verdict(abs(off[name]) <= WITHIN_BYTES),
    )
    saved = [row for row in ours if row["limit"] is not None and row["memory_saving"] != "nothing"]
    full = {_size(row): row for row in rows if row["memory_saving"] == "full recompute"}
    slowest = max(saved, key=lambda row: row["seconds"] / full[_size(row)]["seconds"])
    ratio = slowest["seconds"] / full[_size(slowest)]["seconds"]
    yield Claim(
        "Recompute or offload in the plan takes less time than stock 1F1B with full recompute",
        f"{ratio:.3f} x at worst ({_named(slowest)})",
        verdict(ratio < 1),
    )
    times = {(_size(row), row["limit"], row["memory_saving"]): row["seconds"] for row in saved}
    both = {
        _named(row): row["seconds"] / min(times[_size(row), row["limit"], each] for each in ("R", "O, L")) - 1
        for row in saved
        if row["memory_saving"] == "R, O, L"
    }
    name = max(both, key=both.__getitem__)
    yield Claim(
        f"Recompute and offload together are not slower than the faster of the two, by more than {NOISE:.0%}",
        f"{both[name]:+.1%} at worst ({name})",
        verdict(both[name] <= NOISE),
    )


def _bytes_off(measured: int, planned: int) -> float:
    return measured / planned - 1


def _size(row: Row) -> tuple[int, int]:
    return row["pipeline_size"], row["microbatches"]


def _who(row: Row) -> tuple[str, str, str]:
    return row["engine"], row["schedule"], row["memory_saving"]


def _named(row: Row) -> str:
    return f"{row['schedule']}, {_SAVING.get(row['memory_saving'], row['memory_saving'])}, d={row['pipeline_size']}"


def _table(rows: Sequence[Row]) -> str:
    """Returns a line for each schedule and way to save memory, with time and memory for each size."""
    sizes = list(dict.fromkeys(map(_size, rows)))
    base = {size: next(row for row in rows if _size(row) == size)["seconds"] for size in sizes}
    found = {(_size(row), *_who(row)): row for row in rows}
    named = [f"d={d}" for d, _ in sizes]
    heads = ["", "memory saving", *(f"time, {each}" for each in named), *(f"memory, {each}" for each in named)]
    table = []
    for engine, schedule, memory_saving in dict.fromkeys(_who(row) for row in rows):
        at = [found.get((size, engine, schedule, memory_saving)) for size in sizes]
        times = ["" if row is None else f"{row['seconds'] / base[_size(row)]:.3f}" for row in at]
        memory = ["" if row is None else f"{row['held']:.1%}" for row in at]
        table.append([f"{engine} {schedule}", _SAVING.get(memory_saving, memory_saving), *times, *memory])
    return markdown_table(heads, table).strip()
