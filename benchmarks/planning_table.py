"""The report of the planning benchmark: Markdown and the points of the drawing, from measured cells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.planning_cells import Cell, Result
from megatron.schedules.report.figures import number, title
from megatron.schedules.report.frontier_svg import Mark
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.utils.printable import percent

Json = Mapping[str, Any]
Find = Callable[[Cell], Result | None]
_EPSILON = 1e-9
# Where memory is what one lacks: the adaptive schedule's bubble is to be smaller by a tenth there.
LOW_MEMORY = 0.65
# Makespans at d=4, n=8 on a V placement by costs and limit, from a constraint solver; those proved optimal, and the
# best it found elsewhere.
OPTIMA = {
    "20,20,20,0": {2.0: 1180, 4.0: 1020},
    "20,22,15,1": {4.0: 987},
    "20,24,8,1": {2.0: 1226, 2.5: 1130, 3.0: 1030},
}
BEST_KNOWN = {"20,20,20,0": {2.5: 1120, 3.0: 1060}, "20,22,15,1": {2.0: 1257, 2.5: 1147, 3.0: 1065}, "20,24,8,1": {}}


def best_within(found: Result, memory: float) -> Result | None:
    """Returns the best plan of a frontier within ``memory``."""
    rungs = [rung for rung in found["rungs"] if rung["limit"] <= memory + _EPSILON]
    return rungs[-1] if rungs else None


class Peers:
    """Other projects' schedules, each compared with ours.

    Args:
        data: as read from benchmarks/peers.json.
        cells: the frontier to compare with, by (d, n, name of the costs).
        find: a cell's result; None where it was not measured.
    """

    def __init__(self, data: Json, cells: Mapping[tuple[int, int, str], Cell], find: Find) -> None:
        self.data = data
        self.pairs: list[tuple[Json, Result]] = []
        for row in data["rows"]:
            cell = cells.get((row["d"], row["n"], row["costs"]))
            found = find(cell) if cell else None
            ours = best_within(found, row["peak"]) if found else None
            if ours:
                self.pairs.append((row, ours))

    def unmet(self) -> list[tuple[Json, Result]]:
        """Returns rows with a smaller bubble than ours; theirs are rounded to four digits."""
        return [(row, ours) for row, ours in self.pairs if not _met(row, ours)]

    def section(self) -> str:
        """Returns every row against ours: counts by size, and each row that is unmet."""
        names, unmet = list(self.data["costs"]), self.unmet()
        count: dict[tuple[int, int, str], list[bool]] = defaultdict(list)
        for row, ours in self.pairs:
            count[row["d"], row["n"], row["costs"]].append(_met(row, ours))
        lines = [f"**{len(self.pairs) - len(unmet)} of {len(self.pairs)} rows met** (target: all).", ""]
        heads = [f"costs {name} ({','.join(map(number, self.data['costs'][name]))})" for name in names]
        body = []
        for d, n in dict.fromkeys((d, n) for d, n, _ in count):
            cells = [count.get((d, n, name), []) for name in names]
            body.append([f"d = {d}, n = {n}", *(f"{sum(cell)} of {len(cell)}" if cell else "" for cell in cells)])
        lines.append(_table(["size", *heads], body))
        if unmet:
            lines += ["Not met:", ""]
            heads = ["project", "schedule", "d", "n", "costs", "memory", "its bubble", "ours", "our bound"]
            lines.append(
                _table(
                    heads,
                    [
                        [
                            *(str(row[key]) for key in ("peer", "schedule", "d", "n", "costs")),
                            number(row["peak"]),
                            *map(percent, (row["bubble"], ours["bubble"], max(0.0, ours["bubble_bound"]))),
                        ]
                        for row, ours in unmet
                    ],
                    left=2,
                )
            )
        return "\n".join(lines)

    def low_memory(self) -> str:
        """Returns ours against the best of all projects within the same small memory, at measured costs."""
        best: dict[tuple[int, int, str, float], tuple[Json, Result]] = {}
        for row, ours in self.pairs:
            if row["costs"] != "A" and row["peak"] <= LOW_MEMORY * row["d"] + _EPSILON:
                rivals = [
                    other
                    for other, _ in self.pairs
                    if all(other[key] == row[key] for key in ("d", "n", "costs")) and other["peak"] <= row["peak"]
                ]
                rival = min(rivals, key=lambda other: float(other["bubble"]))
                best[row["d"], row["n"], row["costs"], row["peak"]] = rival, ours
        if not best:
            return "Nothing was measured.\n"
        gains = {key: 1 - ours["bubble"] / rival["bubble"] for key, (rival, ours) in best.items()}
        body = [
            [
                str(rival["peer"]),
                rival["schedule"],
                *map(str, key[:3]),
                number(key[3]),
                *map(percent, (rival["bubble"], ours["bubble"])),
                percent(gains[key], 1),
            ]
            for key, (rival, ours) in sorted(best.items(), key=lambda item: item[0])
        ]
        heads = ["project", "its best schedule", "d", "n", "costs", "memory", "its bubble", "ours", "smaller by"]
        mean = sum(gains.values()) / len(gains)
        return (
            f"**{percent(mean, 1)} smaller on average** over {len(gains)} memory limits (target: 10 %); "
            f"the least gain is {percent(min(gains.values()), 1)}.\n\n" + _table(heads, body, left=2)
        )

    def marks(self, d: int, n: int, costs: str) -> list[Mark]:
        """Returns the other projects' points at one size."""
        wanted = {"d": d, "n": n, "costs": costs}
        rows = [row for row in self.data["rows"] if all(row[key] == value for key, value in wanted.items())]
        return [Mark(row["schedule"], row["peer"].split("-2")[0], row["peak"], row["bubble"]) for row in rows]


