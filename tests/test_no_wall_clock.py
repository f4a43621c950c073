"""No test asserts how long something took: a machine with other work to do takes longer."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
# Limits on what would otherwise hang: a file, and how many asserts of it are such.
LIMITS = {
    "waiting.py": 1,
    "examples/test_real_slurm.py": 1,
    "integration/test_main_program.py": 1,
}


def asserted_times(text: str) -> list[int]:
    """Lines of asserts that compare what a clock says, or a variable of the same function that was made of it."""
    found: set[int] = set()
    if "time." not in text:  # reading it takes long
        return []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        timed: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _told_by_a_clock(node.value, set()):
                timed |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        found |= {
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Assert)
            and isinstance(node.test, ast.Compare)
            and _told_by_a_clock(node.test, timed)
        }
    return sorted(found)


def _told_by_a_clock(node: ast.AST, timed: set[str]) -> bool:
    return any(
        (isinstance(each, ast.Name) and each.id in timed)
        or (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr in CLOCKS
            and isinstance(each.func.value, ast.Name)
            and each.func.value.id == "time"
        )
        for each in ast.walk(node)
    )


def test_a_time_that_is_asserted_is_found() -> None:
    text = """
def test_it():
    begun = time.monotonic()
    run()
    took = time.monotonic() - begun
    assert took < 0.02
    assert time.perf_counter() - begun == approx(3)
    assert found == 3
"""
    assert asserted_times(text) == [6, 7]


def test_no_test_asserts_a_wall_clock_time() -> None:
    found = {
        str(path.relative_to(TESTS)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if (lines := asserted_times(path.read_text()))
    }
    allowed = {name: lines for name, lines in found.items() if len(lines) <= LIMITS.get(name, 0)}
    assert found == allowed, "give a clock to what is tested, or assert order and counts (tests/waiting.py)"
