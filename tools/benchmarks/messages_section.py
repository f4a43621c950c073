"""Claims and Markdown tables about messages of experts behind weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

from tools.benchmarks.parts import Claim, Row, markdown_table, verdict

STOCK = "interleaved"
EXPOSED, HIDDEN, ALL_HIDDEN = "exposed", "hidden", "left out"
"""What becomes of messages: waited for, behind weight gradients as far as these go, or not there at all."""

_WITHIN = 0.03

_HOW = """\
{d} ranks, {n} microbatches, costs {costs} in units of 20 ms. In the middle of each F and I a message of the experts
travels for {message:g} units more, on a thread of its own. `exposed`: the pass waits for it. `hidden`: pieces of
weight gradients that are due, 16 for each W, run until it arrives, in the order of training; W does the rest. `left
out`: stock's interleaved 1F1B without messages, the bound for stock's own overlap, which runs one microbatch's F with
another's B. Ranks, engines, medians and the fitted P2P latency are as in "Throughput". From I to W a microbatch keeps
0.6 of its memory."""


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, then the table."""
    first = rows[0]
    d, n = first["pipeline_size"], first["microbatches"]
    how = _HOW.format(d=d, n=n, costs=first["costs"], message=first["message"])
    heads = ["", "messages", "hidden", "seconds", "simulator's error", "over stock, exposed", "memory, microbatches"]
    table = []
    for row in rows:
        seconds = f"{row['seconds']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        hidden = f"{row['hidden']:.0%}" if row["messages"] == HIDDEN else ""
        speed = f"{row['speedup_over_stock_exposed']:.3f}"
        table.append(
            [_who(row), row["messages"], hidden, seconds, f"{row['error']:+.1%}", speed, f"{row['memory']:.3g}"]
        )
    return f"{how}\n\n{markdown_table(heads, table).strip()}\n"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the simulator, and about the time saved."""
    ours = [row for row in rows if row["engine"] == "ours" and row["messages"] == HIDDEN]
    worst = max(ours, key=lambda row: abs(row["error"]))
    slowest = min(ours, key=lambda row: row["speedup_over_stock_exposed"])
    exposed, left_out = rows[0], next(row for row in rows if row["messages"] == ALL_HIDDEN)
    fastest = min(ours, key=lambda row: row["seconds"])
    slower = fastest["seconds"] / left_out["seconds"] - 1
    return [
        Claim(
            f"Schedules that hide messages take the simulated time, within {_WITHIN:.0%}",
            f"{worst['error']:+.1%} at worst ({worst['schedule']})",
            verdict(abs(worst["error"]) <= _WITHIN),
        ),
        Claim(
            "Every split schedule that hides messages is faster than stock's interleaved 1F1B with messages exposed",
            f"{slowest['speedup_over_stock_exposed']:.3f} x in the least ({slowest['schedule']}), at "
            f"{slowest['memory'] / exposed['memory']:.2f} of its memory",
            verdict(slowest["speedup_over_stock_exposed"] > 1),
        ),
        Claim(
            "The fastest is no slower than stock's interleaved 1F1B without any messages",
            f"{slower:+.1%} ({fastest['schedule']}), at {fastest['memory'] / left_out['memory']:.2f} of its memory",
            verdict(slower <= 0),
        ),
    ]


def _who(row: Row) -> str:
    return f"{row['engine']} {row['schedule']}"
