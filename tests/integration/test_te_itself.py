"""Split gradients of Transformer Engine's linears are those of its whole backward, bit for bit.

Over its own Python of each pinned version on the CPU. ``tests/gpu`` does the same on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from tests.integration import te_itself
from tests.integration.server import VERSIONS, Megatron
from tests.tiers import by_night


@pytest.fixture(scope="module", params=[*(by_night(each) for each in VERSIONS[:-1]), VERSIONS[-1]])
def of_version(request: pytest.FixtureRequest) -> Iterator[tuple[str, Megatron]]:
    """A version, and ranks that have its Python."""
    newest = request.param == VERSIONS[-1]
    server = request.getfixturevalue("te") if newest else Megatron(request.param)
    yield request.param, server
    if not newest:
        server.close()


def _every_case() -> tuple[str, list[str]]:
    passed = []
    for case in te_itself.cases("cpu"):
        te_itself.check(case)
        passed.append(str(case))
    return sys.modules["transformer_engine"].__version__, passed


@pytest.mark.job
def test_its_own_python_on_the_cpu(of_version: tuple[str, Megatron]):
    """Each kind of module, with and without bias, fused or not, in two orders."""
    version, server = of_version
    ((found, passed),) = server("in_groups", 1, _every_case)
    assert found == version and len(passed) == 8 * len(te_itself.KINDS)


def _accumulates_as_apex_does() -> None:
    from megatron.core.tensor_parallel import layers

    from megatron.schedules.integration.linears.fused_accumulation import fuse_without_apex
    from tests.integration import fused_kernels

    apex = fused_kernels.Kernels([])
    fused_kernels.forget()
    fuse_without_apex()
    ours = layers.fused_weight_gradient_mlp_cuda
    assert layers._grad_accum_fusion_available and type(ours) is not type(apex)
    for kind, dtype in (("fp32", torch.float32), ("fp16", torch.bfloat16)):
        x, dy = torch.randn(32, 16).bfloat16(), torch.randn(32, 24).bfloat16()
        before = torch.randn(24, 16).to(dtype)
        added, wanted = before.clone(), before.clone()
        for kernels, into in ((ours, added), (apex, wanted)):
            getattr(kernels, f"wgrad_gemm_accum_{kind}")(x, dy, into)
        assert not torch.equal(wanted, before)
        if dtype is torch.float32:
            torch.testing.assert_close(added, wanted, rtol=0, atol=0)
        else:  # the other rounds the product before it adds
            torch.testing.assert_close(added, wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


@pytest.mark.nightly
def test_without_apex_the_same_sums_go_to_main_grad(of_version: tuple[str, Megatron]):
    of_version[1]("in_groups", 1, _accumulates_as_apex_does)


class _Launched:
    """Stands for a Triton kernel that multiplies the rows of a gradient by another gradient."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda rows, _, by, *more, **named: rows.mul_(by.reshape(*by.shape, 1))


def _loss_waits() -> list[bool]:
    """Whether the backward of Transformer Engine's loss waits for the GPU: without a schedule, and with one."""
    from megatron.core.models.common.language_module import language_module
    from torch.nn.functional import cross_entropy

    from megatron.schedules.integration import hooks
    from tests.integration.sync_detector import detected

    def forward(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        each = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        return each, torch.autograd.grad(each.sum(), logits)[0]

    triton = importlib.import_module("transformer_engine.pytorch.cross_entropy").triton_cross_entropy
    triton.element_mul_kernel = _Launched()
    triton.cross_entropy_forward = lambda logits, *more: torch.enable_grad()(forward)(
        logits.detach().requires_grad_(), *more
    )
    session, found, gradients = hooks.install(), [], []
    logits, weights = torch.randn(4, 2, 8), torch.rand(4, 2)
    for planner in (None, object()):
        session.planner = planner  # type: ignore[assignment]
        leaf = logits.clone().requires_grad_()
        loss = language_module.te_parallel_cross_entropy(leaf, torch.ones(4, 2, dtype=torch.long), None)
        with detected() as detector:
            (loss * weights).sum().backward()
        found.append(bool(detector.found))
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    return found


@pytest.mark.nightly
def test_its_loss_does_not_wait_for_the_gpu_under_a_schedule(of_version: tuple[str, Megatron]):
    version, server = of_version
    if not Version("2.7") <= Version(version) < Version("2.20"):
        pytest.skip("earlier ones wait, later ones never do")
    assert server("in_groups", 1, _loss_waits) == [[True, False]]
