"""For every test: when it is run, and a folder of its own for plans and compiled code, not the user's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

from megatron.schedules.utils.private_folder import COMPILED, PLANS_VARIABLE, private_folder
from tests.tiers import ALL_EXAMPLES

TIERS = ("pure", "job", "nightly")
# Fixtures with which a test asks for ranks of Megatron's.
_RANKS = {"megatron", "te"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="The tests of the night too: every setting, each schedule.")
    parser.addoption("--try-on-cpu", action="store_true", help="The GPU tests alone, with tiny models on the CPU.")
    parser.addoption("--features-to", metavar="FILE", help="Write which test shows which feature, and its outcome.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test one of the tiers as a mark, and leaves out those of the night unless they are asked for.

    Where GPU tests are tried on a CPU, all others are left out.
    """
    left_out = []
    for item in list(items):
        tier = tier_of(item)
        item.add_marker(tier)
        by_night = tier == "nightly" and not config.getoption("--nightly")
        others = item.get_closest_marker("another_model") is not None and not _chosen(item)
        if by_night or others or (config.getoption("--try-on-cpu") and not item.get_closest_marker("gpu")):
            items.remove(item)
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)


def _chosen(item: pytest.Item) -> bool:
    """Whether another model has the test: under the mark's schedules, and each feature under one more.

    The name of the feature decides which, so that every schedule meets some features.
    """
    mark: Any = item.get_closest_marker("another_model")
    _, *usual = mark.args
    rest = [schedule for schedule in mark.kwargs["one_more_of"] if schedule not in usual]
    return any(schedule in (*usual, rest[crc32(feature.encode()) % len(rest)]) for feature, schedule, _ in _shown(item))


def tier_of(item: pytest.Item) -> str:
    """The tier of a test: as its case is marked, else itself, else its file. Whole jobs without a mark run at night.

    So do tests that another file has, with another model.
    """
    if item.get_closest_marker("another_model"):
        return "nightly"
    case: Any = getattr(item, "callspec", None)
    marked = (mark.name for mark in (*(case.marks if case else ()), *item.iter_markers()) if mark.name in TIERS)
    fixtures = set(getattr(item, "fixturenames", ())).difference(case.params if case else ())
    return next(marked, "pure" if _RANKS.isdisjoint(fixtures) else "nightly")


def _shown(item: pytest.Item) -> Iterator[tuple[str, str, str]]:
    """Features that a test shows, each with the schedule and the model; the model is "GPT" where no mark names one."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    another = item.get_closest_marker("another_model")
    model = "GPT" if another is None else another.args[0]
    for mark in item.iter_markers("feature"):
        feature, schedule = (*mark.args, parameters.get("schedule"))[:2]
        yield feature, schedule, mark.kwargs.get("model", model)


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("day", max_examples=ALL_EXAMPLES // 3)
    settings.load_profile("default" if config.getoption("--nightly") else "day")
    if config.getoption("--features-to"):
        config.pluginmanager.register(_Features(Path(config.getoption("--features-to"))))


class _Features:
    """Notes what each test with the mark ``feature`` shows: feature, schedule, model, and how it went."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for feature, schedule, model in _shown(item):
                self._found[item.nodeid] = {
                    "feature": feature,
                    "schedule": schedule,
                    "model": model,
                    "test": item.nodeid,
                }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._found.get(report.nodeid)
        if found is not None and (report.when == "call" or report.outcome != "passed"):
            found["outcome"] = report.outcome
            found |= dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(list(self._found.values()), indent=1) + "\n")


@pytest.fixture(scope="session", autouse=True)
def _plans_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans are made anew in each session. Code is compiled once for all: that takes half a minute."""
    own, kept = tmp_path_factory.mktemp("plans"), private_folder()
    if kept:
        (kept / COMPILED).mkdir(mode=0o700, exist_ok=True)
        (own / COMPILED).symlink_to(kept / COMPILED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLANS_VARIABLE, str(own))
        yield
