"""JSON files that people give: each is read into a typed form, or refused in one line that names file and field.

A form is a class of :mod:`msgspec` that says what a file holds: names, types and bounds. The same class writes it.
What no single field can say, such as how long lists must be, the reader of the form checks and tells with
:class:`.PlanError`, the field's path first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from megatron.schedules.utils.errors import PlanError
from megatron.schedules.utils.parsing import read_text

# No iteration takes 30,000 years and no memory holds a petabyte, whatever the unit. Sums, products and quotients of
# such numbers stay far from what a float can hold, so whatever is read can also be planned for and drawn.
MOST = 1e15
LEAST = 1e-15
_LARGEST = 10**12
_LONGEST_NAME = 1000

Amount = Annotated[float, Meta(ge=0, le=MOST)]
"""A time or a size that may be zero."""
Positive = Annotated[float, Meta(ge=LEAST, le=MOST)]
"""A time or a rate that may not."""
Portion = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=_LARGEST)]
Index = Annotated[int, Meta(ge=0, le=_LARGEST)]
# What XML cannot hold cannot be drawn. It ends as both Python and the readers of JSON Schemas understand.
Name = Annotated[str, Meta(max_length=_LONGEST_NAME, pattern=r"^[^\x00-\x1f\x7f-\x9f\ufffe\uffff]*(?![\s\S])")]
Amounts = tuple[Amount, ...]
Hop = tuple[Index, Index, Amount]
"""From rank, to rank, and the latency of a message."""


class Form(Struct, frozen=True, kw_only=True):
    """What a JSON object holds. Fields that are UNSET are left out; fields of other names are passed over."""


class _Version(Form, frozen=True, kw_only=True):
    version: int


def read_file[Made](path: Path, about: str | None, what: str, writers: str, made: Callable[[str], Made]) -> Made:
    """What ``made`` makes of the text of the file ``path``.

    Args:
        path: of the file.
        about: the flag that names it, see :class:`.PlanError`.
        what: it should be.
        writers: what to say of who writes such files.
        made: reads the text, and raises :class:`.PlanError` that begins with the field that is wrong.

    Raises:
        PlanError: in one line, which field of the file is wrong, or why it cannot be read.
    """
    text = read_text(path, about)
    try:
        return made(text)
    except PlanError as error:
        raise PlanError(f"{path} is no {what}: {error}; {writers}", about) from None


def check_version(text: str, *known: int) -> int:
    """The version of a file, looked at before anything else; raises :class:`.PlanError` for another than the known."""
    found = decode(text, _Version).version
    if found not in known:
        raise PlanError(f"$.version is version {found}, and {' or '.join(map(str, known))} is read here")
    return found


def decode[Read](text: str, form: type[Read]) -> Read:
    """``text`` as a ``form``.

    Raises:
        PlanError: the path of the first field that is wrong, and what it must be.
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
    """What JSON was made of, as a ``form``; raises :class:`.PlanError` as :func:`decode` does."""
    try:
        return msgspec.convert(data, form)
    except msgspec.ValidationError as error:
        raise PlanError(_told(error, data)) from None
    except RecursionError:
        raise PlanError("lists are nested too deeply") from None


def encode(form: Any, indent: int = 0) -> str:
    """``form`` as JSON, in lines where an ``indent`` is given."""
    text = msgspec.json.encode(form, enc_hook=float)  # numpy's numbers are floats too
    return (msgspec.json.format(text, indent=indent) if indent else text).decode()


def check_length(values: Sequence[Any], length: int, at: str, of: str) -> None:
    """Raise :class:`.PlanError` where the list at ``at`` has not one value for each ``of``."""
    if len(values) != length:
        raise PlanError(f"{at} must have {length} values, one for each {of}, not {len(values)}")


def read_latencies(latencies: Iterable[Hop], ranks: int, at: str) -> dict[tuple[int, int], float]:
    """Latencies by pair of ranks; raises :class:`.PlanError` for other ranks, and for a pair that comes twice."""
    found: dict[tuple[int, int], float] = {}
    for index, (source, to, latency) in enumerate(latencies):
        if max(source, to) >= ranks or source == to:
            raise PlanError(f"{at}[{index}] must be between two of {ranks} ranks, not from {source} to {to}")
        if (source, to) in found:
            raise PlanError(f"{at}[{index}] is from rank {source} to {to}, as one before it is")
        found[source, to] = latency
    return found


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
    """All that ``text`` holds; nothing where a number is too large for any form."""
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:
        return None


def _told(error: msgspec.ValidationError, data: Any) -> str:
    """msgspec's message, the field first and its value last."""
    said, _, at = str(error).partition(" - at ")
    at = at.replace("`", "") or "$"
    if found := re.search("^Object missing required field `(.*)`", said):
        return f"{at} lacks {found[1]!r}"
    if found := re.search("^Object contains unknown field `(.*)`", said):
        return f"{at} must not have {found[1]!r}"
    if "matching regex" in said:
        return f"{at} must be a text without control characters"
    said = re.sub("`([^`]*)`", lambda types: " or ".join(_WORDS.get(t, t) for t in types[1].split(" | ")), said)
    said = re.sub("^Expected ", "must be ", said).replace(", got ", ", not ")
    if not said.startswith("must be"):
        said = f"is wrong: {said[:1].lower()}{said[1:]}"
    return f"{at} {said}{'' if ', not ' in said else _value(at, data)}"


def _value(at: str, data: Any) -> str:
    """The number at a path in ``data``, as words that end a sentence."""
    try:
        for name, index in _STEP.findall(at):
            data = data[name] if name else data[int(index)]
    except (LookupError, TypeError):
        return ""
    return f", not {data:g}" if isinstance(data, float) else f", not {data}" if isinstance(data, int) else ""
