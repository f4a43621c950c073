"""Caches plans that take long to find, layer partitions, and recompute and offload shares on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from megatron.schedules.planner.layer_partition import partition_layers, placed
from megatron.schedules.planner.memory_saving import save_memory, saved, without_saving
from megatron.schedules.planner.plan_checks import check_layers, check_plan, check_shares
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import from_record, to_record
from megatron.schedules.utils.cache_directory import Directory, UntrustedError, code_version, plans
from megatron.schedules.utils.cache_lock import locked
from megatron.schedules.utils.errors import PlanError, one_line
from megatron.schedules.utils.progress import Progress, unheard

# Ranks x microbatches from which a named schedule takes a second or more.
_LARGE = 4096
_log = logging.getLogger(__name__)


def cached_plan(request: Request, progress: Progress = unheard) -> Schedule:
    """Plans a request with :func:`plan`, or reads its plan from the cache.

    Equal requests are planned once, even if many processes ask at the same time. Fast plans are not cached. If the
    cache is not writable, each process makes the plans that it cannot read; the results are the same. Files that other
    users may have written, or that hold no plan for this request, are replaced, with a warning in the log.

    Args:
        progress: receives the progress of the planning, also if another process does it.

    Raises:
        PlanError: see :func:`plan`.
    """
    if not takes_long(request):
        return plan(request, progress)

    def found(record: Any) -> Schedule:
        schedule = from_record(record)
        check_plan(schedule, request)
        return schedule

    return _kept(_key(request), progress, lambda told: plan(request, told), to_record, found)


def cached_partition(request: Request, progress: Progress = unheard) -> Request:
    """Searches a layer partition with :func:`partition_layers`, or reads it from the cache.

    It is cached like plans, see :func:`cached_plan`. The partition is searched without recompute and offload.

    Raises:
        PlanError: see :func:`partition_layers`.
    """

    def record(found: Request) -> dict[str, Any]:
        start = to_record(found.start) if found.start else None
        return {"layers": found.decisions.layers, "chunks": found.chunk_choices, "start": start}

    def found(record: Any) -> Request:
        kept = msgspec.convert(record, _Layers)
        check_layers(kept.layers, kept.chunks, plain)
        settled = placed(plain, kept.layers, kept.chunks)
        if kept.start is None:
            return settled
        start = from_record(kept.start)
        check_plan(start, settled)
        return replace(settled, start=start)

    plain = without_saving(request)
    made = _kept(f"layers-{_key(plain)}", progress, lambda told: partition_layers(plain, told), record, found)
    return placed(request, made.decisions.layers or (), made.chunk_choices, made.start)


def cached_saving(request: Request, progress: Progress = unheard) -> Request:
    """Searches recompute and offload shares with :func:`save_memory`, or reads them from the cache.

    They are cached like plans, see :func:`cached_plan`.

    Raises:
        PlanError: see :func:`save_memory`.
    """

    def record(found: Request) -> dict[str, Any]:
        return {
            "recomputed": found.decisions.recomputed,
            "offloaded": found.decisions.offloaded,
            "chunks": found.chunk_choices,
        }

    def found(record: Any) -> Request:
        kept = msgspec.convert(record, _Shares)
        check_shares(kept.recomputed, kept.offloaded, kept.chunks, request)
        return saved(request, kept.recomputed, kept.offloaded, kept.chunks)

    return _kept(
        f"saving-{_key(request)}", progress, lambda told: save_memory(request, told, cached_plan), record, found
    )


class _Layers(msgspec.Struct, forbid_unknown_fields=True):
    """A cached layer partition.

    layers: layers of each stage.
    chunks: allowed numbers of chunks per rank.
    start: schedule that the search of the plan starts from, as in :func:`.to_record`; None for named schedules.
    """

    layers: tuple[int, ...]
    chunks: tuple[int, ...]
    start: dict[str, Any] | None


class _Shares(msgspec.Struct, forbid_unknown_fields=True):
    """Cached recompute and offload shares.

    recomputed: share of each stage's layers that is recomputed; None if not decided.
    offloaded: share of each stage's layers that is offloaded; None if not decided.
    chunks: allowed numbers of chunks per rank.
    """

    recomputed: tuple[float, ...] | None
    offloaded: tuple[float, ...] | None
    chunks: tuple[int, ...]


def _kept[Made](
    key: str,
    progress: Progress,
    make: Callable[[Progress], Made],
    record_of: Callable[[Made], dict[str, Any]],
    made_of: Callable[[Any], Made],
) -> Made:
    """Reads the result for ``key`` from the cache, or makes and writes it.

    Reading needs no lock, since files are replaced as a whole. Many processes can read at once, also from a read-only
    directory. Only a process that has to make the result locks its file.
    """
    with plans() as directory:
        if directory is None:
            return make(progress)
        name = f"{key}.json"
        before = directory.version(name)
        found, wrong = _read(directory, name, key, made_of)
        if found is not None:
            return found
        if wrong:
            _log.warning("pipeline schedule: %s: planned anew", wrong)
        with locked(directory, name, progress, until=lambda: directory.version(name) != before) as lock:
            if directory.version(name) != before:  # another process has made it in the meantime
                found, _ = _read(directory, name, key, made_of)
            if found is None:
                found = make(lock.telling(progress) if lock else progress)
                record = record_of(found)
                directory.write(name, json.dumps(record | {"kept": _mark(key, record)}))
            return found


def takes_long(request: Request) -> bool:
    """Returns True if the plan of ``request`` is cached: it is searched for, or it is large.

    Reading a CSV is as fast as reading the cache, so ``file`` is not cached.
    """
    large = request.schedule != "file" and request.ranks * request.microbatches >= _LARGE
    return request.schedule == "adaptive" or large


def _read[Made](
    directory: Directory, name: str, key: str, made_of: Callable[[Any], Made]
) -> tuple[Made | None, str | None]:
    """The result for ``key`` or None, and an error message if its file is wrong."""
    try:
        record = json.loads(directory.read(name))
        if record.pop("kept") == _mark(key, record):
            return made_of(record), None
        why = "it is damaged, or was made for another request"
    except FileNotFoundError:
        return None, None
    except UntrustedError as error:
        return None, str(error)
    except PlanError as error:
        why = one_line(str(error))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        why = "it cannot be read"
    return None, f"{directory.path / name} does not hold the plan it was made for, or not all of it ({why})"


def _mark(key: str, record: dict[str, Any]) -> dict[str, str]:
    """Identifies the request of a cached result, with a digest that detects changes to the file."""
    return {"request": key, "digest": hashlib.sha256(json.dumps(record).encode()).hexdigest()}


def _key(request: Request) -> str:
    """Cache key of ``request`` and of the code version, since another version may find another plan."""
    return hashlib.sha256(f"{request!r} {code_version()}".encode()).hexdigest()[:32]
