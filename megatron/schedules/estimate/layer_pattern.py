"""Reads flags that select layers, such as ``--moe-layer-freq``: a number, or a list in Python syntax, without eval."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any

from megatron.schedules.estimate.bounds import MOST_LAYERS

_PATTERN = re.compile(r"[0-9\[\](),+*]+")  # characters that Megatron accepts
_MOST_CHARACTERS = 10 * MOST_LAYERS
EXPRESSION = "a whole number, or a list of zeros and ones such as [0]*1+[1]*31"


def moe_freq_type(text: str) -> int | list[int]:
    """Reads which layers have experts, as Megatron's parser does.

    A number n means every n-th layer, from the first. Otherwise it is a list.
    """
    read = _read(text)
    if isinstance(read, int) and not 1 <= read <= MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{read} is not from 1 to {MOST_LAYERS}")
    return read


def no_rope_freq_type(text: str) -> int | list[int]:
    """Reads which layers have no rotary embeddings."""
    return _read(text)


def la_freq_type(text: str) -> int | list[int]:
    """Reads which layers have linear attention."""
    return _read(text)


def _read(text: str) -> int | list[int]:
    """Reads a number, or a list of zeros and ones.

    Raises:
        ValueError: if ``text`` is no number.
        argparse.ArgumentTypeError: if it is no such list, or a too long one.
    """
    if "[" not in text:
        return int(text)
    wrong = argparse.ArgumentTypeError(f"{text!r} is not {EXPRESSION}")
    if not _PATTERN.fullmatch(text) or len(text) > _MOST_CHARACTERS:
        raise wrong
    try:
        pattern = _value(ast.parse(text, mode="eval").body)
        if not {0, 1}.issuperset(pattern):
            raise wrong
        _check_length(pattern, 1)
    except (SyntaxError, TypeError, RecursionError, MemoryError):
        raise wrong from None
    except OverflowError:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {MOST_LAYERS} layers") from None
    return list(pattern)


def _value(node: ast.expr) -> Any:
    """Evaluates integers and lists, added and multiplied. The text limits the length of a list.

    Raises:
        TypeError: if ``node`` is anything else.
        OverflowError: if a list would be too long.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _value(left), _value(right)
            _check_length(one, other)
            _check_length(other, one)
            return one * other
        case _:
            raise TypeError(f"{type(node).__name__} in a list of layers")


def _check_length(value: Any, times: Any) -> None:
    if isinstance(value, list) and isinstance(times, int) and len(value) * times > MOST_LAYERS:
        raise OverflowError
