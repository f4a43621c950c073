"""Cases of a test that wait for the night."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def by_night(*values: Any) -> ParameterSet:
    """A case that is run at night alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def some_by_night(cases: Iterable[Any], late: Callable[..., bool]) -> list[Any]:
    """Returns ``cases``, those for which ``late`` is true as ones of the night. A case is a tuple, or one value."""
    tuples = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [by_night(*values) if late(*values) else case for case, values in tuples]
