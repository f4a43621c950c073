"""For every test: how much is run, and a folder of its own for plans, so that the user's is neither read nor filled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.schedules.planning.store import FOLDER_VARIABLE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-matrix", action="store_true", help="Every setting under every schedule, not a chosen few.")


@pytest.fixture(scope="session")
def full_matrix(request: pytest.FixtureRequest) -> bool:
    """Whether every setting is to be run under every schedule."""
    return bool(request.config.getoption("--full-matrix"))


@pytest.fixture(scope="session", autouse=True)
def _plans_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("plans")))
        yield
