"""Names of Megatron and Transformer Engine that this package touches, read from its own source.

Nothing is imported. A name is a dotted path, such as ``megatron.core.pipeline_parallel.schedules.backward_step``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# How names are touched, the strongest dependence first.
HOOKED, PATCHED, REPEATED_KIND, PRIVATE, USED = "hooked", "patched", "repeated", "private", "used"
KINDS = (HOOKED, PATCHED, REPEATED_KIND, PRIVATE, USED)

_OTHERS = re.compile(r"(megatron\.(core|training)|transformer_engine)(\.[A-Za-z_]\w*)*")


class Accepts(NamedTuple):
    """Parameters that a function of ours accepts when it is called in place of stock's.

    Args:
        positional: number of its positional parameters; None for any number.
        names: names that can be given as keywords; None for any.
    """

    positional: int | None
    names: frozenset[str] | None


class Touch(NamedTuple):
    """A place that touches a name.

    Args:
        name: dotted path of the name.
        kind: one of :data:`KINDS`.
        where: file in the package, with the line.
        accepts: of a hooked function what its replacement accepts, if that is a plain function.
    """

    name: str
    kind: str
    where: str
    accepts: Accepts | None = None


def touches(package: Path) -> list[Touch]:
    """Returns all touches of the Python files under ``package``, in the order of files and lines."""
    found: list[Touch] = []
    for file in sorted(package.rglob("*.py")):
        found += _File(ast.parse(file.read_text()), file.relative_to(package)).touches()
    return found


class _File:
    """One source file."""

    def __init__(self, tree: ast.Module, path: Path) -> None:
        self._tree, self._path = tree, path
        self._functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        # "import a.b" binds a, "import a.b as c" binds a.b.
        self._aliases = {name: name if name == path.split(".")[0] else path for name, path, _ in _imported(tree)}

    def touches(self) -> Iterator[Touch]:
        for _, path, node in _imported(self._tree):
            yield self._touch(path, node)
        inner = {
            id(node.value)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
        }
        for node in ast.walk(self._tree):
            match node:
                case ast.Attribute(ctx=context) if id(node) not in inner and (name := self._name(node)):
                    yield self._touch(name, node, PATCHED if isinstance(context, ast.Store) else None)
                case ast.Call(func=ast.Name("Hook"), args=[owner, ast.Constant(str(name)), _, replacement]):
                    if of := self._name(owner):
                        yield self._touch(f"{of}.{name}", node, HOOKED)._replace(accepts=self._accepts(replacement))
                case ast.Call(func=ast.Name(function), args=[owner, ast.Constant(str(name)), *_]):
                    if function in ("getattr", "hasattr", "setattr") and (of := self._name(owner)):
                        yield self._touch(f"{of}.{name}", node, PATCHED if function == "setattr" else None)
                case ast.Constant(str(text)) if "." in text and _OTHERS.fullmatch(text):
                    yield self._touch(text, node)

    def _touch(self, name: str, node: ast.AST, kind: str | None = None) -> Touch:
        private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        line = getattr(node, "lineno", 0)
        return Touch(name, kind or (PRIVATE if private else USED), f"{self._path}:{line}")

    def _name(self, node: ast.AST) -> str | None:
        """Returns the dotted path of an expression such as ``schedules.backward_step``; None for any other."""
        match node:
            case ast.Name(id=name):
                return self._aliases.get(name)
            case ast.Attribute(value=owner, attr=name):
                of = self._name(owner)
                return of and f"{of}.{name}"
        return None

    def _accepts(self, replacement: ast.AST) -> Accepts | None:
        function = self._functions.get(replacement.id) if isinstance(replacement, ast.Name) else None
        if function is None:
            return None
        own = function.args
        named = [each.arg for each in (*own.posonlyargs, *own.args)][2:]  # after stock and session
        keywords = frozenset((*named, *(each.arg for each in own.kwonlyargs)))
        return Accepts(None if own.vararg else len(named), None if own.kwarg else keywords)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str, ast.AST]]:
    """Yields each name that is imported from the other projects, with its dotted path and the statement."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            pairs = [(each.asname or each.name.split(".")[0], each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(each.asname or each.name, f"{node.module}.{each.name}") for each in node.names]
        yield from ((name, path, node) for name, path in pairs if _OTHERS.fullmatch(path))


def by_name(found: list[Touch]) -> Mapping[str, list[Touch]]:
    """Returns the touches of each name, names in alphabetical order."""
    names: dict[str, list[Touch]] = {}
    for touch in sorted(found):
        names.setdefault(touch.name, []).append(touch)
    return names
