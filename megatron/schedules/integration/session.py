"""Hooks: how they replace names of stock Megatron, and the state that those of one process share."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from megatron.core import parallel_state
from megatron.core.package_info import __shortversion__
from torch.nn import Module

from megatron.schedules.integration.environment import whole_variable
from megatron.schedules.integration.expert_messages import ExpertMessages
from megatron.schedules.integration.flags.declared import FLAGS, settings_without_flags
from megatron.schedules.integration.graphs.capture import Capture
from megatron.schedules.integration.host_waits import LateChecks
from megatron.schedules.integration.job_replanning import RunningJob
from megatron.schedules.integration.refuse import refuse
from megatron.schedules.integration.shared_plan import SharedPlans
from megatron.schedules.integration.touch_points import NEWEST, is_newer
from megatron.schedules.job.plan_job import JobPlan
from megatron.schedules.job.values import schedule_choice
from megatron.schedules.planner.adaptive import placements
from megatron.schedules.planner.registry import Request, placement
from megatron.schedules.runtime.planner import Planner
from megatron.schedules.schedule.placement import Placement
from megatron.schedules.utils.parsing import read_text

Stock = Callable[..., Any]
"""A function of stock's, or what replaces it."""

_log = logging.getLogger(__name__)
_MEGATRON = ("megatron.core", "megatron.training", "megatron.schedules")


