"""For every test: how much is run, and a folder of its own for plans, so that the user's is neither read nor filled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.schedules.planning.store import FOLDER_VARIABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-matrix", action="store_true", help="Every setting under every schedule, not a chosen few.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is run only when the whole matrix is asked for."""
    if not config.getoption("--full-matrix"):
        left_out = [item for item in items if item.get_closest_marker("full_matrix")]
        items[:] = [item for item in items if not item.get_closest_marker("full_matrix")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def _plans_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("plans")))
        yield
