"""Replanning while a job runs: in the background, adopted by all ranks between the same two iterations or by none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.schedules.planner.adaptive import search_seconds
from megatron.schedules.planner.background import BackgroundPlan, BackgroundPlanError
from megatron.schedules.planner.replanning import Proposal, digest, moved, read_rows
from megatron.schedules.planner.request import Request
from megatron.schedules.runtime.control_messages import ControlMessages, of_all_ranks
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.utils.errors import one_line

# While the job computes a search may get only a part of a core.
_PATIENCE = 20
_AT_LEAST_S = 120.0


class Plans(Protocol):
    """Holds the current plan, on each rank."""

    @property
    def running(self) -> Schedule:
        """The plan for the job's number of microbatches."""
        ...

    def prove(self, request: Request, schedule: Schedule) -> Any:
        """Returns the programs of all ranks, lowered and checked; raises an error if one is wrong."""
        ...

    def adopt(self, request: Request, schedule: Schedule, proved: Any) -> None:
        """Runs this schedule from the next iteration on. Must not fail."""
        ...


class Replanner:
    """Brings one new plan after another into the job.

    All ranks call :meth:`start` and :meth:`boundary` between the same iterations. The first rank has the plan made in
    another process, and tells in each iteration whether it is done. Then all ranks read the same rows, each checks its
    programs, all exchange the results, and all switch or none does.

    Args:
        plans: this rank's.
        messages: from the first rank.
        first: whether this is the first rank.
        adopts: whether to switch to a better plan; otherwise only says what it would gain.
        say: prints a line; called on all ranks alike.
        exchange: gathers a text of each rank; collective.
    """

    def __init__(
        self,
        plans: Plans,
        messages: ControlMessages,
        *,
        first: bool,
        adopts: bool = True,
        say: Callable[[str], None],
        exchange: Callable[[str], list[str]] = of_all_ranks,
    ) -> None:
        self._plans, self._messages, self._first, self._say, self._exchange = plans, messages, first, say, exchange
        self._adopts = adopts
        self._now = self._started = self._round = 0
        self._request: Request | None = None
        self._search: BackgroundPlan | None = None
        self._fault = ""

    @property
    def under_way(self) -> bool:
        """True while a new plan is being made."""
        return self._request is not None

    def start(self, request: Request) -> None:
        """Starts planning for ``request``, the same on all ranks. Cancels planning in progress."""
        self.close()
        self._request, self._started, self._round = request, self._now, self._round + 1
        if not self._first:
            return
        try:
            self._search = BackgroundPlan(
                request, self._plans.running, _AT_LEAST_S + _PATIENCE * search_seconds(request)
            )
        except OSError as error:
            self._fault = f"no process can be started to plan: {error}"
        self._post("")

    def boundary(self) -> None:
        """Between two iterations: adopts the plan if it is ready."""
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
        """Cancels planning in progress."""
        if self._search is not None:
            self._search.close()
        self._request = self._search = None
        self._fault = ""

    def _post(self, text: str) -> None:
        """Posts ``text`` for the next boundary."""
        self._messages.post(f"{self._round}/{self._now + 1}", text)

    def _status(self) -> str:
        """Returns a proposal as text, or why there is none; empty while it is being made."""
        try:
            if self._fault or self._search is None:
                raise BackgroundPlanError(self._fault)
            proposal = self._search.poll()
        except BackgroundPlanError as error:
            return json.dumps({"error": str(error)})
        return "" if proposal is None else proposal.to_text()

    def _conclude(self, request: Request, text: str) -> None:
        if "error" in (said := json.loads(text)):
            self._say(f"WARNING: replanning failed, and the current plan stays: {said['error']}")
            return
        proposal, running = Proposal.from_text(text), self._plans.running
        if not proposal.csv:
            self._say(
                f"replanned: nothing better was found; iteration {proposal.before.makespan:.1f} ms expected, bubble "
                f"{100 * proposal.before.bubble:.1f} %"
            )
            return
        change = f"{proposal.before.makespan:.1f} -> {proposal.after.makespan:.1f} ms expected"
        bubble = f"bubble {100 * proposal.before.bubble:.1f} -> {100 * proposal.after.bubble:.1f} %"
        if not self._adopts:
            self._say(f"a plan for the measured times would be better: iteration {change}, {bubble}")
            return
        fault, mark, taken = "", "", None
        try:
            schedule = read_rows(proposal.csv, running)
            mark = digest(proposal.csv, schedule.placement, request)
            taken = schedule, self._plans.prove(request, schedule)
        except Exception as error:  # whatever it is, the current plan is still good
            fault = one_line(f"{type(error).__name__}: {error}")
        if why := _objection(self._exchange(json.dumps([mark, fault]))):
            self._say(f"WARNING: a new plan is not adopted, and the current one stays: {why}")
            return
        assert taken is not None
        schedule, proved = taken
        self._plans.adopt(request, schedule, proved)
        limit = "" if request.memory_limit is None else f", within {request.memory_limit:.3g} of 1F1B's memory"
        self._say(
            f"replanned: iteration {change}, {bubble}; {moved(running, schedule)} of {sum(map(len, running.order))} "
            f"passes were moved{limit}"
        )


def _objection(answers: Sequence[str]) -> str:
    """Returns why the first rank that disagrees does so; empty if all ``answers`` agree."""
    parsed = [json.loads(answer) for answer in answers]
    for rank, (mark, fault) in enumerate(parsed):
        if fault:
            return f"rank {rank}: {fault}"
        if mark != parsed[0][0]:
            return (
                f"rank {rank} has another plan than rank 0: their versions of this package differ, or their profiles do"
            )
    return ""
