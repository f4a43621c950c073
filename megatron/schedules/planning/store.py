"""Plans that took long to find, kept on disk: whoever asks for the same again gets the same at once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.schedules.planning.keeping import code_version, folder, locked, write_whole
from megatron.schedules.planning.progress import Progress, unheard
from megatron.schedules.planning.registry import Request, plan
from megatron.schedules.planning.relief import relieve, relieved, without_relief
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.spread import placed, spread_layers
from megatron.schedules.planning.textforms import from_record, to_record

# Ranks x microbatches from which on even a schedule by name takes a second or more.
_LARGE = 4096
_log = logging.getLogger(__name__)


def kept_plan(request: Request, progress: Progress = unheard) -> Schedule:
    """:func:`plan`, which plans an equal request once only, even where many processes ask at the same time.

    What takes no time is planned each time. Where nothing can be written each process plans for itself; the outcome is
    the same. A file that holds anything but the plan asked for is written anew, and the log says so.

    Args:
        request: what is asked for.
        progress: hears how far the planning is, also where another process does it.

    Raises:
        PlanError: as :func:`plan` does.
    """
    if not takes_long(request):
        return plan(request, progress)
    return _kept(_key(request), progress, lambda told: plan(request, told), to_record, from_record)


def kept_spread(request: Request, progress: Progress = unheard) -> Request:
    """:func:`spread_layers`, which searches once only for an equal request, as :func:`kept_plan` plans.

    Layers are placed as for a plan that relieves nothing.

    Raises:
        PlanError: as :func:`spread_layers` does.
    """

    def record(found: Request) -> dict[str, Any]:
        return {"layers": found.costs.layers, "chunks": found.chunk_choices}

    def found(record: dict[str, Any]) -> Request:
        return placed(plain, tuple(record["layers"]), tuple(record["chunks"]))

    plain = without_relief(request)
    placed_plainly = _kept(f"layers-{_key(plain)}", progress, lambda told: spread_layers(plain, told), record, found)
    return replace(request, costs=placed_plainly.costs, chunk_choices=placed_plainly.chunk_choices)


def kept_relief(request: Request, progress: Progress = unheard) -> Request:
    """:func:`relieve`, which searches once only for an equal request, as :func:`kept_plan` plans.

    Raises:
        PlanError: as :func:`relieve` does.
    """

    def record(found: Request) -> dict[str, Any]:
        return {
            "redone": found.costs.redone,
            "offloaded": found.costs.offloaded,
            "chunks": found.chunk_choices,
        }

    def found(record: dict[str, Any]) -> Request:
        redone, offloaded = (None if each is None else tuple(each) for each in (record["redone"], record["offloaded"]))
        return relieved(request, redone, offloaded, tuple(record["chunks"]))

    return _kept(f"relief-{_key(request)}", progress, lambda told: relieve(request, told, kept_plan), record, found)


def _kept[Made](
    key: str,
    progress: Progress,
    make: Callable[[Progress], Made],
    record_of: Callable[[Made], dict[str, Any]],
    made_of: Callable[[dict[str, Any]], Made],
) -> Made:
    """What is kept for ``key``, or else is made now."""
    path = folder() / f"{key}.json"
    with locked(path, progress) as lock:
        if lock is None:
            return make(progress)
        found = _read(path, key, made_of)
        if found is None:
            found = make(lock.telling(progress))
            record = record_of(found)
            write_whole(path, json.dumps(record | {"kept": _mark(key, record)}))
        return found


def takes_long(request: Request) -> bool:
    """Whether its plan is kept: one that is searched for, or a large one."""
    return request.schedule == "adaptive" or request.ranks * request.microbatches >= _LARGE


def _read[Made](path: Path, key: str, made_of: Callable[[dict[str, Any]], Made]) -> Made | None:
    """What was made for ``key`` and is in ``path``; None where nothing is."""
    try:
        record = json.loads(path.read_text())
        if record.pop("kept") == _mark(key, record):
            return made_of(record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    _log.warning("%s does not hold the plan it was made for, or not all of it: planned anew", path)
    return None


def _mark(key: str, record: dict[str, Any]) -> dict[str, str]:
    """What a kept plan says of itself: the request it answers, and what a change to any of it would change."""
    return {"request": key, "digest": hashlib.sha256(json.dumps(record).encode()).hexdigest()}


def _key(request: Request) -> str:
    """A name for what ``request`` asks and for the code that answers: another version may find another plan."""
    return hashlib.sha256(f"{request!r} {code_version()}".encode()).hexdigest()[:32]
