"""The throughput of emulated iterations as claims and Markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from benchmarks.parts import Claim, Row, markdown_table, span, verdict

KEY = (8, 16, "1,1.1,0.75")
"""Pipeline size, microbatches and costs of the setting that single claims are about."""

WITHIN, NOISE = 0.03, 0.01
"""Allowed error of the simulator's time; allowed difference of two timings of the same order."""

STOCK_1F1B = ("megatron-core", "1F1B")

EQUALS = {
    "1f1b": (STOCK_1F1B, ("torch", "1F1B")),
    "interleaved-1f1b": (("megatron-core", "interleaved"), ("torch", "Interleaved1F1B")),
    "v-zb": (("torch", "ZBV"),),
}
"""Our schedules that others have too."""

_HOW = """\
Every rank is a process and sends real messages over gloo. A pass sleeps, 20 ms where its cost is 1. megatron-core,
torch.distributed.pipelining and our engine run in turn in the same processes, each with its own code. Costs F,I,W are
those of half a rank's layers. Times are medians, with the shortest and the longest in brackets. The simulator gets one
P2P latency per setting, fitted to our schedules. `adaptive X` plans within X of 1F1B's memory."""


def section(rows: Sequence[Row]) -> str:
    """Returns the section: the setting of single claims, then all settings in short."""
    text = [_HOW]
    if key := [row for row in rows if _setting(row) == KEY]:
        text += [f"### {_named(KEY)}", _in_full(key)]
    sizes = sorted({_setting(row)[:2] for row in rows})
    named = ", ".join(f"d={d} n={n}" for d, n in sizes)
    text += ["### Speed-up over stock 1F1B, all settings", f"From the least to the most of {named}. {_fastest(rows)}"]
    return "\n\n".join([*text, _in_short(rows)]) + "\n"


def _setting(row: Row) -> tuple[int, int, str]:
    return row["pipeline_size"], row["microbatches"], row["costs"]


def _named(setting: tuple[int, int, str]) -> str:
    d, n, costs = setting
    return f"d={d}, n={n}, costs {costs}"


def _who(row: Row) -> str:
    return f"{row['engine']} {row['schedule']}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the simulator, the setting ``KEY``, and the schedules that others have too."""
    return list(_claims(rows))


def _claims(rows: Sequence[Row]) -> Iterator[Claim]:
    ours = [row for row in rows if row["engine"] == "ours"]
    if ours:
        worst = max(ours, key=lambda row: abs(row["error"]))
        yield Claim(
            f"Our schedules take the simulated time, within {WITHIN:.0%}",
            f"{worst['error']:+.1%} at worst ({worst['schedule']}, {_named(_setting(worst))})",
            verdict(abs(worst["error"]) <= WITHIN),
        )
    key = {(row["engine"], row["schedule"]): row for row in rows if _setting(row) == KEY}
    for schedule, what, least, share in (
        ("v-zb", "`v-zb` is at least 1.30 x as fast as stock 1F1B at its memory", 1.3, 1.0),
        ("v-half", "`v-half` is faster than stock 1F1B at 5/8 of its memory", 1.0, 5 / 8),
        ("adaptive 0.5", "`adaptive` at half of 1F1B's memory is at least as fast as stock 1F1B", 1.0, 4 / 8),
    ):
        if row := key.get(("ours", schedule)):
            speedup, held = row["speedup_over_stock_1f1b"], row["memory"] / key[STOCK_1F1B]["memory"]
            enough = speedup > least if schedule == "v-half" else speedup >= least
            found = f"{speedup:.3f} x at {held:.3f} of its memory"
            yield Claim(f"{what} (d={KEY[0]}, n={KEY[1]})", found, verdict(enough and held <= share))
    if pairs := list(_against_equals(rows)):
        worst_by, mine, theirs = max(pairs, key=lambda pair: pair[0])
        yield Claim(
            f"No schedule of ours is slower than the same one elsewhere, by more than {NOISE:.0%}",
            f"{worst_by:+.1%} at worst ({mine['schedule']} and {_who(theirs)}, {_named(_setting(mine))})",
            verdict(worst_by <= NOISE),
        )


def _against_equals(rows: Sequence[Row]) -> Iterator[tuple[float, Row, Row]]:
    """Yields how much longer each of our schedules took than the same one of others."""
    found = {(_setting(row), row["engine"], row["schedule"]): row for row in rows}
    for (setting, engine, schedule), mine in found.items():
        for whose, name in EQUALS.get(schedule, ()) if engine == "ours" else ():
            if theirs := found.get((setting, whose, name)):
                yield mine["seconds"] / theirs["seconds"] - 1, mine, theirs


def _in_full(rows: Sequence[Row]) -> str:
    heads = ["", "seconds", "simulator's error", "over stock 1F1B", "memory, microbatches"]
    table = []
    for row in rows:
        seconds = f"{row['seconds']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        last = f"{row['speedup_over_stock_1f1b']:.3f}", f"{row['memory']:g}"
        table.append([_who(row), seconds, f"{row['error']:+.1%}", *last])
    return markdown_table(heads, table).strip()


def _in_short(rows: Sequence[Row]) -> str:
    """Returns a line for each schedule, a column for each set of costs."""
    costs = list(dict.fromkeys(row["costs"] for row in rows))
    table = []
    for who in dict.fromkeys(map(_who, rows)):
        of_who = [row for row in rows if _who(row) == who]
        worst = max((row["error"] for row in of_who), key=abs)
        table.append([who, *(_least_and_most(of_who, each) for each in costs), f"{worst:+.1%}"])
    return markdown_table(["", *(f"costs {each}" for each in costs), "simulator's worst error"], table).strip()


def _fastest(rows: Sequence[Row]) -> str:
    """Counts how often each schedule is the fastest of its setting."""
    settings = dict.fromkeys(map(_setting, rows))
    best = (min((row for row in rows if _setting(row) == each), key=lambda row: row["seconds"]) for each in settings)
    return f"Fastest: {', '.join(f'{who} in {times}' for who, times in Counter(map(_who, best)).most_common())}."


def _least_and_most(rows: Sequence[Row], costs: str) -> str:
    return span([row["speedup_over_stock_1f1b"] for row in rows if row["costs"] == costs], ".3f")
