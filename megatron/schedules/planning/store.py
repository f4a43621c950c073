"""Plans that took long to find, kept on disk: whoever asks for the same again gets the same at once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.schedules.planning.errors import PlanError
from megatron.schedules.planning.registry import Request, Tick, plan
from megatron.schedules.planning.schedule import Schedule
from megatron.schedules.planning.textforms import from_json, to_json

FOLDER_VARIABLE = "MEGATRON_SCHEDULES_CACHE"


def folder() -> Path:
    """Where plans are kept: $MEGATRON_SCHEDULES_CACHE, else the user's cache folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-schedules"


def kept_plan(request: Request, tick: Tick = lambda share: None) -> Schedule:
    """:func:`plan`, which searches an equal request once only, even where many processes ask at the same time.

    Where nothing can be written each plans for itself; the outcome is the same. Raises :class:`PlanError` as plan does.
    """
    if request.schedule != "adaptive":
        return plan(request, tick)
    path = folder() / f"{_key(request)}.json"
    with _alone(path) as writable:
        if writable:
            try:
                return from_json(path.read_text())
            except (OSError, UnicodeDecodeError, PlanError):  # not there, or not whole
                pass
        schedule = plan(request, tick)
        if writable:
            _write(path, to_json(schedule))
        return schedule


def _key(request: Request) -> str:
    """A name for what ``request`` asks and for the code that answers: another version may find another plan."""
    return hashlib.sha256(f"{request!r} {code_version()}".encode()).hexdigest()[:32]


def code_version() -> str:
    """A name for the planner's code as it is: changed by any change to it."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold the lock of ``path`` where there can be one, waiting for whoever has it; whether there can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("w")
    except OSError:
        yield False
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            yield False
            return
        yield True


def _write(path: Path, text: str) -> None:
    """All of it or nothing, whenever the machine stops. A full disk costs the next one its time, no more."""
    with suppress(OSError), tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
