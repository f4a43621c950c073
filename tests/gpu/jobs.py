"""Training jobs of the real main program: their flags, the work of a rank, and its results.

Importing this imports Megatron, on its CPU stand-in where there is no GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.te_python import without_gpu

without_gpu()  # with Transformer Engine's Python, if that is on the path

import pretrain_gpt
from benchmarks.quick_start import quick_start
from megatron.schedules.integration.gpu_libraries import graphs_fault as graphs_fault
from megatron.schedules.integration.gpu_libraries import te_fault
from megatron.schedules.job.flags import SEARCH_VARIABLE
from megatron.schedules.measure.profile_facts import CopyRates
from megatron.schedules.runtime.transport import disowned
from tools import _pass_times as times
from tools._copy_rates import copy_rates

from megatron.training import training  # isort: skip - after the stand-in
from tests.gpu import watchers as watchers  # isort: skip - for the tests
from tests.integration import te_itself  # isort: skip
from tests.gpu.ranks import run_ranks  # isort: skip
from tests.gpu.round_passes import Watcher, watch  # isort: skip
from tests.gpu.settings import Setting  # isort: skip
from tests.support import cuda_graphs  # isort: skip
from tests.support.weights import gradient_digests, start_equal  # isort: skip

quick_start()

_COMMON = (
    "--tokenizer-type NullTokenizer --mock-data --untie-embeddings-and-output-weights --micro-batch-size 1 --lr 1e-4 "
    "--min-lr 1e-5 --seed 7 --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --make-vocab-size-divisible-by 16 --dataloader-type cyclic "
    "--distributed-timeout-minutes 1"
)
_TINY = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --vocab-size 96"
_SMALL = "--hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --vocab-size 1024"
_USUAL = "--hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
_USUAL += "--vocab-size 8192"
# As far as torch and Transformer Engine can.
_EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Fused kernels of Megatron's are made by torch's compiler, which takes a C compiler.
COMPILES_NOTHING = ("--no-bias-dropout-fusion", "--no-bias-gelu-fusion")
# Ranks that hang are ended by their own watchdog, a while before this.
_JOB_S = 240.0
# The first NCCL that lets ranks share a GPU, as it tells its version, and what it then needs to be told. Its buffers
# would take gigabytes of each rank.
_SHARES_A_GPU = 23000
_SHARED = {"LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
_SHARED |= {"NCCL_BUFFSIZE": str(2**18), "NCCL_MAX_NCHANNELS": "1"}


class Ran(NamedTuple):
    """The results of a job.

    Args:
        losses, norms: of every iteration, the loss and the norm of the gradients.
        gradients: of every parameter after the first iteration's schedule, a digest.
        found: by rank, what its watcher found.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, str]
    found: list[Any]


class Job(NamedTuple):
    """The work of one rank of a job.

    Args:
        flags: of ``pretrain_gpt.py``.
        watcher: makes what looks on; none where nothing does.
        connections: hardware queues of a GPU.
        exact: whether digests of the gradients are kept, and the same job is to give the same bits again.
    """

    flags: tuple[str, ...]
    watcher: Callable[[], Watcher] | None = None
    connections: int = 1
    exact: bool = False


def train(
    world: int,
    job: Job,
    *,
    shared: bool = False,
    fresh: bool = False,
    environment: dict[str, str] | None = None,
) -> Ran:
    """Runs ``job`` on ``world`` ranks.

    Args:
        world: how many.
        job: what each does.
        shared: whether all use the first GPU, or each its own.
        fresh: whether they are new interpreters.
        environment: beside torchrun's.
    """
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": str(job.connections)}
    variables |= _SHARED if shared else {}
    variables |= _EXACT if job.exact else {}
    variables |= {SEARCH_VARIABLE: "1"} | (environment or {})
    ranks: list[Ran] = run_ranks(world, partial(_rank, job), variables, timeout=_JOB_S, fresh=fresh)
    gradients = {name: digest for rank in ranks for name, digest in rank.gradients.items()}
    losses: list[float] = next((rank.losses for rank in reversed(ranks) if rank.losses), [])
    return Ran(losses, ranks[-1].norms, gradients, [rank.found[0] for rank in ranks])


@cache
def stock(world: int, job: Job, *, shared: bool = False, number: int = 0) -> Ran:
    """Runs ``job`` once for all tests that compare with it; once more for another ``number``."""
    return train(world, job, shared=shared)


def alone(body: Callable[[], Any]) -> Any:
    """Returns the result of ``body()`` in a process of its own, for what would start the GPU's driver in this one."""
    return run_ranks(1, body, {"LOCAL_RANK": "0"}, timeout=_JOB_S)[0]


