"""Claims and Markdown tables about messages of experts behind weight gradients."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.parts import Claim, Row, markdown_table, verdict

STOCK = "interleaved"
EXPOSED, HIDDEN, ALL_HIDDEN = "exposed", "hidden", "none"
"""What becomes of messages: waited for, behind weight gradients as far as these go, or not there at all."""

_WITHIN = 0.03

_HOW = """\
As "Throughput", with {d} ranks, {n} microbatches and costs {costs}. In the middle of each F and I a message travels
for {message:g} more, on its own thread. The pass waits for it, or pieces of weight gradients that are due run
meanwhile, in the order of training. Stock's own overlap is at best as fast as without messages."""


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, then the table, without our schedules with exposed messages."""
    first = rows[0]
    how = _HOW.format(d=first["pipeline_size"], n=first["microbatches"], costs=first["costs"], message=first["message"])
    heads = ["", "messages", "seconds", "simulator's error", "over stock", "memory, microbatches"]
    table = []
    for row in rows:
        if row["engine"] == "ours" and row["messages"] == EXPOSED:
            continue
        messages = f"{row['hidden']:.0%} {HIDDEN}" if row["messages"] == HIDDEN else row["messages"]
        figures = f"{row['seconds']:.3f}", f"{row['error']:+.1%}", f"{row['speedup_over_stock_exposed']:.3f}"
        table.append([f"{row['engine']} {row['schedule']}", messages, *figures, f"{row['memory']:.3g}"])
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
            f"Hiding messages takes the simulated time, within {_WITHIN:.0%}",
            f"{worst['error']:+.1%} at worst ({worst['schedule']})",
            verdict(abs(worst["error"]) <= _WITHIN),
        ),
        Claim(
            "Schedules that hide messages are faster than stock's interleaved 1F1B, which waits for them",
            f"{slowest['speedup_over_stock_exposed']:.3f} x at worst ({slowest['schedule']}), at "
            f"{slowest['memory'] / exposed['memory']:.2f} of its memory",
            verdict(slowest["speedup_over_stock_exposed"] > 1),
        ),
        Claim(
            "The fastest is as fast as stock's interleaved 1F1B without messages",
            f"{slower:+.1%} ({fastest['schedule']}), at {fastest['memory'] / left_out['memory']:.2f} of its memory",
            verdict(slower <= 0),
        ),
    ]
