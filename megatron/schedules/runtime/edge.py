"""Where a stage's backward starts, once its output has been sent and is held no more."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def edge_of(output: Tensor) -> GradientEdge:
    """Where a backward from ``output`` starts: it keeps the graph alive, and not the output.

    It is that of a view, whose node is torch's own. Of the node of an autograd Function in Python, which may well be a
    stage's last step, an edge holds Python's half up to torch 2.8; the other half goes with the output, and the process
    with the backward.
    """
    return get_gradient_edge(output.view_as(output))
