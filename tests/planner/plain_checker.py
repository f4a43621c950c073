"""Times and memory of a plan, found from its JSON alone: plain Python that knows nothing of this package."""

import re
from typing import Any


def check(plan: dict[str, Any]) -> dict[str, Any]:
    """The figures of ``plan``, and when each pass starts and ends, by rank."""
    return _Checker(plan).figures()


class _Checker:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.costs = plan["stage_costs"]
        self.rank_of = plan["placement"]["rank_of"]
        self.rows = [[_read(cell) for cell in row] for row in plan["order"]]
        self.ranks, self.last = len(self.rows), len(self.rank_of) - 1
        self.there = {work for row in self.rows for work in row}
        self.kinds = {kind for _, kind, _ in self.there}
        self.last_of = [max(s for s, on in enumerate(self.rank_of) if on == rank) for rank in range(self.ranks)]
        # When each pass ended for those that wait for it; a copy's own end is in `copied`.
        self.ended: dict[tuple[int, str, int], float] = {}
        self.copied: dict[tuple[int, str, int], float] = {}
        self.start: list[list[float]] = [[] for _ in self.rows]
        self.end: list[list[float]] = [[] for _ in self.rows]
        self.free: dict[tuple[int, str], float] = {}
        self.copying: dict[tuple[int, str], float] = {}
        # What is left of each W, and the time of messages on each rank that is hidden and exposed.
        self.left: dict[tuple[int, str, int], float] = {}
        self.messages = [self.hide(row) for row in self.rows]

    def figures(self) -> dict[str, Any]:
        while any(self.step(rank) for rank in range(self.ranks)):
            pass
        assert all(len(end) == len(row) for end, row in zip(self.end, self.rows, strict=True)), "the order cannot end"
        makespan = max(end[-1] for end in self.end)
        busy = [sum(self.length(work) for work in row if work[1] not in "OL") for row in self.rows]
        again = sum(self.length(work) for work in self.there if work[1] == "R")
        bubble = 1 - sum(busy) / self.ranks / makespan
        spans = zip(busy, self.start, self.end, strict=True)
        peaks = [self.peak(row) for row in self.rows]
        return {
            "start": self.start,
            "end": self.end,
            "makespan": makespan,
            "bubble": bubble,
            "span_bubble": max(1 - work / (end[-1] - start[0]) for work, start, end in spans),
            "peak_memory": max(peaks),
            "peak_memory_by_rank": peaks,
            "memory_of_1f1b": max(peaks) / self.ranks,
            "recomputed": again / sum(busy),
            "useful": (1 - bubble) * (1 - again / sum(busy)),
            "copying": max(self.copying.values(), default=0.0) / makespan,
            "hidden_messages": sum(hidden for hidden, _ in self.messages) / self.ranks,
            "exposed_messages": sum(exposed for _, exposed in self.messages) / self.ranks,
            "hidden_messages_by_rank": [hidden for hidden, _ in self.messages],
            "exposed_messages_by_rank": [exposed for _, exposed in self.messages],
        }

    def step(self, rank: int) -> bool:
        """Do the next pass of ``rank``, where all that it needs has ended."""
        done = len(self.end[rank])
        if done == len(self.rows[rank]):
            return False
        work = stage, kind, m = self.rows[rank][done]
        begin = self.end[rank][-1] if done else 0.0
        for need in self.needs(work):
            if need not in self.ended:
                return False
            begin = max(begin, self.ended[need] + self.latency(self.rank_of[need[0]], rank))
        if kind == "O":  # the copy began after F; here computing waits for its end
            begin = end = max(begin, self.copied[work])
        elif kind == "L":  # the copy begins here, and computing goes on
            end = begin
            self.copy(rank, work, begin)
        else:
            if kind in "IB":
                begin = max(begin, self.copied.get((stage, "L", m), 0.0))
            end = begin + self.length(work)
        if kind == "F" and (stage, "O", m) in self.there:
            self.copy(rank, (stage, "O", m), end)
        self.start[rank].append(begin)
        self.end[rank].append(end)
        self.ended[work] = end
        return True

    def needs(self, work: tuple[int, str, int]) -> list[tuple[int, str, int]]:
        """What must have ended on other stages; what it needs on its own stands before it in the row."""
        stage, kind, m = work
        gradient = [(stage + 1, each, m) for each in "IB" if (stage + 1, each, m) in self.there]
        of_the_last = [(self.last, each, m) for each in "IB" if (self.last, each, m) in self.there]
        if kind == "F":
            return [(stage - 1, "F", m)] if stage else []
        if kind in "IB" and stage < self.last:
            return gradient
        if kind in "IB" and "S" in self.kinds:
            return [(each, "S", m) for each in self.last_of]
        return [(self.last, "F", m)] if kind == "S" else of_the_last if kind == "T" else []

    def hide(self, row: list[tuple[int, str, int]]) -> tuple[float, float]:
        """Compute weight gradients behind the messages of a rank; the time of these that is hidden and exposed."""
        hidden = exposed = 0.0
        last = {stage: (stage, kind, m) for stage, kind, m in row if kind in "WB"}
        for at, (stage, kind, _) in enumerate(row):
            message = self.costs.get("messages", {}).get("I" if kind == "B" else kind, [0.0] * (stage + 1))[stage]
            for work in [work for work in row[at:] if work[1] in "WB"]:
                if work[1] == "B" or work == last[work[0]] or (work[0], "I", work[2]) not in row[:at]:
                    break
                taken = min(message, self.length(work))
                self.left[work] = self.length(work) - taken
                hidden, message = hidden + taken, message - taken
            exposed += message
        return hidden, exposed

    def length(self, work: tuple[int, str, int]) -> float:
        stage, kind, _ = work
        if work in self.left:
            return self.left[work]
        price = self.costs["splitting"][stage] if kind == "B" and "splitting" in self.costs else 0.0
        return sum(self.costs["times"][part][stage] for part in ("IW" if kind == "B" else kind)) - price

    def latency(self, source: int, to: int) -> float:
        pairs = {(a, b): time for a, b, time in self.costs["latencies"]}
        return 0.0 if source == to else pairs.get((source, to), self.costs["comm"])

    def copy(self, rank: int, work: tuple[int, str, int], earliest: float) -> None:
        channel = rank, "both" if self.costs["one_way"] else work[1]
        time = self.length(work)
        self.copied[work] = self.free[channel] = max(earliest, self.free.get(channel, 0.0)) + time
        self.copying[channel] = self.copying.get(channel, 0.0) + time

    def peak(self, row: list[tuple[int, str, int]]) -> float:
        held = most = 0.0
        for stage, kind, m in row:
            size = {share: sizes[stage] for share, sizes in self.costs["held"].items()}
            kept = size["FORWARD"] + size["RECOMPUTED"] + size["OFFLOADED"]
            held += {
                "F": kept - size["RECOMPUTED"] * ((stage, "R", m) in self.there),
                "I": size["WEIGHTS"] - kept,
                "W": -size["WEIGHTS"],
                "B": -kept,
                "S": size["VOCABULARY"],
                "T": -size["VOCABULARY"],
                "R": size["RECOMPUTED"],
                "O": -size["OFFLOADED"],
                "L": size["OFFLOADED"],
            }[kind]
            most = max(most, held)
        return most


def _read(cell: str) -> tuple[int, str, int]:
    found = re.fullmatch(r"(\d+)([A-Z])(\d+)", cell)
    assert found, cell
    return int(found[1]), found[2], int(found[3])
