"""What was measured of the emulated iterations, as Markdown: what was claimed and whether it held, then the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tools.benchmarks.parts import Row, markdown_table

KEY = (8, 16, "1,1.1,0.75")
"""Pipeline size, microbatches and costs of the setting that single claims are about."""

WITHIN, NOISE = 0.03, 0.01
"""Of the simulator's time; what two timings of the same order may differ by."""

STOCK_1F1B = ("megatron-core", "1F1B")

EQUALS = {
    "1f1b": (STOCK_1F1B, ("torch", "1F1B")),
    "interleaved-1f1b": (("megatron-core", "interleaved"), ("torch", "Interleaved1F1B")),
    "v-zb": (("torch", "ZBV"),),
}
"""Our schedules that others have too."""

_HOW = """\
Real processes over gloo, one a rank, on the machine named above, before its other processes where the system allows
that; a pass sleeps so long that it takes its time from call to return, on average over its kind, 20 ms where its cost
is 1. Costs F,I,W are those of half a rank's layers. Ours runs its own engine and transport; megatron-core (1F1B and
interleaved) and torch.distributed.pipelining run their own functions, stages and messages, all of them in turn in the
same processes. Times are medians of the repetitions, from the moment when all ranks begin to the last one's end, and in
brackets the shortest and the longest. The simulator is given the P2P latency, one number a setting, fitted to our
schedules by least squares; it also holds what torch and Python take to post a message. Adaptive, at half of 1F1B's
memory and at all of it, is planned for a P2P latency measured beforehand, by one iteration of each of ours that has a
name."""


def section(rows: Sequence[Row]) -> str:
    """The whole section, without its heading."""
    text = ["\n".join(f"- {claim}" for claim in _claims(rows)), _HOW, _latencies(rows)]
    key = [row for row in rows if _setting(row) == KEY]
    if key:
        text += [f"### {_named(KEY)}", _in_full(key)]
    for costs in dict.fromkeys(row["costs"] for row in rows):
        these = [row for row in rows if row["costs"] == costs]
        text += [f"### Costs {costs}: speed-up over stock 1F1B", _compact(these, _speedup)]
        text += [f"### Costs {costs}: longer than simulated, with latency", _compact(these, _error)]
    return "\n\n".join(text) + "\n"


def _setting(row: Row) -> tuple[int, int, str]:
    return row["pipeline_size"], row["microbatches"], row["costs"]


def _named(setting: tuple[int, int, str]) -> str:
    d, n, costs = setting
    return f"d={d}, n={n}, costs {costs}"


def _who(row: Row) -> str:
    return f"{row['engine']} {row['schedule']}"


def _verdict(claim: str, found: str, held: bool) -> str:
    return f"{claim}: {found}, **{'held' if held else 'not held'}**"


def _claims(rows: Sequence[Row]) -> Iterator[str]:
    ours = [row for row in rows if row["engine"] == "ours"]
    if ours:
        worst = max(ours, key=lambda row: abs(row["error"]))
        yield _verdict(
            f"Ours measured within {WITHIN:.0%} of the simulator everywhere",
            f"{worst['error']:+.1%} at worst ({worst['schedule']} at {_named(_setting(worst))})",
            abs(worst["error"]) <= WITHIN,
        )
    key = {(row["engine"], row["schedule"]): row for row in rows if _setting(row) == KEY}
    for schedule, what, least, share in (
        ("v-zb", "V-ZB at least 1.30 x stock 1F1B", 1.3, 1.0),
        ("v-half", "V-Half above stock 1F1B at 5/8 of its memory", 1.0, 5 / 8),
        ("adaptive 0.5", "Adaptive at 4/8 of 1F1B's memory at or above stock 1F1B", 1.0, 4 / 8),
    ):
        if row := key.get(("ours", schedule)):
            speedup, held = row["speedup_over_stock_1f1b"], row["memory"] / key[STOCK_1F1B]["memory"]
            enough = speedup > least if schedule == "v-half" else speedup >= least
            found = f"{speedup:.3f} x at {held:.3f} of its memory"
            yield _verdict(f"{what} at {_named(KEY)}", found, enough and held <= share)
    if pairs := list(_beside_equals(rows)):
        worst_by, mine, theirs = max(pairs, key=lambda pair: pair[0])
        yield _verdict(
            f"No schedule of ours slower than its equal elsewhere, by more than {NOISE:.0%}",
            f"{worst_by:+.1%} at worst ({mine['schedule']} beside {_who(theirs)} at {_named(_setting(mine))})",
            worst_by <= NOISE,
        )


def _beside_equals(rows: Sequence[Row]) -> Iterator[tuple[float, Row, Row]]:
    """By how much longer each of ours that others have too took than each of theirs."""
    found = {(_setting(row), row["engine"], row["schedule"]): row for row in rows}
    for (setting, engine, schedule), mine in found.items():
        for whose, name in EQUALS.get(schedule, ()) if engine == "ours" else ():
            if theirs := found.get((setting, whose, name)):
                yield mine["seconds"] / theirs["seconds"] - 1, mine, theirs


def _latencies(rows: Sequence[Row]) -> str:
    latencies = {_setting(row): (row["hop_seconds_beforehand"], row["hop_seconds"]) for row in rows}
    table = [[_named(setting), *(f"{each * 1e3:.2f}" for each in both)] for setting, both in latencies.items()]
    return markdown_table(["setting", "latency beforehand, ms", "fitted latency, ms"], table).strip()


def _in_full(rows: Sequence[Row]) -> str:
    heads = ["", "seconds", "simulated", "without latency", "error", "over stock 1F1B", "memory, microbatches"]
    table = []
    for row in rows:
        seconds = f"{row['seconds']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        simulated = (f"{row[key]:.3f}" for key in ("simulated_seconds", "simulated_seconds_without_hops"))
        last = f"{row['speedup_over_stock_1f1b']:.3f}", f"{row['memory']:g}"
        table.append([_who(row), seconds, *simulated, f"{row['error']:+.1%}", *last])
    return markdown_table(heads, table).strip()


def _compact(rows: Sequence[Row], cell: Callable[[Row, Row], str]) -> str:
    """A line for each schedule, a column for each size."""
    sizes = list(dict.fromkeys((row["pipeline_size"], row["microbatches"]) for row in rows))
    found = {(row["pipeline_size"], row["microbatches"], _who(row)): row for row in rows}
    base = {size: found[(*size, " ".join(STOCK_1F1B))] for size in sizes}
    table = []
    for who in dict.fromkeys(map(_who, rows)):
        cells = [cell(found[(*size, who)], base[size]) if (*size, who) in found else "" for size in sizes]
        table.append([who, *cells])
    return markdown_table(["", *(f"d={d}, n={n}" for d, n in sizes)], table).strip()


def _speedup(row: Row, base: Row) -> str:
    least, most = base["seconds"] / row["high"], base["seconds"] / row["low"]
    return f"{row['speedup_over_stock_1f1b']:.3f} ({least:.3f}-{most:.3f})"


def _error(row: Row, base: Row) -> str:
    return f"{row['error']:+.1%}"
