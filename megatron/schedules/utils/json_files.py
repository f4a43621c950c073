"""Reads and writes JSON files through typed forms. Errors are one line that names the file and the field.

A form is a :mod:`msgspec` class that defines the names, types and bounds of a file's fields. The same class writes the
file. The reader of a form checks what no single field can express, such as the lengths of lists. It raises
:class:`.PlanError`, which begins with the field's path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text

# Bounds of times and sizes. No iteration takes 30,000 years and no memory has a petabyte, in any unit. Sums, products
# and quotients of such numbers stay far from the limits of a float, so all values can be planned for and drawn.
MOST = 1e15
LEAST = 1e-15
_LARGEST = 10**12
_LONGEST_NAME = 1000

Amount = Annotated[float, Meta(ge=0, le=MOST)]
"""Time or size that may be zero."""
Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
"""Time or rate above zero."""
Portion = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=_LARGEST)]
Index = Annotated[int, Meta(ge=0, le=_LARGEST)]
# Characters that XML forbids are excluded, because names are drawn. Both Python and JSON Schema readers understand the
# end of the pattern.
Name = Annotated[str, Meta(max_length=_LONGEST_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f\ufffe\uffff]*(?![\s\S])")]
LinkLatency = tuple[Index, Index, Amount]
"""Latency of a message: from rank, to rank, time."""


class Form(Struct, frozen=True, kw_only=True):
    """Base class of the forms of JSON objects. UNSET fields are left out; unknown fields are ignored."""


class _Version(Form, frozen=True, kw_only=True):
    version: int


def read_file[Made](path: Path, about: str | None, what: str, writers: str, made: Callable[[str], Made]) -> Made:
    """Reads the file ``path`` with ``made``.

    Args:
        about: flag that names the file, see :class:`.PlanError`.
        what: expected type of file, for the error.
        writers: commands that write such files, for the error.
        made: parser of the text. Its :class:`.PlanError` begins with the field that is wrong.

    Raises:
        PlanError: if a field of the file is wrong, or the file cannot be read.
    """
    text = read_text(path, about)
    try:
        return made(text)
    except PlanError as error:
        raise PlanError(f"{path} is no {what}: {error}; {writers}", about) from None


def check_version(text: str, *known: int, gone: Mapping[int, str] | None = None) -> int:
    """Returns the version of a file, before the rest is read; raises :class:`.PlanError` if it is not in ``known``.

    Args:
        text: the file.
        known: versions that are read.
        gone: what files of earlier versions are, by version.
    """
    number = decode(text, _Version).version
    if gone and number in gone:
        raise PlanError(f"it is {gone[number]} (version {number}), which is no longer read: measure again")
    if number not in known:
        raise PlanError(f"$.version is version {number}, and {' or '.join(map(str, known))} is read here")
    return number


def decode[Read](text: str, form: type[Read]) -> Read:
    """Reads ``text`` as a ``form``.

    Raises:
        PlanError: names the path of the first field that is wrong, and what it must be.
    """
    try:
        try:
            return msgspec.json.decode(text, type=form)
        except msgspec.ValidationError as error:
            said = _told(error, _untyped(text))
    except RecursionError:
        said = "it is no JSON: lists are nested too deeply"
    except msgspec.DecodeError as error:
        said = f"it is no JSON: {error}"
    raise PlanError(said)


def convert[Read](data: Any, form: type[Read]) -> Read:
    """Converts decoded JSON to a ``form``; raises :class:`.PlanError` as :func:`decode` does."""
    try:
        return msgspec.convert(data, form)
    except msgspec.ValidationError as error:
        raise PlanError(_told(error, data)) from None
    except RecursionError:
        raise PlanError("lists are nested too deeply") from None


def encode(form: Any, indent: int = 0) -> str:
    """Returns ``form`` as JSON, on several lines if ``indent`` is not 0."""
    text = msgspec.json.encode(form, enc_hook=float)  # numpy's numbers are floats too
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def check_length(values: Sequence[Any], length: int, at: str, of: str) -> None:
    """Raises :class:`.PlanError` if the list at the path ``at`` does not have one value for each ``of``."""
    if len(values) != length:
        raise PlanError(f"{at} must have {length} values, one for each {of}, not {len(values)}")


def read_latencies(latencies: Iterable[LinkLatency], ranks: int, at: str) -> dict[tuple[int, int], float]:
    """Returns latencies by pair of ranks; raises :class:`.PlanError` for invalid ranks and for duplicate pairs."""
    by_ranks: dict[tuple[int, int], float] = {}
    for index, (source, to, latency) in enumerate(latencies):
        if max(source, to) >= ranks or source == to:
            raise PlanError(f"{at}[{index}] must be between two of {ranks} ranks, not from {source} to {to}")
        if (source, to) in by_ranks:
            raise PlanError(f"{at}[{index}] is from rank {source} to {to}, as one before it is")
        by_ranks[source, to] = latency
    return by_ranks


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def _untyped(text: str) -> Any:
    """Decoded ``text``; None if a number is too large for any form."""
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:
        return None


def _told(error: msgspec.ValidationError, data: Any) -> str:
    """Rewrites msgspec's message: the field first, its value last."""
    said, _, at = str(error).partition(" - at ")
    at = at.replace("`", "") or "$"
    if field := re.search("^Object missing required field `(.*)`", said):
        return f"{at} lacks {field[1]!r}"
    if field := re.search("^Object contains unknown field `(.*)`", said):
        return f"{at} must not have {field[1]!r}"
    if "matching regex" in said:
        return f"{at} must be a text without control characters"
    said = re.sub("`([^`]*)`", lambda types: " or ".join(_WORDS.get(t, t) for t in types[1].split(" | ")), said)
    said = re.sub("^Expected ", "must be ", said).replace(", got ", ", not ")
    if not said.startswith("must be"):
        said = f"is wrong: {said[:1].lower()}{said[1:]}"
    return f"{at} {said}{'' if ', not ' in said else _value(at, data)}"


def _value(at: str, data: Any) -> str:
    """Number at a path in ``data``, as the end of a sentence."""
    try:
        for name, index in _STEP.findall(at):
            data = data[name] if name else data[int(index)]
    except (LookupError, TypeError):
        return ""
    return f", not {data:g}" if isinstance(data, float) else f", not {data}" if isinstance(data, int) else ""
