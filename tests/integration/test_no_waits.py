"""Inside a program the host never waits for the device: what a GPU has queued lasts while the next pass is prepared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.features import each_schedule
from tests.integration.results import MODEL, UNTIED
from tests.integration.server import Megatron
from tests.integration.sync_detector import detected
from tests.integration.test_moe import DEEP_EP, EP2, EXPERTS, GATHERED, HIDDEN
from tests.integration.test_same_result import under
from tests.tiers import by_night

JOB = "--train-iters 2 --global-batch-size 4 --pipeline-model-parallel-size 2".split()
JOBS = {
    "with timers in every pass": (2, "--timing-log-level 2"),
    "bf16 with dropout and recompute": (
        2,
        "--bf16 --hidden-dropout .1 --attention-dropout .1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "bf16, multi-token prediction": (2, "--bf16 --mtp-num-layers 1 --position-embedding-type rope --no-rope-fusion"),
    "fp16": (2, "--fp16"),
    "tensor and sequence parallel": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "shared vocabulary": (2, "--pipeline-vocabulary-parallel --timing-log-level 2"),
    "shared vocabulary, tensor and sequence parallel, bf16": (
        4,
        "--pipeline-vocabulary-parallel --tensor-model-parallel-size 2 --sequence-parallel --bf16",
    ),
    "measuring itself": (2, "--train-iters 3 --pipeline-measure {folder}:1-3"),
    "data parallel, overlapped": (4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
}


@pytest.mark.feature("no host synchronisation inside a program")
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("schedule", each_schedule("v-half"))
def test_nothing_in_a_program_waits_for_the_device(megatron: Megatron, schedule: str, job: str, tmp_path: Path) -> None:
    """NaN in the losses is looked for, as by default."""
    world, flags = JOBS[job]
    found = megatron(
        "waits", world, [*MODEL, *UNTIED, *JOB, *under(schedule, "1"), *flags.format(folder=tmp_path).split()]
    )
    assert [sorted(set(waits)) for waits in found] == [[]] * world


@pytest.mark.parametrize(
    "dispatcher",
    [EXPERTS, *(by_night(each) for each in (GATHERED, f"{EXPERTS} {DEEP_EP}"))],
)
def test_hiding_messages_of_experts_adds_no_wait(megatron: Megatron, dispatcher: str) -> None:
    """Dispatchers of stock's wait for numbers of tokens."""
    job = [*MODEL, *UNTIED, *JOB, *under("v-zb"), *dispatcher.split(), *EP2.split()]
    plain, hidden = (megatron("waits", 4, [*job, *more]) for more in ([], HIDDEN.split()))
    for without, ours in zip(plain, hidden, strict=True):
        assert without and _places(ours) <= _places(without)


def _places(waits: list[str]) -> Counter[str]:
    """How often the host waits at each place, whoever calls it."""
    return Counter(wait.split(" < ")[0] for wait in waits)


DEVICE = torch.device("cpu")  # a tensor that is put anywhere by name counts as the device's


def on_device(*numbers: float) -> torch.Tensor:
    return torch.zeros(len(numbers), device=DEVICE)


class Reading(torch.autograd.Function):
    """Calls ``read`` with the gradient, in the backward."""

    @staticmethod
    def forward(ctx, tensor, read):  # type: ignore[no-untyped-def]
        ctx.read = read
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.read(gradient)
        return gradient, None


def in_backward(read: Callable[[torch.Tensor], object]) -> None:
    """``read`` in the backward of an autograd function."""
    Reading.apply(on_device(1).requires_grad_(), read).sum().backward()


def in_a_hook(read: Callable[[torch.Tensor], object]) -> None:
    """``read`` in a hook of a leaf, where torch has no function mode at all."""
    leaf = on_device(1).requires_grad_()
    leaf.register_post_accumulate_grad_hook(lambda each: (read(each), None)[1])
    leaf.sum().backward()


WAITS = {
    "item in a backward": lambda: in_backward(lambda gradient: gradient.item()),
    "copy a number to the device in a backward": lambda: in_backward(lambda _: torch.tensor(1.0, device=DEVICE)),
    "pick by a mask in a backward": lambda: in_backward(lambda gradient: gradient[gradient > 1]),
    "bool in a hook": lambda: in_a_hook(lambda leaf: bool(leaf.grad > 0)),
    "item in a hook": lambda: in_a_hook(lambda leaf: leaf.grad.item()),
    "item": lambda: on_device(1).item(),
    "item in an autograd function": lambda: ReadingForward.apply(on_device(1).sum()),
    "tolist": lambda: on_device(1, 2).tolist(),
    "bool": lambda: bool(on_device(1) > 0),
    "print": lambda: str(on_device(1)),
    "cpu": lambda: on_device(1).cpu(),
    "copy to the device": lambda: torch.zeros(2).to(DEVICE),
    "copy a number to the device": lambda: torch.tensor(1.0, device=DEVICE),
    "pick by a mask": lambda: on_device(1, 2)[on_device(1, 2) > 1],
    "nonzero": lambda: on_device(1, 2).nonzero(),
    "synchronize": lambda: torch.cuda.synchronize(),
    "of an event": lambda: torch.cuda.Event.synchronize(None),
}


class ReadingForward(torch.autograd.Function):
    """Reads its argument in the forward, where it is another tensor with the same memory."""

    @staticmethod
    def forward(ctx, number):  # type: ignore[no-untyped-def]
        number.item()
        return number

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient


FREE = {
    "read in host memory in an autograd function": lambda: ReadingForward.apply(torch.zeros(1).sum()),
    "make there in a backward": lambda: in_backward(lambda gradient: gradient + torch.zeros(1, device=DEVICE)),
    "read in host memory in a backward": lambda: in_backward(lambda _: torch.zeros(2).sum().item()),
    "make there in a hook": lambda: in_a_hook(lambda leaf: leaf.grad.add_(1)),
    "read in host memory": lambda: torch.zeros(2).sum().item(),
    "copy behind the host": lambda: torch.zeros(2).to(DEVICE, non_blocking=True),
    "take as it is": lambda: torch.as_tensor(on_device(1), device=DEVICE),
    "make there": lambda: torch.zeros(2, device=DEVICE),
    "add a number from host memory": lambda: on_device(1).add_(torch.tensor(0)),
    "state of random numbers": lambda: torch.all(torch.get_rng_state() == torch.get_rng_state()).item(),
}


@pytest.mark.parametrize("what", [*WAITS, *FREE])
def test_the_detector_knows_what_waits(what: str) -> None:
    with detected() as detector:
        (WAITS | FREE)[what]()
    assert bool(detector.found) == (what in WAITS), detector.found
