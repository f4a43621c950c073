"""Definitions in the source of another project: their signatures and digests, without importing it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

# Longest chain of imports that is followed to a definition.
_DEEPEST = 20
# Modules that are not Python.
_COMPILED = ("helpers_cpp",)


class Definition(NamedTuple):
    """What a name is.

    Args:
        signature: parameters of a function, fields or parameters of a class, ``""`` for all else.
        digest: of the source without comments, docstrings and layout; ``""`` for a module or what is not seen.
    """

    signature: str
    digest: str


class Sources:
    """The packages in one folder: a checkout, or an unpacked wheel.

    Args:
        root: folder that holds ``megatron/core`` or ``transformer_engine``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module | None] = {}

    def has(self, package: str) -> bool:
        """Returns whether ``package`` is in the folder."""
        return self.root.joinpath(*package.split(".")).is_dir()

    @cached_property
    def version(self) -> str:
        """Version of megatron-core, or of Transformer Engine by the folder of its metadata; ``unknown`` otherwise."""
        if (info := self._tree("megatron.core.package_info")) is not None:
            values = {
                target.id: node.value.value
                for node in info.body
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            parts = [str(values.get(name, "")) for name in ("MAJOR", "MINOR", "PATCH")]
            return ".".join(parts) + str(values.get("PRE_RELEASE", ""))
        metadata = sorted(self.root.glob("transformer_engine-*.dist-info"))
        return metadata[0].name.split("-")[1].removesuffix(".dist") if metadata else "unknown"

    def definition(self, name: str) -> Definition | None:
        """Returns the definition of a dotted name; None if there is none."""
        found = self._find(name, _DEEPEST)
        if isinstance(found, Definition) or found is None:
            return found
        return Definition(_signature(found), _digest(found))

    def parameters(self, name: str) -> ast.arguments | None:
        """Returns the parameters of a function or method; None for all else."""
        found = self._find(name, _DEEPEST)
        return found.args if isinstance(found, ast.FunctionDef) else None

    def fields(self, name: str) -> list[str]:
        """Returns the fields of a dataclass and of its bases, in alphabetical order."""
        return sorted(set(self._fields(name, _DEEPEST)))

    def flags(self, package: str) -> list[str]:
        """Returns all flags that argument parsers in ``package`` declare in so many words, in alphabetical order."""
        found: set[str] = set()
        for file in sorted(self.root.joinpath(*package.split(".")).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                    values = (each.value for each in node.args if isinstance(each, ast.Constant))
                    found.update(str(value) for value in values if str(value).startswith("--"))
        return sorted(found)

    def _fields(self, name: str, deepest: int) -> Iterator[str]:
        found = self._find(name, deepest)
        if isinstance(found, ast.ClassDef) and deepest:
            module = self._module_of(name, deepest)
            for base in found.bases:
                yield from self._fields(f"{module}.{ast.unparse(base)}", deepest - 1)
            yield from (ast.unparse(each.target) for each in found.body if isinstance(each, ast.AnnAssign))

    def _module_of(self, name: str, deepest: int) -> str:
        """Returns the module that defines a class, through imports."""
        module, rest = self._split(name)
        node = _named(self._tree(module), rest[0]) if rest else None
        path = _imports(node, rest[0], module, self._is_package(module)) if rest and deepest else None
        return module if path is None else self._module_of(path, deepest - 1)

    def _find(self, name: str, deepest: int) -> ast.AST | Definition | None:
        module, rest = self._split(name)
        if not module or not deepest:
            return None
        if not rest:
            return Definition("", "")
        if rest[0] in _COMPILED:
            return Definition("", "")
        node = _named(self._tree(module), rest[0])
        if (path := _imports(node, rest[0], module, self._is_package(module))) is not None:
            inside = self.has(path.split(".")[0])
            return self._find(".".join((path, *rest[1:])), deepest - 1) if inside else Definition("", "")
        if node is None:
            paths = (_source(star, module, self._is_package(module)) for star in _stars(self._tree(module)))
            found = (self._find(".".join((path, *rest)), deepest - 1) for path in paths)
            return next((each for each in found if each is not None), None)
        for part in rest[1:]:
            if not isinstance(node, ast.ClassDef):
                return Definition("", "") if node is not None else None  # an attribute of an object
            inner = _named(node, part)
            if inner is None:
                bases = (self._find(f"{module}.{ast.unparse(base)}.{part}", deepest - 1) for base in node.bases)
                inner_or_base = next((base for base in bases if base is not None), None)
                return inner_or_base or (Definition("", "") if part in _own_attributes(node) else None)
            node = inner
        return node

    def _split(self, name: str) -> tuple[str, list[str]]:
        """Splits a dotted name into the longest module and the rest."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            path = self.root.joinpath(*parts[:count])
            if path.is_dir() or path.with_suffix(".py").is_file():
                return ".".join(parts[:count]), parts[count:]
        return "", parts

    def _is_package(self, module: str) -> bool:
        return self.root.joinpath(*module.split(".")).is_dir()

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self.root.joinpath(*module.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._trees[module] = ast.parse(file.read_text()) if file.is_file() else None
        return self._trees[module]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements, those within ``if``, ``try`` and ``with`` too."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _named(within: ast.Module | ast.ClassDef | None, name: str) -> ast.AST | None:
    """Returns the first statement that binds ``name``."""
    for node in _statements(within.body) if within else ():
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name == name:
                return node
            case ast.Import() | ast.ImportFrom():
                if any((each.asname or each.name.split(".")[0]) == name for each in node.names):
                    return node
            case ast.Assign(targets=targets) if name in map(ast.unparse, targets):
                return node
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                return node
    return None


def _stars(within: ast.Module | None) -> Iterator[ast.ImportFrom]:
    """Yields the imports of all names of a module."""
    for node in _statements(within.body) if within else ():
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield node


def _imports(node: ast.AST | None, name: str, module: str, is_package: bool) -> str | None:
    """Returns the dotted path that an import statement binds to ``name``; None for another statement."""
    match node:
        case ast.Import(names=names):
            return next(each.name for each in names if (each.asname or each.name.split(".")[0]) == name)
        case ast.ImportFrom(names=names):
            original = next(each.name for each in names if (each.asname or each.name) == name)
            return f"{_source(node, module, is_package)}.{original}"
    return None


def _source(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Returns the module that ``from ... import`` in ``module`` names."""
    up = module.split(".")
    up = up[: len(up) - node.level + is_package] if node.level else []
    return ".".join((*up, *([node.module] if node.module else [])))


def _own_attributes(node: ast.ClassDef) -> set[str]:
    """Names of the attributes that methods of a class set on ``self``."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def _signature(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return f"({ast.unparse(node.args)})"
        case ast.ClassDef():
            begins = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
            fields = ", ".join(ast.unparse(each) for each in node.body if isinstance(each, ast.AnnAssign))
            return _signature(begins) if begins else f"({fields})"
    return ""


def _digest(node: ast.AST) -> str:
    """Returns a digest of the code. Comments, docstrings and layout do not count."""
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(each):
            each.body = each.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(node).encode()).hexdigest()[:16]
