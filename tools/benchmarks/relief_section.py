"""What was measured of recompute and offload in the plan, as Markdown: claims, then a table for each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.benchmarks.parts import Row, markdown_table

WITHIN, WITHIN_BYTES = 0.03, 0.01
"""Of the simulator's time, and of the planned bytes."""

_HOW = """\
As above, real processes and messages, costs F,I,W,P2P 1,1.1,0.75,0.05; a pass takes {milliseconds:.0f} ms where its
cost is 1. Forwards keep real tensors, {mebibytes:g} MiB of a microbatch on a rank, whose contents the backward looks
at. Those that go to the host are copied by the run time's own copies, at the bandwidth at which one way takes a quarter
of the computing; the run time's own R makes tensors again. Both are chosen by the plan, within 1/4 and 3/8 of 1F1B's
memory. Stock's 1F1B runs beside them in the same processes; where it recomputes, it does so in its backward, one of a
rank's {layers} layers at a time. Its selective recompute is that of a layer 4096 wide with 32 heads and sequences of
2048 tokens: of attention's core where its scores are kept, which are most of what the layer holds, and of MLP and norms
where attention is one kernel that keeps no scores. All of memory is not the same number of bytes for these two. Bytes
are those of the worst rank at its peak, counted tensor by tensor in an iteration of its own, over those of the 1F1B
that keeps all. Times are over that 1F1B's, medians of {repetitions}, in brackets the shortest and the longest."""


def section(rows: Sequence[Row]) -> str:
    """The whole section, without its heading."""
    text = ["\n".join(f"- {claim}" for claim in _claims(rows))]
    text.append(_HOW.format(**rows[0]["emulated"], repetitions=rows[0]["repetitions"]))
    for d, n in dict.fromkeys((row["pipeline_size"], row["microbatches"]) for row in rows):
        these = [row for row in rows if (row["pipeline_size"], row["microbatches"]) == (d, n)]
        text += [f"### d={d}, n={n}, {these[0]['seconds']:.2f} s an iteration of stock 1F1B", _table(these)]
    return "\n\n".join(text) + "\n"


def _claims(rows: Sequence[Row]) -> Iterator[str]:
    ours = [row for row in rows if row["engine"] == "ours"]
    worst = max(ours, key=lambda row: abs(row["error"]))
    yield _verdict(
        f"Ours measured within {WITHIN:.0%} of the simulator everywhere",
        f"{worst['error']:+.1%} at worst ({_named(worst)})",
        abs(worst["error"]) <= WITHIN,
    )
    off = {_named(row): max(map(_bytes_off, row["measured_bytes"], row["planned_bytes"]), key=abs) for row in ours}
    name = max(off, key=lambda name: abs(off[name]))
    yield _verdict(
        f"Bytes of every rank of ours within {WITHIN_BYTES:.0%} of the plan",
        f"{off[name]:+.1%} at worst ({name})",
        abs(off[name]) <= WITHIN_BYTES,
    )
    relieved = [row for row in ours if row["limit"] is not None and row["relief"] != "nothing"]
    full = {_size(row): row for row in rows if row["relief"] == "full recompute"}
    slowest = max(relieved, key=lambda row: row["seconds"] / full[_size(row)]["seconds"])
    ratio = slowest["seconds"] / full[_size(slowest)]["seconds"]
    yield _verdict(
        "Recompute or offload in the plan takes less time than stock 1F1B with full recompute",
        f"{ratio:.3f} x at worst ({_named(slowest)})",
        ratio < 1,
    )


def _bytes_off(measured: int, planned: int) -> float:
    return measured / planned - 1


def _size(row: Row) -> tuple[int, int]:
    return row["pipeline_size"], row["microbatches"]


def _named(row: Row) -> str:
    return f"{row['schedule']}, {row['relief']}, at d={row['pipeline_size']}, n={row['microbatches']}"


def _verdict(claim: str, found: str, held: bool) -> str:
    return f"{claim}: {found}, **{'held' if held else 'not held'}**"


def _table(rows: Sequence[Row]) -> str:
    heads = ["", "relief", "time over stock 1F1B", "error of the simulator", "bytes over 1F1B's", "planned"]
    heads += ["of the forward done again", "of the layers offloaded"]
    base = rows[0]
    table = []
    for row in rows:
        spread = f"({row['low'] / base['seconds']:.3f}-{row['high'] / base['seconds']:.3f})"
        shares = [f"{row[name]:.0%}" if row[name] else "" for name in ("again", "offloaded")]
        ours = row["engine"] == "ours"
        planned = f"{max(row['planned_bytes']) / max(base['planned_bytes']):.1%}" if ours else ""
        time = f"{row['time_over_stock_1f1b']:.3f} {spread}"
        cells = [time, f"{row['error']:+.1%}", f"{row['held']:.1%}", planned]
        table.append([f"{row['engine']} {row['schedule']}", row["relief"], *cells, *shares])
    return markdown_table(heads, table).strip()
