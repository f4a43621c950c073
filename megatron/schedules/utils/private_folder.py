"""The folder for cached plans and compiled code, which only this user can open."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PLANS_VARIABLE = "MEGATRON_SCHEDULES_CACHE"
USER_VARIABLE = "XDG_CACHE_HOME"
COMPILED = "compiled"
"""Folder within it for compiled code, which plans in other folders may share."""

_NAME = "megatron-schedules"
# Packages whose code determines plans.
_PLANNING_ROOMS = ("planner", "schedule", "search", "utils")
# Packages whose code may be in compiled code.
_COMPILED_ROOMS = ("schedule", "search", "utils")
_log = logging.getLogger(__name__)


def plans_directory() -> Path:
    """Returns the path of the folder: $MEGATRON_SCHEDULES_CACHE, by default in the user's own cache directory.

    A user without a home directory gets one in the temporary directory.
    """
    if named := os.environ.get(PLANS_VARIABLE):
        return Path(named)
    try:
        return Path(os.environ.get(USER_VARIABLE) or Path.home() / ".cache") / _NAME
    except RuntimeError:  # a container that runs as an unknown uid
        folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"{_NAME}-{os.geteuid()}"
        warn_once(f"there is no home directory: the cache is {folder}, unless ${USER_VARIABLE} names another")
        return folder


def private_folder() -> Path | None:
    """Returns the folder, created if it is missing; None, with one warning per process, if it cannot be used.

    It must belong to this user and be closed to others, since loading compiled code runs it.
    """
    path = plans_directory()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = _fault(path)
        if why is None:
            tempfile.TemporaryFile(dir=path).close()
            return path
    except OSError as error:
        why = error.strerror or str(error)
    warn_once(
        f"{path} is not used: {why}; plans and compiled code are not cached, unless ${PLANS_VARIABLE} names a folder "
        "that belongs to you and that only you can open"
    )
    return None


def _fault(path: Path) -> str | None:
    """Returns why others can change or read the folder; None if they cannot.

    A default folder that others could read becomes private. If they could write, its content is not trusted.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return "other users can write to it (delete it if you do not trust them; else chmod 700 makes it private)"
    if status.st_mode & 0o077:
        if os.environ.get(PLANS_VARIABLE):
            return "other users can open it (chmod 700 makes it private)"
        path.chmod(0o700)
    return None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, completely or not at all; raises OSError if it fails."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def code_version(packages: Iterable[str] = _PLANNING_ROOMS) -> str:
    """Returns a digest of the code of ``packages``, by default that which determines plans. Any change changes it."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for room in packages:
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


def compiled_version() -> str:
    """Returns a digest of the code that may be in compiled code. Folders in :data:`COMPILED` begin with it."""
    return code_version(_COMPILED_ROOMS)[:16]


def has_compiled_code() -> bool:
    """Checks whether there may be compiled code of this version, without numba, whose import takes half a second."""
    private = private_folder()
    return private is not None and any((private / COMPILED).glob(f"{compiled_version()}-*"))


@cache
def warn_once(message: str) -> None:
    """Logs a warning, once per process for each message."""
    _log.warning("pipeline schedule: %s", message)
