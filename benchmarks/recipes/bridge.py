"""Recipes of Megatron-Bridge, called where only its wheel, transformers and megatron-core are installed."""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import pkgutil
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.schedules.utils.errors import PlanError

_PACKAGE = "megatron.bridge"
_RECIPES = f"{_PACKAGE}.perf_recipes"
# Number and name of the GPUs in a recipe's name.
NAME = re.compile(r"_(?P<gpus>\d+)gpu_(?P<device>[a-z]+\d+)_")
# Settings of the models on Hugging Face that recipes name, where they differ from the defaults of transformers.
MODELS = Path(__file__).with_name("models.json")


def recipes(folder: Path) -> dict[str, Callable[[], Any]]:
    """Returns the performance recipes of Megatron-Bridge by name; each returns a ``ConfigContainer``.

    Args:
        folder: the unpacked wheel of megatron-bridge.

    Raises:
        PlanError: Megatron-Bridge cannot be imported from there.
    """
    if not (folder / "megatron" / "bridge" / "perf_recipes").is_dir():
        raise PlanError(f"{folder} has no megatron/bridge/perf_recipes: unpack the wheel of megatron-bridge there")
    sys.path.insert(0, str(folder))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.meta_path.append(_Absent())
    try:
        importlib.import_module(_PACKAGE)
        package = importlib.import_module(_RECIPES)
        modules = [
            importlib.import_module(each.name) for each in pkgutil.walk_packages(package.__path__, f"{_RECIPES}.")
        ]
    except ImportError as error:
        raise PlanError(f"cannot import Megatron-Bridge from {folder}: {error}") from None
    return {
        name: value
        for module in modules
        for name, value in sorted(vars(module).items())
        if name.endswith("_config") and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


def gpus_of(name: str) -> tuple[int, str]:
    """Returns the number of GPUs in the name of a recipe, and what they are.

    Raises:
        PlanError: it names none.
    """
    named = NAME.search(name)
    if named is None:
        raise PlanError(f"{name} names no GPUs, as in _64gpu_h100_", "recipe")
    return int(named["gpus"]), named["device"].upper()


def called(recipe: Callable[[], Any]) -> Any:
    """Returns the ``ConfigContainer`` of a recipe. Models in :data:`MODELS` are not downloaded from Hugging Face."""
    transformers: Any = importlib.import_module("transformers")
    models = json.loads(MODELS.read_text())
    stock = transformers.AutoConfig.from_pretrained

    def read(name: Any, *args: Any, **kwargs: Any) -> Any:
        if str(name) not in models:
            return stock(name, *args, **kwargs)
        found = dict(models[str(name)])
        return transformers.AutoConfig.for_model(found.pop("model_type"), **found)

    transformers.AutoConfig.from_pretrained = read
    try:
        config = recipe()
    finally:
        transformers.AutoConfig.from_pretrained = stock
    if isinstance(config.mixed_precision, str):
        precision: Any = importlib.import_module(f"{_PACKAGE}.training.mixed_precision")
        config.mixed_precision = precision.get_mixed_precision_config(config.mixed_precision)
    return config


class _Anything(abc.ABCMeta):
    """Class of the names in a module that is not installed. It can be inherited from, called and used to decorate."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _empty(name)


def _empty(name: str) -> _Anything:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    return _Anything(name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": called})


class _Module(types.ModuleType):
    """A module that is not installed; it has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(self, name, _empty(name))
        return vars(self)[name]


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what Megatron-Bridge imports and is not installed, such as Transformer Engine. Its recipes call none of it.

    What Bridge itself can do without it asks for through its ``import_utils``; that stays absent.
    """

    def __init__(self) -> None:
        self._found: set[str] = set()

    def find_spec(
        self, name: str, path: Any = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds ``name`` if Bridge imports it, or a module that Bridge imported is its parent."""
        inside = any(name.startswith(f"{each}.") for each in self._found)
        if name.startswith(f"{_PACKAGE}.") or not (inside or _imported_by_bridge()):
            return None
        self._found.add(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Returns an empty module."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs nothing."""


def _imported_by_bridge() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.startswith(_PACKAGE) and name != f"{_PACKAGE}.utils.import_utils"
