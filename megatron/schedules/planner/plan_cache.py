"""Caches on disk the plans that take long to find, and the layer partitions and memory savings."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
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

# Ranks x microbatches from which on even a schedule by name takes a second or more.
_LARGE = 4096
_log = logging.getLogger(__name__)


def cached_plan(request: Request, progress: Progress = unheard) -> Schedule:
    """:func:`plan`, which plans an equal request once only, even where many processes ask at the same time.

    What takes no time is planned each time. Where nothing can be written each process plans for itself what it cannot
    read; the outcome is the same. A file that others may have written, or that holds anything but a plan for this
    request, is written anew, and the log says so.

    Args:
        request: what is asked for.
        progress: hears how far the planning is, also where another process does it.

    Raises:
        PlanError: as :func:`plan` does.
    """
    if not takes_long(request):
        return plan(request, progress)

    def found(record: Any) -> Schedule:
        schedule = from_record(record)
        check_plan(schedule, request)
        return schedule

    return _kept(_key(request), progress, lambda told: plan(request, told), to_record, found)


def cached_partition(request: Request, progress: Progress = unheard) -> Request:
    """:func:`partition_layers`, once only for an equal request, as :func:`cached_plan` plans.

    Layers are those for a plan without recompute and offload.

    Raises:
        PlanError: as :func:`partition_layers` does.
    """

    def record(found: Request) -> dict[str, Any]:
        return {"layers": found.decisions.layers, "chunks": found.chunk_choices}

    def found(record: Any) -> Request:
        kept = msgspec.convert(record, _Layers)
        check_layers(kept.layers, kept.chunks, plain)
        return placed(plain, kept.layers, kept.chunks)

    plain = without_saving(request)
    placed_plainly = _kept(f"layers-{_key(plain)}", progress, lambda told: partition_layers(plain, told), record, found)
    return placed(request, placed_plainly.decisions.layers or (), placed_plainly.chunk_choices)


def cached_saving(request: Request, progress: Progress = unheard) -> Request:
    """:func:`save_memory`, once only for an equal request, as :func:`cached_plan` plans.

    Raises:
        PlanError: as :func:`save_memory` does.
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
    """A layer partition on disk: layers of each stage, and the stages a rank may hold."""

    layers: tuple[int, ...]
    chunks: tuple[int, ...]


class _Shares(msgspec.Struct, forbid_unknown_fields=True):
    """Recompute and offload on disk: shares of each stage's layers, and the stages a rank may hold."""

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
    """What is kept for ``key``, or else is made now.

    It is read without a lock, since files are replaced whole: many processes read at once, and from a directory that
    they cannot write to. Only who has to make it locks it.
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
            if directory.version(name) != before:  # another process has made it since
                found, _ = _read(directory, name, key, made_of)
            if found is None:
                found = make(lock.telling(progress) if lock else progress)
                record = record_of(found)
                directory.write(name, json.dumps(record | {"kept": _mark(key, record)}))
            return found


def takes_long(request: Request) -> bool:
    """Whether its plan is kept: one that is searched for, or a large one. A CSV is read as fast as a kept plan."""
    large = request.schedule != "file" and request.ranks * request.microbatches >= _LARGE
    return request.schedule == "adaptive" or large


def _read[Made](
    directory: Directory, name: str, key: str, made_of: Callable[[Any], Made]
) -> tuple[Made | None, str | None]:
    """What was made for ``key``, or None; and what is wrong with its file, where anything is."""
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
    """What a kept plan says of itself: the request it answers, and what a change to any of it would change."""
    return {"request": key, "digest": hashlib.sha256(json.dumps(record).encode()).hexdigest()}


def _key(request: Request) -> str:
    """A name for what ``request`` asks and for the code that answers: another version may find another plan."""
    return hashlib.sha256(f"{request!r} {code_version()}".encode()).hexdigest()[:32]
