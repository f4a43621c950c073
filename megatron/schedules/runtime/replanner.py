"""Planning again while a job runs: made beside the iterations, taken over by all ranks at one boundary or by none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.schedules.planner.adaptive import search_seconds
from megatron.schedules.planner.background import Beside, BesideError
from megatron.schedules.planner.replanning import Proposal, digest, moved, read_rows
from megatron.schedules.planner.request import Request
from megatron.schedules.runtime.control_messages import Notices, told_by_all
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.errors import one_line

# Beside a job that computes a search has a part of a core at worst.
_PATIENCE = 20
_AT_LEAST_S = 120.0


class Plans(Protocol):
    """Where the plan that runs is kept on each rank."""

    @property
    def running(self) -> Schedule:
        """The plan for the number of microbatches that the job has."""
        ...

    def prove(self, request: Request, schedule: Schedule) -> Any:
        """The programs of all ranks, lowered and proved to end; whatever is wrong with them is raised."""
        ...

    def adopt(self, request: Request, schedule: Schedule, proved: Any) -> None:
        """From the next iteration on run this; may not fail."""
        ...


class Replanner:
    """Carries one new plan after another into the job.

    All ranks call :meth:`start` and :meth:`boundary` at the same boundaries between iterations. The first rank of the
    job has the plan made in a process of its own; each iteration it says whether it is done; once it is, all ranks
    read the same rows, each proves its programs, all tell what they found, and all switch or none does.

    Args:
        plans: this rank's.
        notices: from the first rank.
        first: whether this is it.
        say: prints a line; called on all ranks alike.
        exchange: gathers a text of each rank; collective.
    """

    def __init__(
        self,
        plans: Plans,
        notices: Notices,
        *,
        first: bool,
        say: Callable[[str], None],
        exchange: Callable[[str], list[str]] = told_by_all,
    ) -> None:
        self._plans, self._messages, self._first, self._say, self._exchange = plans, notices, first, say, exchange
        self._now = self._started = self._round = 0
        self._request: Request | None = None
        self._beside: Beside | None = None
        self._fault = ""

    @property
    def under_way(self) -> bool:
        """Whether a plan is being made."""
        return self._request is not None

    def start(self, request: Request) -> None:
        """Have a plan made for ``request``, which is the same on all ranks; what was on its way is given up."""
        self.close()
        self._request, self._started, self._round = request, self._now, self._round + 1
        if not self._first:
            return
        try:
            self._beside = Beside(request, self._plans.running, _AT_LEAST_S + _PATIENCE * search_seconds(request))
        except OSError as error:
            self._fault = f"no process can be started to plan: {error}"
        self._post("")

    def boundary(self) -> None:
        """Between two iterations: if the plan is there, take it over."""
        self._now += 1
        if self._request is None or self._started == self._now:
            return
        text = self._messages.read(f"{self._round}/{self._now}")
        if text:
            request, self._request = self._request, None
            self._conclude(request, text)
        elif self._first:
            self._post(self._status())

    def close(self) -> None:
        """Give up what is on its way."""
        if self._beside is not None:
            self._beside.close()
        self._request = self._beside = None
        self._fault = ""

    def _post(self, text: str) -> None:
        """For the next boundary."""
        self._messages.post(f"{self._round}/{self._now + 1}", text)

    def _status(self) -> str:
        """A proposal as text, or why there is none; empty while it is made."""
        try:
            if self._fault or self._beside is None:
                raise BesideError(self._fault)
            found = self._beside.poll()
        except BesideError as error:
            return json.dumps({"error": str(error)})
        return "" if found is None else found.to_text()

    def _conclude(self, request: Request, text: str) -> None:
        if "error" in (said := json.loads(text)):
            self._say(f"WARNING: replanning failed, and the plan that runs goes on: {said['error']}")
            return
        found, running = Proposal.from_text(text), self._plans.running
        if not found.csv:
            self._say(
                f"replanned: nothing better was found; iteration {found.before.makespan:.1f} ms expected, bubble "
                f"{100 * found.before.bubble:.1f} %"
            )
            return
        fault, mark, taken = "", "", None
        try:
            schedule = read_rows(found.csv, running)
            mark = digest(found.csv, schedule.placement, request)
            taken = schedule, self._plans.prove(request, schedule)
        except Exception as error:  # whatever it is: the plan that runs is as good as it was
            fault = one_line(f"{type(error).__name__}: {error}")
        if why := _objection(self._exchange(json.dumps([mark, fault]))):
            self._say(f"WARNING: a new plan is not taken over, and the one that runs goes on: {why}")
            return
        assert taken is not None
        schedule, proved = taken
        self._plans.adopt(request, schedule, proved)
        limit = "" if request.memory_limit is None else f", within {request.memory_limit:.3g} of 1F1B's memory"
        self._say(
            f"replanned: iteration {found.before.makespan:.1f} -> {found.after.makespan:.1f} ms expected, bubble "
            f"{100 * found.before.bubble:.1f} -> {100 * found.after.bubble:.1f} %; {moved(running, schedule)} of "
            f"{sum(map(len, running.order))} passes stand elsewhere{limit}"
        )


def _objection(answers: Sequence[str]) -> str:
    """Why not all of ``answers`` are for it, named by the first rank that is not; empty where they are."""
    found = [json.loads(answer) for answer in answers]
    for rank, (mark, fault) in enumerate(found):
        if fault:
            return f"rank {rank}: {fault}"
        if mark != found[0][0]:
            return f"rank {rank} has another than rank 0: their versions of this package differ, or their profiles do"
    return ""
