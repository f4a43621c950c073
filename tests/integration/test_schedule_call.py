"""A call that brings other groups or messages than the plan's is refused, before anything runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

from megatron.schedules.integration.schedule_call import check_groups

pytestmark = pytest.mark.pure
RANKS = {"own": [0, 1], "equal": [0, 1], "other": [2, 3]}


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", RANKS.__getitem__)


def collection(**groups: Any) -> ProcessGroupCollection:
    made = ProcessGroupCollection()
    for name, group in groups.items():
        setattr(made, name, group)
    return made


@pytest.mark.parametrize(
    ("communicator", "groups"),
    [
        (None, None),
        (SimpleNamespace(pp_group="own"), collection(tp="t", pp="own")),
        (SimpleNamespace(pp_group="equal"), collection(tp="t", pp="equal")),
        (None, collection(tp="t", cp="c")),
    ],
)
def test_the_pipeline_of_the_plan_is_taken_in_any_form(communicator: Any, groups: Any) -> None:
    check_groups("own", communicator, groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("communicator", "groups"),
    [
        (SimpleNamespace(pp_group="other"), None),
        (None, collection(tp="t", pp="other")),
        (SimpleNamespace(dest_ranks=[2]), None),
        (None, MultiModuleProcessGroupCollection({"llm": collection(tp="t", pp="own")}, "llm")),
    ],
)
def test_another_pipeline_or_several_modules_are_refused(communicator: Any, groups: Any) -> None:
    with pytest.raises(ValueError, match=r"of another pipeline .* need Megatron's own schedule"):
        check_groups("own", communicator, groups)  # type: ignore[arg-type]
