"""Which layers a flag such as ``--moe-layer-freq`` picks: a number or a list as Python writes it, read without eval."""

from __future__ import annotations

import argparse
import ast
import re

from megatron.schedules.estimate.bounds import MOST_LAYERS

_PATTERN = re.compile(r"[0-9\[\](),+*]+")  # what Megatron lets through
_MOST_CHARACTERS = 10 * MOST_LAYERS
EXPRESSION = "a whole number, or a list of zeros and ones such as [0]*1+[1]*31"


def moe_freq_type(text: str) -> int | list[int]:
    """Which layers have experts, as Megatron's parser takes it: one of so many from the first on, or a list."""
    found = _read(text)
    if isinstance(found, int) and not 1 <= found <= MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{found} is not from 1 to {MOST_LAYERS}")
    return found


def no_rope_freq_type(text: str) -> int | list[int]:
    """Which layers go without rotary embeddings."""
    return _read(text)


def la_freq_type(text: str) -> int | list[int]:
    """Which layers have linear attention."""
    return _read(text)


def _read(text: str) -> int | list[int]:
    """The number or the list of zeros and ones that ``text`` is.

    Raises:
        ValueError: where it is no number.
        argparse.ArgumentTypeError: where it is no such list, or too long.
    """
    if "[" not in text:
        return int(text)
    wrong = argparse.ArgumentTypeError(f"{text!r} is not {EXPRESSION}")
    if not _PATTERN.fullmatch(text) or len(text) > _MOST_CHARACTERS:
        raise wrong
    try:
        found = _value(ast.parse(text, mode="eval").body)
    except _TooLargeError:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {MOST_LAYERS} layers") from None
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise wrong from None
    if not isinstance(found, list) or not {0, 1}.issuperset(found):
        raise wrong
    return found


class _TooLargeError(Exception):
    """A number or a list is larger than a list of layers can be."""


def _value(node: ast.expr) -> int | list[int]:
    """What ``node`` comes to, nothing on the way being larger than a list of layers may be.

    Raises:
        TypeError: where it is neither whole numbers, nor lists of them, added and multiplied.
    """
    match node:
        case ast.Constant(value=int(number)):
            return _fitting(number, number)
        case ast.List(elts=elements):
            numbers = [each for each in map(_value, elements) if isinstance(each, int)]
            if len(numbers) < len(elements):
                raise TypeError("a list in a list")
            return numbers
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _sum(_value(left), _value(right))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _product(_value(left), _value(right))
        case _:
            raise TypeError(f"{type(node).__name__} in a list of layers")


def _sum(one: int | list[int], other: int | list[int]) -> int | list[int]:
    if isinstance(one, int) and isinstance(other, int):
        return _fitting(one + other, one + other)
    if isinstance(one, list) and isinstance(other, list):
        _fitting(0, len(one) + len(other))
        return one + other
    raise TypeError("a number added to a list")


def _product(one: int | list[int], other: int | list[int]) -> int | list[int]:
    if isinstance(one, int) and isinstance(other, int):
        return _fitting(one * other, one * other)
    if isinstance(one, int):
        one, other = other, one
    if isinstance(one, int) or isinstance(other, list):
        raise TypeError("a list times a list")
    _fitting(0, len(one) * other)
    return one * other


def _fitting(value: int, size: int) -> int:
    if size > MOST_LAYERS:
        raise _TooLargeError
    return value