def _rank(job: Job) -> Ran:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.cuda.init()
    # The driver has read how many queues to use; for tensor parallelism Megatron insists on one, for speed.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    seen = Ran([], [], {}, [])
    _listen(seen, job.exact)
    watcher = job.watcher() if job.watcher else None
    if watcher is not None:
        watch(watcher)
    torch.set_num_threads(1)
    if "--te-rng-tracker" in job.flags and not torch.cuda.is_available():  # for CUDA graphs
        cuda_graphs.install()
    if job.exact:
        torch.use_deterministic_algorithms(True, warn_only=True)
    sys.argv = ["pretrain_gpt.py", *job.flags]
    pretrain_gpt.main()
    seen.found.append(None if watcher is None else watcher.found)
    return seen


def _listen(seen: Ran, digests: bool) -> None:
    """Starts from the same weights as any other job, and records the results."""
    stock_log, stock_optimizer = training.training_log, training.get_megatron_optimizer

    def training_log(losses: Any, *rest: Any, **named: Any) -> Any:
        if "lm loss" in losses:
            seen.losses.append(float(losses["lm loss"]))
        return stock_log(losses, *rest, **named)

    def get_megatron_optimizer(config: Any, model: Any, *rest: Any, **named: Any) -> Any:
        start_equal(model)
        optimizer = stock_optimizer(config, model, *rest, **named)
        step = optimizer.step

        def noted() -> Any:
            if digests and not seen.gradients:
                seen.gradients.update(gradient_digests(model))
            done = step()
            seen.norms.append(float(done[1]))
            return done

        optimizer.step = noted
        return optimizer

    training.training_log, training.get_megatron_optimizer = training_log, get_megatron_optimizer


def size_flags(setting: Setting, stages: int, *, usual: bool) -> list[str]:
    """Returns flags of a model with layers for so many stages: tiny on a CPU, else small, or of usual width in bf16."""
    size = _TINY if setting.on_cpu else _USUAL if usual else _SMALL
    number = ["--bf16"] if usual and not setting.on_cpu else []
    return [*_COMMON.split(), *size.split(), "--num-layers", str(stages), *number]


def kernel_flags(setting: Setting, *, te: bool = False) -> list[str]:
    """Returns flags for local layers, or with ``te`` for Transformer Engine's, then with Apex's kernel where it is."""
    if setting.on_cpu:
        return [*times.ON_CPU_FLAGS, *(["--transformer-impl", "transformer_engine"] if te else [])]
    return [*times.gpu_flags(te=te), *COMPILES_NOTHING]


def backend_of_a_shared_gpu() -> str:
    """Returns the backend for messages of ranks that share a GPU: NCCL's where the one that is loaded allows it."""
    if not torch.cuda.is_available():
        return "gloo"
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return "nccl" if version.value >= _SHARES_A_GPU else "gloo"


def schedule_flags(schedule: str) -> list[str]:
    """Returns the flags of ``schedule``; an adaptive one within 1F1B's memory."""
    flags = ["--pipeline-schedule", schedule]
    if schedule == "adaptive":
        flags += ["--pipeline-memory-limit", "1"]
    return flags


def te_here(setting: Setting) -> bool:
    """Whether Transformer Engine's layers can be used."""
    return not setting.on_cpu and te_fault() is None


def capability() -> tuple[int, int]:
    """Compute capability of the GPU, asked in a process of its own: the driver does not survive a fork."""
    found: tuple[int, int] = alone(torch.cuda.get_device_capability)
    return found


def marks_norms(setting: Setting) -> bool:
    """Whether there are norms that support sequence parallelism: Apex's, Transformer Engine's, or the stand-in's."""
    return setting.on_cpu or te_here(setting) or find_spec("apex") is not None


def needs_planner(schedule: str) -> None:
    """Skips where ``schedule`` cannot be planned: ``adaptive`` needs numba."""
    if schedule == "adaptive":
        pytest.importorskip("numba")


def te_cases(device: str) -> dict[str, str]:
    """Returns what is wrong with each case of :mod:`tests.integration.te_itself`; empty for nothing."""
    faults = {}
    for case in te_itself.cases(device):
        try:
            te_itself.check(case)
        except Exception as error:
            faults[str(case)] = f"{type(error).__name__}: {error}"
        else:
            faults[str(case)] = ""
    return faults


def reused_at_once(owner: bool) -> bool:
    """Frees memory that a stream, busy for long, is recorded to use; whether an allocation of as much gets it."""
    side = torch.cuda.Stream()
    memory = torch.empty(2**24, device="cuda")
    address = memory.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2 * 10**9)
    (memory if owner else disowned(memory)).record_stream(side)
    del memory
    again = torch.empty(2**24, device="cuda").data_ptr() == address
    torch.cuda.synchronize()
    return again


def rates() -> CopyRates:
    """Measures copies to the host and back."""
    return copy_rates(torch.empty(0, device="cuda").device)


def can_compile() -> bool:
    """Whether torch can compile kernels here, as Megatron's fused ones are."""
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def planned_layers(ranks: int, schedules: Sequence[str]) -> int:
    """Returns a number of layers that all ``schedules`` can divide over their stages."""
    return ranks * (4 if "adaptive" in schedules else 2)
