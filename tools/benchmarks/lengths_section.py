"""What was measured of plans for lengths, as Markdown: what was claimed and whether it held, then the tables."""

from __future__ import annotations

from collections.abc import Sequence

from tools.benchmarks.parts import Row, markdown_table

_LESS, _LESS_AT_WORST, _WITHIN, _SECONDS = 0.07, 0.12, 0.03, 1.0

_HOW = """\
8 ranks; Llama-3-8B's layers at 131,072 tokens, by arithmetic: attention is 70 % of a whole context's forward and 85 %
of its input gradient. Lengths are drawn, not taken from a corpus: packed documents are log-normal, with the median
named and a deviation of the logarithm of 2, 64 tokens at least and a context at most, and fill microbatches of one
context each, the last one cut at its end; attention sees only its own document. One a microbatch, they are evenly
distributed from a quarter of a context to all of it. "For equal ones" is the schedule planned for equal microbatches
that take as long as those drawn do on average, run on them as they come; "for the lengths" is the same placement
within the same memory. Times are over the work of an average rank, so 1 is no bubble. Planning takes one core, with
machine code that is kept: its own seconds, and in brackets the longest by the clock, beside whatever else the machine
did. Emulated: as above, 40 ms where the cost is 1, one drawn iteration, both plans in turn in the same processes; the
simulator is given one P2P latency, fitted to all rows of a table."""


def section(rows: Sequence[Row]) -> str:
    """The whole section, without its heading."""
    simulated = [row for row in rows if row["what"] == "simulated"]
    emulated = [row for row in rows if row["what"] == "emulated"]
    text = ["\n".join(f"- {claim}" for claim in _claims(simulated, emulated)), _HOW]
    heads = [
        "",
        "drawn",
        "microbatches",
        "for equal ones: mean",
        "worst",
        "for the lengths: mean",
        "worst",
        "planned in",
    ]
    table = [
        [
            row["schedule"],
            row["drawn"],
            str(row["microbatches"]),
            *(f"{row[each]:.3f}" for each in ("usual_mean", "usual_worst", "planned_mean", "planned_worst")),
            f"{row['processor_seconds_worst']:.2f} s ({row['seconds_worst']:.2f})",
        ]
        for row in simulated
    ]
    text += ["### Simulated, time over work", markdown_table(heads, table).strip()]
    for drawn in dict.fromkeys(row["drawn"] for row in emulated):
        text += [f"### Emulated, {drawn}", _emulated([row for row in emulated if row["drawn"] == drawn])]
    return "\n\n".join(text) + "\n"


def _claims(simulated: Sequence[Row], emulated: Sequence[Row]) -> list[str]:
    mean = min(simulated, key=lambda row: 1 - row["planned_mean"] / row["usual_mean"])
    worst = min(simulated, key=lambda row: 1 - row["planned_worst"] / row["usual_worst"])
    slow = max(simulated, key=lambda row: row["processor_seconds_worst"])
    less, less_at_worst = (
        1 - row[f"planned_{of}"] / row[f"usual_{of}"] for row, of in ((mean, "mean"), (worst, "worst"))
    )
    sets = sum(row["sets"] for row in simulated)
    found = [
        f"At least {_LESS:.0%} less on average: {less:.1%} in the least of {len(simulated)} rows ({_who(mean)}), "
        f"**{_held(less >= _LESS)}**",
        f"At least {_LESS_AT_WORST:.0%} less at the worst: {less_at_worst:.1%} in the least ({_who(worst)}), "
        f"**{_held(less_at_worst >= _LESS_AT_WORST)}**",
        f"Planned in under a second: {slow['processor_seconds_worst']:.2f} s of one core in the slowest of {sets} "
        f"({_who(slow)}), "
        f"**{_held(slow['processor_seconds_worst'] < _SECONDS)}**",
    ]
    if emulated:
        far = max(emulated, key=lambda row: abs(row["error"]))
        found.append(
            f"Emulated within {_WITHIN:.0%} of the simulator: {far['error']:+.1%} at worst ({_who(far)}, planned for "
            f"{far['planned_for']}), **{_held(abs(far['error']) <= _WITHIN)}**"
        )
    return found


def _who(row: Row) -> str:
    return f"{row['schedule']}, n={row['microbatches']}, {row['drawn']}"


def _held(held: bool) -> str:
    return "held" if held else "not held"


def _emulated(rows: Sequence[Row]) -> str:
    heads = ["", "planned for", "seconds", "simulated", "error", "less than for equal ones"]
    table = []
    for row in rows:
        equal = next(each for each in rows if each["schedule"] == row["schedule"] and each["planned_for"] == "equal")
        less = "" if row is equal else f"{1 - row['seconds'] / equal['seconds']:.1%}"
        seconds = f"{row['seconds']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        cells = [
            row["schedule"],
            row["planned_for"],
            seconds,
            f"{row['simulated_seconds']:.3f}",
            f"{row['error']:+.1%}",
        ]
        table.append([*cells, less])
    return markdown_table(heads, table).strip()
