"""Parsers for user input: numbers, lists of numbers, and text files. Errors are one line."""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path

from megatron.schedules.utils.errors import PlanError

# Units of memory. A letter alone counts as in most tools, such as --mem of SLURM.
_UNITS = {"gib": 2.0**30, "mib": 2.0**20, "tib": 2.0**40, "gb": 1e9, "mb": 1e6, "tb": 1e12, "g": 2.0**30, "m": 2.0**20}
_MOST_MIB = 32  # a CSV file of a million passes has some 10 MiB
# Digits of a number. A longer one is replaced by a number that is too large anyway.
_MOST_DIGITS = 100


def read_text(path: Path, about: str | None) -> str:
    """Reads the text of the regular file ``path``.

    Raises:
        PlanError: if it cannot be read, or is a pipe or a device, which may never end.
    """
    try:
        status = _status(path, about)
        if not stat.S_ISREG(status.st_mode):
            raise PlanError(f"cannot read {path}: it is no regular file", about)
        if status.st_size > _MOST_MIB * 2**20:
            raise PlanError(f"{path} is too large: {_MOST_MIB} MiB are read at most", about)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", about) from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a text file in UTF-8", about) from None


def _status(path: Path, about: str | None) -> os.stat_result:
    try:
        return path.stat()
    except ValueError:  # a NUL, or half of a surrogate pair
        raise PlanError(f"cannot read {path}: no file can have this name", about) from None


def whole(text: str) -> int | None:
    """Parses a whole number in ASCII digits; None if ``text`` is not one."""
    # int() would also accept digits of other scripts and underscores, and fail for thousands of digits.
    if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
        return None
    return int(text) if len(text) <= _MOST_DIGITS else int("-1" if "-" in text else "1") * 10**_MOST_DIGITS


def decimal(text: str) -> float:
    """Parses a number in ASCII digits, or an infinite one; NaN if ``text`` is not a number."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def integer(flag: str, text: str | None, least: int, why: str, most: int | None = None) -> int | None:
    """Parses the whole number given for ``flag``; None if it is not given."""
    if text is None:
        return None
    value = whole(text)
    if value is None:
        raise PlanError(f"{flag} {text!r} is not a whole number: {why}")
    if value < least:
        raise PlanError(f"{flag} {text} is too small: {why}")
    if most is not None and value > most:
        raise PlanError(f"{flag} {text} is too large: {most} at most")
    return value


def number(flag: str, text: str, what: str) -> float:
    """Parses the number given for ``flag``."""
    value = decimal(text)
    if not math.isfinite(value):
        raise PlanError(f"{flag} {text!r} is not a number: {what} is needed")
    return value


def positive(flag: str, text: str | None, what: str) -> float | None:
    """Parses the number above zero given for ``flag``; None if it is not given."""
    value = not_negative(flag, text, what, "not above zero")
    if value == 0:
        raise PlanError(f"{flag} {text} is not above zero: {what} is needed")
    return value


def not_negative(flag: str, text: str | None, what: str, wrong: str = "below zero") -> float | None:
    """Parses the number, zero or more, given for ``flag``; None if it is not given."""
    if text is None:
        return None
    value = number(flag, text, what)
    if value < 0:
        raise PlanError(f"{flag} {text} is {wrong}: {what} is needed")
    return value


def size(flag: str, text: str) -> float:
    """Parses the size given for ``flag``; returns bytes."""
    digits, unit = _with_unit(text)
    if unit is None:
        raise PlanError(f"{flag} {text!r} has no unit: write it such as 80GiB")
    value = positive(flag, digits, "a size such as 80GiB")
    assert value is not None
    return value * unit


def as_size(text: str) -> float | None:
    """Parses a size such as 80GiB, 80GB or 80G; returns bytes, NaN for a wrong number, and None without a unit."""
    digits, unit = _with_unit(text)
    return None if unit is None else decimal(digits) * unit


def _with_unit(text: str) -> tuple[str, float | None]:
    """Splits a size into its number and the bytes of its unit; None without a unit."""
    unit = next((unit for unit in _UNITS if text.lower().endswith(unit)), None)
    return (text, None) if unit is None else (text[: -len(unit)].strip(), _UNITS[unit])


def numbers(flag: str, text: str | None) -> tuple[float, ...] | None:
    """Parses the list of numbers, each zero or more, given for ``flag``; None if it is not given."""
    if text is None:
        return None
    numbers = tuple(number(flag, part, "a list such as 1.5,1,1,1.2") for part in text.split(","))
    if min(numbers) < 0:
        raise PlanError(f"{flag} {min(numbers):g} is below zero: a list such as 1.5,1,1,1.2 is needed")
    return numbers
