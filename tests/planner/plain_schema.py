"""The part of JSON Schema that the schema of a plan uses: no library for it is among the test tools."""

import re
from typing import Any

_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
_FOR_PEOPLE = {"$schema", "$defs", "title", "description"}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """Where ``value`` is not as ``schema`` says; a keyword that is not known here raises :class:`KeyError`."""
    found = []
    for keyword, told in schema.items():
        if keyword not in _FOR_PEOPLE:
            found += _CHECKS[keyword](value, told, schema, root, at)
    return found


def _reference(value: Any, told: str, schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    name = told.removeprefix("#/$defs/")
    return faults(value, root["$defs"][name], root, at)


def _type(value: Any, told: str, schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    right = isinstance(value, _TYPES[told]) and (told == "boolean" or not isinstance(value, bool))
    return [] if right else [f"{at}: no {told}"]


def _properties(value: Any, told: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    return [fault for name in told if name in value for fault in faults(value[name], told[name], root, f"{at}.{name}")]


def _closed(value: Any, told: bool, schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    return [] if told else [f"{at}.{name}: unknown" for name in value if name not in schema["properties"]]


def _items(value: Any, told: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    rest = list(enumerate(value))[len(schema.get("prefixItems", ())) :]
    if told is False:
        return [f"{at}[{index}]: too many" for index, _ in rest]
    return [fault for index, each in rest for fault in faults(each, told, root, f"{at}[{index}]")]


def _first_items(value: Any, told: list[Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    pairs = enumerate(zip(value, told, strict=False))
    return [fault for index, (each, of) in pairs for fault in faults(each, of, root, f"{at}[{index}]")]


_CHECKS: dict[str, Any] = {
    "$ref": _reference,
    "type": _type,
    "properties": _properties,
    "additionalProperties": _closed,
    "items": _items,
    "prefixItems": _first_items,
    "required": lambda value, told, schema, root, at: [f"{at} lacks {name}" for name in told if name not in value],
    "minimum": lambda value, told, schema, root, at: [f"{at}: {value}"] * (value < told),
    "maximum": lambda value, told, schema, root, at: [f"{at}: {value}"] * (value > told),
    "minItems": lambda value, told, schema, root, at: [f"{at}: too few"] * (len(value) < told),
    "maxItems": lambda value, told, schema, root, at: [f"{at}: too many"] * (len(value) > told),
    "maxLength": lambda value, told, schema, root, at: [f"{at}: too long"] * (len(value) > told),
    "pattern": lambda value, told, schema, root, at: [] if re.search(told, value) else [f"{at}: no {told}"],
}
