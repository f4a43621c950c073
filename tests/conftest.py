"""For every test: nothing is read from, and nothing left in, the folder where the user's own plans are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.schedules.planning.store import FOLDER_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def _plans_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("plans")))
        yield
