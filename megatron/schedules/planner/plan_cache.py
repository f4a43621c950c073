"""Caches plans that take long to find, layer partitions, and recompute and offload shares on disk.

Each result is a JSON file in this user's private folder, with the key of its request. A file that is damaged, or that
was made for another request, is replaced.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from megatron.schedules.planner.layer_partition import partition_layers, placed
from megatron.schedules.planner.memory_saving import save_memory, saved, without_saving
from megatron.schedules.planner.registry import Request, plan, stages
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import ScheduleForm
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.json_files import check_length, decode, encode
from megatron.schedules.utils.private_folder import code_version, private_folder, write_whole
from megatron.schedules.utils.progress import Progress, unheard

# Ranks x microbatches from which a named schedule takes a second or more.
_LARGE = 4096
_log = logging.getLogger(__name__)


class _Layers(msgspec.Struct):
    """Layers of each stage, allowed numbers of chunks per rank, and the schedule that the search starts from."""

    layers: tuple[int, ...]
    chunks: tuple[int, ...]
    start: ScheduleForm | None


class _Shares(msgspec.Struct):
    """Shares of each stage's layers, None if not decided, and allowed numbers of chunks per rank."""

    recomputed: tuple[float, ...] | None
    offloaded: tuple[float, ...] | None
    chunks: tuple[int, ...]


class _Record[Form](msgspec.Struct):
    """A file of the cache."""

    key: str
    result: Form


def takes_long(request: Request) -> bool:
    """Returns True if the plan of ``request`` is cached: it is searched for, or it is large.

    Reading a CSV is as fast as reading the cache, so ``file`` is not cached.
    """
    large = request.schedule != "file" and request.ranks * request.microbatches >= _LARGE
    return request.schedule == "adaptive" or large


def cached_plan(request: Request, progress: Progress = unheard) -> Schedule:
    """Plans a request with :func:`plan`, or reads its plan from the cache. Fast plans are not cached.

    Raises:
        PlanError: see :func:`plan`.
    """
    if not takes_long(request):
        return plan(request, progress)
    return _cached(
        _key(request),
        ScheduleForm,
        lambda form: _schedule(form, request),
        lambda: plan(request, progress),
        ScheduleForm.of,
    )


def cached_partition(request: Request, progress: Progress = unheard) -> Request:
    """Searches a layer partition with :func:`partition_layers`, or reads it from the cache.

    The partition is searched without recompute and offload.

    Raises:
        PlanError: see :func:`partition_layers`.
    """
    plain = without_saving(request)

    def read(form: _Layers) -> Request:
        settled = placed(plain, form.layers, form.chunks)
        check_length(form.layers, stages(settled), "$.layers", "stage")
        return replace(settled, start=_schedule(form.start, plain) if form.start else None)

    def form_of(made: Request) -> _Layers:
        start = ScheduleForm.of(made.start) if made.start else None
        return _Layers(made.decisions.layers or (), made.chunk_choices, start)

    made = _cached(
        f"layers-{_key(plain)}", _Layers, read, lambda: partition_layers(plain, progress, cached_plan), form_of
    )
    return placed(request, made.decisions.layers or (), made.chunk_choices, made.start)


def cached_saving(request: Request, progress: Progress = unheard) -> Request:
    """Searches recompute and offload shares with :func:`save_memory`, or reads them from the cache.

    Raises:
        PlanError: see :func:`save_memory`.
    """

    def read(form: _Shares) -> Request:
        settled = saved(request, form.recomputed, form.offloaded, form.chunks)
        for shares in (form.recomputed, form.offloaded):
            if shares is not None:
                check_length(shares, stages(settled), "$.recomputed and $.offloaded", "stage")
        return settled

    def form_of(made: Request) -> _Shares:
        return _Shares(made.decisions.recomputed, made.decisions.offloaded, made.chunk_choices)

    key, make = f"saving-{_key(request)}", lambda: save_memory(request, progress, cached_plan)
    return _cached(key, _Shares, read, make, form_of)


def _schedule(form: ScheduleForm, request: Request) -> Schedule:
    """Returns the schedule, which is checked as one from a CSV is; raises PlanError if it is not of this size."""
    schedule = form.schedule()
    if (schedule.ranks, schedule.microbatches) != (request.ranks, request.microbatches):
        raise PlanError(f"it has {schedule.ranks} ranks and {schedule.microbatches} microbatches")
    return schedule


def _cached[Made, Form](
    key: str, form: type[Form], read: Callable[[Form], Made], make: Callable[[], Made], form_of: Callable[[Made], Form]
) -> Made:
    """Reads the result for ``key`` from the cache, or makes and writes it."""
    folder = private_folder()
    if folder is None:
        return make()
    path = folder / f"{key}.json"
    try:
        record = decode(path.read_bytes().decode(), _Record[form])  # type: ignore[valid-type]
        if record.key == key:
            return read(record.result)
        why = "it was made for another request"
    except FileNotFoundError:
        why = ""
    except (OSError, UnicodeDecodeError, PlanError) as error:
        why = one_line(str(error))
    if why:
        _log.warning("pipeline schedule: %s does not hold a plan for its request (%s): planned anew", path, why)
    made = make()
    with suppress(OSError):  # a full disk
        write_whole(path, encode(_Record(key, form_of(made))).encode())
    return made


def _key(request: Request) -> str:
    """Cache key of ``request`` and of the code version, since another version may find another plan."""
    return hashlib.sha256(f"{request!r} {code_version()}".encode()).hexdigest()[:32]
