"""Modules in the place of packages that cannot be installed: each name in them is an empty class."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Nothing:
    """Takes all arguments, also as a decorator, and does nothing."""

    def __init__(self, *args: Any, **named: Any) -> None: ...

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self


class _Module(ModuleType):
    """Has every name that is asked for."""

    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``packages`` and whatever is in them.

    Args:
        packages: their names, such as ``nvidia_resiliency_ext`` or ``torch.cuda.nothing``.
    """

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == each or fullname.startswith(f"{each}.") for each in self._packages):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...

    def __enter__(self) -> None:
        sys.meta_path.append(self)

    def __exit__(self, *args: object) -> None:
        sys.meta_path.remove(self)
