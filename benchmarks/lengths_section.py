"""Claims and Markdown tables about plans for microbatches of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.parts import Claim, Row, markdown_table, span, verdict

_LESS, _LESS_AT_WORST, _WITHIN, _SECONDS = 0.07, 0.12, 0.03, 1.0

_HOW = """\
8 ranks and the layers of Llama-3-8B at 131,072 tokens, by arithmetic. Lengths are drawn, not taken from a corpus:
packed documents are log-normal with a deviation of 2, single documents are even from a quarter of a context to a whole
one. The tables say how much time is saved, compared with the schedule planned for equal microbatches within the same
memory. Emulated is one drawn iteration, measured as in "Throughput", 40 ms where the cost is 1."""

_DRAWN = {"one a microbatch, a quarter of a context or more": "one document per microbatch"}


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, then the tables."""
    simulated, emulated = _apart(rows)
    text = [_HOW, "### Time saved, simulated", _simulated(simulated)]
    if emulated:
        text += ["### Time saved, emulated", _emulated(emulated)]
    return "\n\n".join(text) + "\n"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the time saved, the time to plan, and the simulator."""
    return _claims(*_apart(rows))


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    simulated, emulated = ([row for row in rows if row["what"] == what] for what in ("simulated", "emulated"))
    return simulated, emulated


def _simulated(rows: Sequence[Row]) -> str:
    """Returns a line for each distribution, from the schedule that gains least to the one that gains most."""
    table = []
    for drawn, n in dict.fromkeys((str(row["drawn"]), row["microbatches"]) for row in rows):
        these = [row for row in rows if (row["drawn"], row["microbatches"]) == (drawn, n)]
        gains = [[1 - row[f"planned_{of}"] / row[f"usual_{of}"] for row in these] for of in ("mean", "worst")]
        slowest = max(row["processor_seconds_worst"] for row in these)
        spans = [span(gain, ".1%") for gain in gains]
        table.append([_DRAWN.get(drawn, drawn), str(n), *spans, f"{slowest:.2f}"])
    return markdown_table(["", "n", "on average", "worst iteration", "planned in, s"], table).strip()


def _claims(simulated: Sequence[Row], emulated: Sequence[Row]) -> list[Claim]:
    mean = min(simulated, key=lambda row: 1 - row["planned_mean"] / row["usual_mean"])
    worst = min(simulated, key=lambda row: 1 - row["planned_worst"] / row["usual_worst"])
    slow = max(simulated, key=lambda row: row["processor_seconds_worst"])
    less, less_at_worst = (
        1 - row[f"planned_{of}"] / row[f"usual_{of}"] for row, of in ((mean, "mean"), (worst, "worst"))
    )
    sets = sum(row["sets"] for row in simulated)
    found = [
        Claim(
            f"Planning for lengths saves at least {_LESS:.0%} of the time on average",
            f"{less:.1%} in the least of {len(simulated)} rows ({_who(mean)})",
            verdict(less >= _LESS),
        ),
        Claim(
            f"It saves at least {_LESS_AT_WORST:.0%} of the worst iteration's time",
            f"{less_at_worst:.1%} in the least ({_who(worst)})",
            verdict(less_at_worst >= _LESS_AT_WORST),
        ),
        Claim(
            "It plans an iteration in under a second",
            f"{slow['processor_seconds_worst']:.2f} s of one core in the slowest of {sets} ({_who(slow)})",
            verdict(slow["processor_seconds_worst"] < _SECONDS),
        ),
    ]
    if emulated:
        far = max(emulated, key=lambda row: abs(row["error"]))
        found.append(
            Claim(
                f"Plans for lengths take the simulated time, within {_WITHIN:.0%}",
                f"{far['error']:+.1%} at worst ({_who(far)}, planned for {far['planned_for']})",
                verdict(abs(far["error"]) <= _WITHIN),
            )
        )
    return found


def _who(row: Row) -> str:
    return f"{row['schedule']}, n={row['microbatches']}, {_DRAWN.get(row['drawn'], row['drawn'])}"


def _emulated(rows: Sequence[Row]) -> str:
    """Returns a line for each schedule, a column for each distribution."""
    seconds = {(row["schedule"], row["drawn"], row["planned_for"]): row["seconds"] for row in rows}
    draws = list(dict.fromkeys(str(row["drawn"]) for row in rows))
    table = []
    for schedule in dict.fromkeys(str(row["schedule"]) for row in rows):
        ratios = [seconds[schedule, drawn, "lengths"] / seconds[schedule, drawn, "equal"] for drawn in draws]
        table.append([schedule, *(f"{1 - ratio:.1%}" for ratio in ratios)])
    return markdown_table(["", *(_DRAWN.get(drawn, drawn) for drawn in draws)], table).strip()
