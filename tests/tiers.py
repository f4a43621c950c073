"""Cases of a test that wait for the night."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

ALL_EXAMPLES = 100
"""Examples of hypothesis for a test by night, where it does not say; a part of them by day."""


def by_night(*values: Any) -> ParameterSet:
    """A case that is run at night alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def some_by_night(cases: Iterable[Any], late: Callable[..., bool]) -> list[Any]:
    """Returns ``cases``, those for which ``late`` is true as ones of the night. A case is a tuple, or one value."""
    tuples = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [by_night(*values) if late(*values) else case for case, values in tuples]


def of_which_by_day(cases: Iterable[Any], *early: Any) -> list[Any]:
    """Returns ``cases``, all but those of ``early`` as ones of the night."""
    return some_by_night(cases, lambda *case: (case if len(case) > 1 else case[0]) not in early)