class Session:
    """The schedule chosen on the command line, after it is parsed, and the stage whose forward is running.

    Args:
        arguments: arguments of ``install()``, by name.

    Attributes:
        settings: settings given without flags, see :func:`.settings_without_flags`.
        first_chunk: chunk with the embedding of the model that a loop without arguments builds.
        loops: jobs of a loop without Megatron-LM's arguments, by the model's first chunk.
    """

    def __init__(self, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.arguments, self.settings = arguments, settings_without_flags(arguments)
        self.first_chunk: ref[Module] | None = None
        self.loops: WeakKeyDictionary[Module, Callable[..., list[Any]]] = WeakKeyDictionary()
        self.plan: JobPlan | None = None
        self.plans = SharedPlans()
        self.planner: Planner | None = None
        self.job: RunningJob | None = None
        self.args: Any = None
        self.hybrid_layers: tuple[int, ...] | None = None  # of each stage of a hybrid model
        self.layers = 0  # of the model in training, with those of multi-token prediction
        self.late_checks = LateChecks()
        self.expert_messages = ExpertMessages()
        self.evaluations: list[int] | None = None  # steps on each of several validation sets
        self.capture: Capture | None = None  # of CUDA graphs, while it goes on
        self._running: int | None = None

    @property
    def has_schedule(self) -> bool:
        """True if a schedule is given, by a flag or without one."""
        return self.plan is not None or "pipeline_schedule" in self.settings

    def iteration(self) -> int:
        """Current iteration, as stock logs it."""
        return int(getattr(self.args, "curr_iteration", 0)) + 1

    def running(self, stage: int) -> AbstractContextManager[None]:
        """Makes Megatron's queries about first and last stage refer to ``stage`` while its forward runs."""
        return _Running(self, stage)

    def placement(self, ranks: int, chunks: int | None) -> Placement | None:
        """Position of the stages; None if it is stock's, as without a schedule. ``chunks`` is None for one a rank."""
        if self.planner is not None:
            return self.planner.placement
        if "pipeline_schedule" not in self.settings or chunks is None:
            return None
        placement = _placement_with(self.settings["pipeline_schedule"], ranks, chunks)
        return placement if placement.chunks == chunks else None  # refused when training begins

    @property
    def current_placement(self) -> Placement | None:
        """Position of the stages of the model that is built or trained now."""
        if self.planner is not None:
            return self.planner.placement  # asked before this rank has its pipeline group
        if not parallel_state.model_parallel_is_initialized():
            return None
        return self.placement(
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        )

    @property
    def loss_on_first_rank(self) -> bool:
        """True if the output layer is on the first rank, and not on the last as stock assumes."""
        placement = self.current_placement
        return placement is not None and placement.rank_of[-1] == 0

    @property
    def two_copies(self) -> bool:
        """True if one rank may have both copies of a tied embedding, which stock has on two ranks."""
        return self.loss_on_first_rank or (self.planner is not None and self.planner.shares_vocabulary)

    def stock_is_wrong(self, ignore_virtual: bool) -> bool:
        """Returns whether stock's first/last query is wrong for the current stage, a chunk of a V-shaped placement."""
        return (not ignore_virtual or self._running is not None) and self.loss_on_first_rank

    def first_and_last(self, chunk: int | None) -> tuple[bool, bool]:
        """Returns whether this rank's ``chunk`` has the embedding, and whether it has the output layer."""
        placement, stage = self.current_placement, self._running
        assert placement is not None
        if stage is None:
            stage = placement.stages_of(parallel_state.get_pipeline_model_parallel_rank())[chunk or 0]
        return stage == 0, stage == placement.last_stage


class _Running:
    """Context of :meth:`Session.running`; as a function it takes the host twice as long."""

    __slots__ = ("_outer", "_session", "_stage")

    def __init__(self, session: Session, stage: int) -> None:
        self._session, self._stage = session, stage

    def __enter__(self) -> None:
        self._outer, self._session._running = self._session._running, self._stage

    def __exit__(self, *_: object) -> None:
        self._session._running = self._outer


def _placement_with(schedule: str, ranks: int, chunks: int) -> Placement:
    """Position of the stages of a model that a training loop builds, which planning keeps.

    Args:
        schedule: value of ``--pipeline-schedule``, checked before.
        ranks: pipeline ranks.
        chunks: model chunks of each rank.
    """
    choice = schedule_choice(FLAGS["schedule"], schedule)
    csv = None if choice.file is None else read_text(choice.file, "csv")
    request = Request(schedule=choice.name, ranks=ranks, microbatches=1, chunks=choice.chunks or chunks, csv=csv)
    return placement(request) or placements(replace(request, chunk_choices=(chunks,)))[0]


class Hook(NamedTuple):
    """One replaced name of stock Megatron.

    Args:
        module: module of the name.
        name: the name.
        why: reason for the replacement.
        call: replacement. It gets the original, the session, and the caller's arguments.
    """

    module: ModuleType | type
    name: str
    why: str
    call: Stock


def put_in(hooks: Iterable[Hook], session: Session) -> None:
    """Puts ``hooks`` in place in this process. A second call replaces the session and does not stack hooks.

    Training loops that imported a name from one of Megatron's modules before get the replacement too. A name that is
    missing ends the process with one line and status 2.
    """
    if is_newer(__shortversion__) and whole_variable("RANK", 0) == 0:
        _log.warning(
            "pipeline schedule: megatron-core %s is newer than %s, the newest that this package was compared with: "
            "docs/upgrading.md says what to try first",
            __shortversion__,
            NEWEST,
        )
    hooks = list(hooks)
    names = {hook.name for hook in hooks}
    loops: dict[str, list[ModuleType]] = {}
    for path, module in list(sys.modules.items()):
        if not path.startswith(_MEGATRON):
            for name in names.intersection(getattr(module, "__dict__", ())):
                loops.setdefault(name, []).append(module)
    for hook in hooks:
        if not hasattr(hook.module, hook.name):
            refuse(
                f"this megatron-core has no {hook.module.__name__}.{hook.name}, which pipeline schedules replace: use "
                "a version from 0.17 to 0.20"
            )
        stock = _stock(getattr(hook.module, hook.name))
        if stock is None:  # of a library that is not installed
            continue
        replacement = _replacement(hook, stock, session)
        setattr(hook.module, hook.name, replacement)
        for module in loops.get(hook.name, ()):
            if _stock(vars(module)[hook.name]) is stock:
                setattr(module, hook.name, replacement)


def _stock(function: Any) -> Any:
    """Returns the function that ``function`` replaces, or itself."""
    return getattr(function, "megatron_schedules_stock", function)


def _replacement(hook: Hook, stock: Stock, session: Session) -> Stock:
    """Returns a function (or method) that replaces ``stock``."""

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook.call(stock, session, *args, **kwargs)

    replacement.megatron_schedules_stock = stock  # type: ignore[attr-defined]
    return replacement