def optima(cells: Mapping[str, Cell], find: Find) -> str:
    """Returns makespans against proved and best known ones of a two-chunk V placement; ours may use four chunks."""
    body, worst = [], 0.0
    for costs, cell in cells.items():
        found = find(cell)
        for limit in (2.0, 2.5, 3.0, 4.0) if found else ():
            assert found is not None
            ours = best_within(found, limit)
            assert ours is not None
            known = OPTIMA[costs].get(limit) or BEST_KNOWN[costs].get(limit)
            proved = {True: "proved", False: "best known"}[limit in OPTIMA[costs]] if known else ""
            over = ours["makespan"] / known - 1 if known else 0.0
            worst = max(worst, over)
            by_hand = number(known) if known else ""
            body.append(
                [
                    f"`{costs}`",
                    number(limit),
                    by_hand,
                    proved,
                    number(ours["makespan"]),
                    str(ours["chunks"]),
                    f"{100 * over:+.2f} %" if known else "",
                ]
            )
    heads = ["costs", "memory", "two-chunk V", "", "ours", "our chunks", "difference"]
    return f"**Longer by {percent(worst)} at most** (target: 1 %).\n\n" + _table(heads, body)


def curve(found: Mapping[float, Result], most: float) -> str:
    """Returns the frontier's table; ``found`` is by seconds of search."""
    longest = max(found)
    body = []
    for rung in found[longest]["rungs"]:
        limit = rung["limit"]
        if limit > most + _EPSILON:
            continue
        others = [best_within(found[seconds], limit) for seconds in found]
        named = [each for each in found[longest]["named"] if each["peak"] <= limit + _EPSILON]
        best = min(named, key=lambda each: float(each["bubble"]), default=None)
        body.append(
            [
                number(limit),
                percent(limit / most, 1),
                *(percent(each["bubble"]) if each else "" for each in others),
                percent(max(0.0, rung["bubble_bound"])),
                f"{percent(best['bubble'])} {title(best['name'])}" if best else "",
            ]
        )
    heads = ["memory", "of 1F1B's", *(f"{number(seconds)} s" for seconds in found), "no less than", "best by name"]
    return _table(heads, body)


def saved(cells: Mapping[str, Sequence[Cell]], curves: Mapping[float, Result], find: Find) -> str:
    """Returns the gain of recompute and offload at each memory limit; ``curves`` is without, by seconds of search."""
    body = []
    longest = curves[max(curves)] if curves else {"rungs": []}
    ranks = next(iter(cells.values()))[0].ranks
    for row in zip(*cells.values(), strict=True):
        limit = row[0].up_to * ranks
        without = best_within(longest, limit)
        found = [find(cell) for cell in row]
        body.append(
            [
                number(limit),
                percent(row[0].up_to, 1),
                percent(without["bubble"]) if without else "",
                *(_lost(each) if each else "" for each in found),
            ]
        )
    return _table(["memory", "of 1F1B's", "without", *cells], body)


def _lost(found: Result) -> str:
    parts = [f"{100 * found[name]:.0f} %" for name in ("recomputed", "offloaded") if found[name]]
    return f"{percent(1 - found['useful'])}{f' ({", ".join(parts)})' if parts else ''}"


def lots(results: Sequence[Result]) -> str:
    """Returns results of random problems: what must always hold, and what is gained."""
    if not results:
        return "Nothing was measured.\n"
    with_name = [found for found in results if found["named"] is not None]
    worse = [found for found in with_name if found["makespan"] > found["named"] * (1 + _EPSILON)]
    outside = [found for found in results if not found["within"]]
    gains = [1 - found["makespan"] / found["named"] for found in with_name]
    over = [found["makespan"] / found["bound"] - 1 for found in results]
    return (
        f"{len(results)} problems, every plan valid. Over the memory limit: **{len(outside)}**. Longer than the best "
        f"schedule by name within the same memory:\n**{len(worse)}** of the {len(with_name)} where one fits.\n\n"
        f"An iteration takes **{percent(sum(gains) / max(1, len(gains)), 1)} less time on average** than under that "
        f"schedule ({percent(max(gains, default=0.0), 1)} at most), and is\n{percent(sum(over) / len(over), 1)} longer "
        "on average than the lower bound.\n"
    )


def times(cells: Sequence[tuple[Cell, float]], find: Find) -> str:
    """Returns planning times, named schedules included; each cell comes with its target or 0."""
    body = []
    for cell, target in cells:
        found = find(cell)
        if found:
            met = f"{number(target)} s, {'met' if found['seconds'] <= target else 'missed'}" if target else ""
            size = f"d = {cell.ranks}, n = {cell.microbatches}"
            body.append([size, percent(cell.up_to, 0), f"{found['seconds']:.1f} s", met, percent(found["bubble"])])
    return _table(["size", "memory limit", "processor time", "target", "bubble"], body)


def costs_text(numbers: Sequence[float]) -> str:
    """Returns a list of costs as ``--costs`` takes it."""
    text = ",".join(map(number, numbers))
    Costs.parse(text)
    return text


def _met(row: Json, ours: Result) -> bool:
    return round(ours["bubble"], 4) <= row["bubble"] + _EPSILON and ours["peak"] <= row["peak"] + _EPSILON


def _table(heads: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table; the columns after the first ``left`` are numbers."""
    rules = ["---"] * left + ["---:"] * (len(heads) - left)
    rows = [heads, rules, *body]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
