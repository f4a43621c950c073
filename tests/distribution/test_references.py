"""What docstrings and comments refer to by ``:func:`` and the like is there; read from the source, nothing imported."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("megatron/schedules", "benchmarks", "tests", "tools", "scripts")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}
REFERENCE = re.compile(r":(mod|func|class|data|meth|attr|exc):`([^`]+)`")


def names(body: list[ast.stmt], within: str) -> Iterator[tuple[str, str]]:
    """What ``body`` defines: a role that refers to it, and its dotted name."""
    for found in body:
        match found:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield "func", f"{within}.{found.name}"
                attributes = (each for each in ast.walk(found) if isinstance(each, ast.Attribute))
                yield from (("data", f"{within}.{each.attr}") for each in attributes if isinstance(each.ctx, ast.Store))
                yield from names(found.body, f"{within}.{found.name}")
            case ast.ClassDef():
                yield "class", f"{within}.{found.name}"
                yield from names(found.body, f"{within}.{found.name}")
            case ast.Assign():
                every = (each for to in found.targets for each in ast.walk(to))
                yield from (("data", f"{within}.{each.id}") for each in every if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
                yield "data", f"{within}.{name}"
            case ast.Import() | ast.ImportFrom():
                yield from (("import", f"{within}.{each.asname or each.name}") for each in found.names)
            case ast.If():
                yield from names(found.body + found.orelse, within)


SOURCES = {module: path.read_text() for module, path in FILES.items()}
DEFINED = {module: {*names(ast.parse(text).body, module)} for module, text in SOURCES.items()}
EVERYTHING = {("mod", module) for module in FILES}.union(*DEFINED.values())
# What comes after any dot of them: ``.kinds.Kind.F``, ``.Kind.F`` and ``.F`` of ``a.kinds.Kind.F``.
ENDINGS = {(role, name[at.start() :]) for role, name in EVERYTHING for at in re.finditer(r"\.", name)}
# What each role may refer to. A property is a function, and classes and methods may be made by a call.
ROLES = {
    "mod": {"mod"},
    "func": {"func"},
    "meth": {"func", "data"},
    "class": {"class", "data"},
    "exc": {"class"},
    "data": {"data"},
    "attr": {"data", "func"},
}


def resolves(role: str, reference: str, module: str) -> bool:
    """Whether ``reference`` in ``module`` is a name there is.

    With a dot in front it is the end of any name, as Sphinx reads it; else a name of its module or of what that
    imports, a whole one, a builtin's, or another package's.
    """
    first = reference.partition(".")[0]
    if reference.startswith("."):
        return any((each, reference) in ENDINGS for each in ROLES[role])
    if any((each, reference) in EVERYTHING for each in ROLES[role]) or hasattr(builtins, reference):
        return True
    if any(found in ROLES[role] and name.endswith(f".{reference}") for found, name in DEFINED[module]):
        return True
    if ("import", f"{module}.{first}") in DEFINED[module] and any(
        (each, f".{reference}") in ENDINGS for each in ROLES[role]
    ):
        return True
    return first not in ("benchmarks", "megatron", "tests", "tools") and importlib.util.find_spec(first) is not None


@pytest.mark.parametrize("module", [module for module, text in SOURCES.items() if REFERENCE.search(text)])
def test_what_is_referred_to_is_there(module: str) -> None:
    references = REFERENCE.findall(SOURCES[module])
    assert [reference for role, reference in references if not resolves(role, reference, module)] == []


@pytest.mark.parametrize(
    ("role", "reference", "there"),
    [
        ("class", ".kinds.Kind", True),
        ("attr", ".kinds.Kind.F", True),
        ("class", ".Kind", True),
        ("attr", "KindProperties.parts", True),
        ("func", "stages_doing", True),
        ("mod", "megatron.schedules.schedule.kinds", True),
        ("mod", ".kinds", True),
        ("attr", "Placement.rank_of", True),
        ("func", "time.monotonic", True),
        ("class", ".kind.Kind", False),
        ("class", "..kinds.Kind", False),
        ("attr", "KindProperties.part", False),
        ("attr", "Placement.rank", False),
        ("func", "simulate", False),
        ("func", "KINDS", False),
        ("mod", ".place", False),
        ("mod", "megatron.schedules.kinds", False),
    ],
)
def test_a_reference_is_looked_up_from_its_module(role: str, reference: str, there: bool) -> None:
    assert resolves(role, reference, "megatron.schedules.schedule.kinds") is there


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith("tests.gpu")])
def test_gpu_tests_import_what_exists(module: str):
    """They run on few machines, so a name that has moved would be missed."""
    imports = [node for node in ast.walk(ast.parse(SOURCES[module])) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.level == 0 and (node.module or "").split(".")[0] in ("tests", "tools")]
    ours += [node for node in imports if (node.module or "").startswith("megatron.schedules")]
    wanted = {f"{node.module}.{alias.name}" for node in ours for alias in node.names}
    assert wanted <= {name for _, name in EVERYTHING}
