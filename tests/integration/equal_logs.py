"""What two jobs logged, and what became of their weights, is the same."""

from __future__ import annotations

import math

import torch

from tests import tolerances
from tests.integration.results import Logged


def differences(ours: Logged, stock: Logged, norms: float = tolerances.SAME_KERNELS) -> list[str]:
    """A line for each number that is not the same to the bit.

    Norms add the parts of ranks that hold other layers: those of one job may be ``norms`` from the other's, relatively.
    """
    found = [f"only one logs {name}" for name in sorted({key[0] for key in ours.scalars.keys() ^ stock.scalars.keys()})]
    for (name, step), value in stock.scalars.items():
        mine = ours.scalars.get((name, step), value)
        near = norms if name.endswith("norm") else 0.0
        if not (math.isclose(mine, value, rel_tol=near) or (math.isnan(mine) and math.isnan(value))):
            found.append(f"{name} of iteration {step}: {mine!r}, not {value!r}")
    for what in ("gradients", "weights"):
        mine_by_name, by_name = getattr(ours, what), getattr(stock, what)
        found += [f"only one has {what} of {key}" for key in mine_by_name.keys() ^ by_name.keys()]
        both = mine_by_name.keys() & by_name.keys()
        found += [f"{what} of {key}" for key in both if not _equal(mine_by_name[key], by_name[key])]
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    numbers = torch.equal(one.nan_to_num(), other.nan_to_num())
    return numbers and torch.equal(one.isnan(), other.isnan())
