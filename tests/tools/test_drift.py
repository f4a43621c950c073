"""What another version of Megatron changes of what this package relies on: ``python -m tools.drift``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron.schedules.cli.ending import run
from megatron.schedules.integration.touch_points import NEWEST, PATCHED, REPEATED, is_newer
from tools._stock_names import Definition, Sources
from tools._touched import HOOKED, PRIVATE, USED, touches
from tools._touched import PATCHED as PATCHED_KIND
from tools.drift import (
    BODY,
    BROKEN,
    FINGERPRINTS,
    GONE,
    SIGNATURE,
    UNCHANGED,
    fingerprints,
    known_of,
    main,
    rows,
    touched,
)

_FOUND = find_spec("megatron.core")
assert _FOUND is not None
assert _FOUND.origin is not None
INSTALLED = Sources(Path(_FOUND.origin).parents[2])
OURS = """
from megatron.core import hall as rooms
from megatron.core.hall import Door

def _open(stock, session, door, wide):
    return stock(door)

Hook(rooms, "open_door", "to look at it", _open)
rooms.lamp = 3
print(rooms._cellar.size, Door, getattr(rooms, "attic", None))
"""
HALL = """
from megatron.core.doors import *
lamp = 1
class _Cellar:
    pass
_cellar = _Cellar()
def open_door(door, wide):
    '''Opens it.'''
    return door
"""
DOORS = """
class Door:
    width: int = 1
"""


def _sources(folder: Path, hall: str = HALL, doors: str = DOORS) -> Sources:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 7\nPATCH = 1\nPRE_RELEASE = 'rc2'\n")
    (core / "hall.py").write_text(hall)
    (core / "doors.py").write_text(doors)
    return Sources(folder)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    package = tmp_path / "ours"
    package.mkdir()
    (package / "house.py").write_text(OURS)
    return package


def test_every_touch_is_read_from_the_source_with_its_kind_and_place(ours: Path) -> None:
    found = {(touch.name.removeprefix("megatron.core."), touch.kind, touch.where) for touch in touches(ours)}
    assert {
        ("hall", USED, "house.py:2"),
        ("hall.Door", USED, "house.py:3"),
        ("hall.open_door", HOOKED, "house.py:8"),
        ("hall.lamp", PATCHED_KIND, "house.py:9"),
        ("hall._cellar.size", PRIVATE, "house.py:10"),
        ("hall.attic", USED, "house.py:10"),
    } <= found


@pytest.mark.parametrize(
    ("hall", "doors", "name", "state"),
    [
        (HALL.replace("Opens it.", "Opens a door."), DOORS, "hall.open_door", UNCHANGED),
        (HALL.replace("return door", "return door or wide  # as asked"), DOORS, "hall.open_door", BODY),
        (HALL.replace("door, wide)", "door, wide=True)"), DOORS, "hall.open_door", SIGNATURE),
        (HALL.replace("door, wide)", "door, wide, slowly)"), DOORS, "hall.open_door", BROKEN),
        (HALL.replace("door, wide)", "door, wide, *, slowly=False)"), DOORS, "hall.open_door", BROKEN),
        (HALL.replace("open_door", "open_gate"), DOORS, "hall.open_door", GONE),
        (HALL, DOORS.replace("width", "height"), "hall.Door", SIGNATURE),
        (HALL, DOORS.replace("Door", "Gate"), "hall.Door", GONE),
    ],
)
def test_what_changed_is_told_by_how_much_it_matters(
    ours: Path, tmp_path: Path, hall: str, doors: str, name: str, state: str
) -> None:
    names = {touch.name: [touch] for touch in touches(ours)}
    known = fingerprints(names, _sources(tmp_path / "before"), ["megatron.core"])
    after = {row.name: row.state for row in rows(names, _sources(tmp_path / "after", hall, doors), known)}
    assert after.pop(f"megatron.core.{name}") == state
    assert set(after.values()) == {UNCHANGED}


def test_a_new_parameter_of_what_is_repeated_here_does_not_fit() -> None:
    for each in REPEATED:
        found = INSTALLED.parameters(each.name)
        assert found is not None
        assert {argument.arg for argument in (*found.args, *found.kwonlyargs)} <= each.knows


def test_a_patched_attribute_is_there() -> None:
    for each in PATCHED:
        assert INSTALLED.definition(each.name) is not None, each.name


def test_every_touched_name_has_a_fingerprint() -> None:
    """If this fails after an import was added: ``python -m tools.drift DIR --record tools/fingerprints``."""
    if INSTALLED.version != NEWEST:
        pytest.skip(f"fingerprints are of {NEWEST}")
    names = {name: places for name, places in touched().items() if name.startswith("megatron.")}
    found = rows(names, INSTALLED, known_of("megatron-core"))
    assert {row.name: row.state for row in found if row.state != UNCHANGED} == {}
    missing = {name for name in names if INSTALLED.definition(name) is None}
    recorded = set(known_of("megatron-core")["names"])
    assert set(names) - missing == recorded


def test_the_newest_version_is_the_one_that_jobs_are_not_warned_of() -> None:
    assert known_of("megatron-core")["version"] == NEWEST
    assert not is_newer("0.19.9")
    assert is_newer("0.20.0rc1")
    assert is_newer("1.0")


def test_a_version_is_read_from_the_source(tmp_path: Path) -> None:
    assert _sources(tmp_path).version == "0.7.1rc2"
    assert Sources(tmp_path).definition("megatron.core.hall") == Definition("", "")


@pytest.mark.parametrize("what", ["no/such folder", "latest!"])
def test_what_is_no_version_is_refused_in_a_line(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, "drift", [what]) == 2
    assert capsys.readouterr().err == f"drift: {what} is neither a folder nor a version such as 0.19.2\n"


def test_a_folder_without_either_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(main, "drift", [str(tmp_path)]) == 2
    assert "has neither megatron/core nor transformer_engine" in capsys.readouterr().err


def test_a_break_ends_with_1_and_names_where_it_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _sources(tmp_path)  # a Megatron without almost everything
    assert run(main, "drift", [str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "gone:" in said
    assert "integration/core_hooks.py:" in said
    assert json.loads((FINGERPRINTS / f"megatron-core-{NEWEST}.json").read_text())["version"] == NEWEST
