"""Reads flags that select layers: ``--hybrid-layer-pattern``, and numbers or lists in Python syntax without eval."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any, NamedTuple

from megatron.schedules.estimate.bounds import MOST_LAYERS
from megatron.schedules.estimate.symbols import SYMBOLS

_PATTERN = re.compile(r"[0-9\[\](),+*]+")  # characters that Megatron accepts
_MOST_CHARACTERS = 10 * MOST_LAYERS
EXPRESSION = "a whole number, or a list of zeros and ones such as [0]*1+[1]*31"


PIPE, AHEAD = "|", "/"
"""What separates the stages of a hybrid model's layers, and its layers from those of multi-token prediction."""


def hybrid_pattern(args: Any) -> str | None:
    """Returns the pattern of a hybrid model's layers in ``args``, validated or not; None for another model."""
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return next((pattern for name in names if (pattern := getattr(args, name, None))), None)


class HybridLayers(NamedTuple):
    """Layers of a hybrid model.

    Args:
        pattern: a symbol for each decoder layer, with ``|`` between stages if it places them.
        ahead: symbols of the parts of each layer of multi-token prediction.
    """

    pattern: str
    ahead: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The symbol of each decoder layer."""
        return tuple(self.pattern.replace(PIPE, ""))


def hybrid_layers(args: Any) -> HybridLayers | None:
    """Returns the layers of the hybrid model in ``args``, validated or not; None for another model."""
    if (written := hybrid_pattern(args)) is None:
        return None
    pattern, *ahead = written.split(AHEAD)
    before = getattr(args, "mtp_hybrid_override_pattern", None)
    if before and not ahead:  # Megatron's flag before 0.18
        ahead = [before] * (getattr(args, "mtp_num_layers", None) or 0)
    return HybridLayers(pattern, tuple(filter(None, ahead)))


def model_layers(args: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the decoder layers and the layers of multi-token prediction in ``args``, as :attr:`.Shape.layers`.

    Raises:
        ValueError: a flag has other layers than the model, or than are known.
    """
    if (hybrid := hybrid_layers(args)) is not None:
        _check_hybrid(hybrid, args)
        return hybrid.layers, hybrid.ahead
    attention = "+" if args.multi_latent_attention else "*"
    frequency, layers = args.moe_layer_freq, args.num_layers
    if not args.num_experts:
        frequency = [False] * layers
    elif isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    if len(frequency) != layers:
        raise ValueError(f"--moe-layer-freq names {len(frequency)} layers and --num-layers {layers}")
    blocks = tuple(f"{attention}{'E' if has_experts else '-'}" for has_experts in frequency)
    return blocks, blocks[-1:] * (args.mtp_num_layers or 0)


def _check_hybrid(hybrid: HybridLayers, args: Any) -> None:
    """Raises ValueError if the pattern has no layers, too many, or unknown ones."""
    said, letters = f"--hybrid-layer-pattern {hybrid.pattern!r}", "".join(hybrid.layers + hybrid.ahead)
    if unknown := [letter for letter in letters if letter not in SYMBOLS]:
        known = ", ".join(f"{letter} ({symbol.name})" for letter, symbol in SYMBOLS.items())
        raise ValueError(f"{said} has {unknown[0]!r}, which is no layer: use {known}, {PIPE} and {AHEAD}")
    if not 1 <= len(hybrid.layers) <= MOST_LAYERS:
        raise ValueError(f"{said[:80]} has {len(hybrid.layers)} layers: give 1 to {MOST_LAYERS}")
    if "E" in letters and not args.num_experts:
        raise ValueError(f"{said} has experts (E): give --num-experts")


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
