"""Jobs of the real main program in forked ranks, and what tests compare of them.

Importing this turns the CPU stand-in on, for the whole process: only :mod:`tests.integration.server` does.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import count
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import training

import pretrain_gpt
from megatron.schedules.integration import hooks as integration
from megatron.schedules.integration.layout import PlacedLayout
from megatron.schedules.planning.placement import v_shape
from tests.integration import plain_attention
from tests.integration.forked_ranks import run_ranks
from tests.integration.results import Result


def train(world: int, flags: Sequence[str], attention: str = "stock", timeout: float = 180.0) -> Result:
    """Run ``pretrain_gpt.py`` with ``flags`` on ``world`` ranks, with ``attention`` "stock" or "plain"."""
    ranks = run_ranks(world, _rank, list(flags), attention, timeout=timeout)
    gradients, weights = {}, {}
    for rank in ranks:
        gradients.update(rank["gradients"])
        weights.update(rank["weights"])
    return Result(ranks[-1]["losses"], ranks[-1]["evaluations"], gradients, weights, [rank["peak"] for rank in ranks])


def outputs(world: int, flags: Sequence[str]) -> list[tuple[int, str]]:
    """How ``pretrain_gpt.py`` ends on each of ``world`` ranks: exit status and all it printed."""
    return run_ranks(world, _ending, list(flags))


def live_bytes(world: int, flags: Sequence[str]) -> list[list[int]]:
    """Bytes of all tensors alive on each rank after every tenth iteration."""
    return run_ranks(world, _live_bytes, list(flags))


def hooks() -> list[tuple[str, str, bool, bool]]:
    """Of every hook after two installs: name, reason, whether it is in place, whether it lies on another."""
    return run_ranks(1, _hooks)[0]


def schedule_module() -> str:
    """Where the schedule function comes from that a script gets which has installed us and does not ask for one."""
    return run_ranks(1, _schedule_module)[0]


def pickled_layout() -> Any:
    """What a V's layout is once it has been through a checkpoint."""
    return pickle.loads(pickle.dumps(PlacedLayout(v_shape(2), [2, 2, 2, 2])))


def _hooks() -> list[tuple[str, str, bool, bool]]:
    found = []
    integration.install()
    integration.install()
    for hook in integration.HOOKS:
        now = getattr(hook.module, hook.name)
        below = getattr(now, "megatron_schedules_stock", None)
        found.append((hook.name, hook.why, below is not None, hasattr(below, "megatron_schedules_stock")))
    return found


def _schedule_module() -> str:
    integration.install()
    return str(training.get_forward_backward_func(pp_size=2, vp_size=None).__module__)


def _ending(flags: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    sys.argv = ["pretrain_gpt.py", *flags]
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            pretrain_gpt.main()
        except SystemExit as leaving:
            return int(leaving.code or 0), printed.getvalue()
    return 0, printed.getvalue()


def _live_bytes(flags: list[str]) -> list[int]:
    sizes: list[int] = []
    stock_log = training.training_log

    iterations = count(1)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        if next(iterations) % 10 == 0:
            gc.collect()
            tensors = (found for found in gc.get_objects() if isinstance(found, torch.Tensor))
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            sizes.append(sum(storages.values()))
        return stock_log(*args, **kwargs)

    training.training_log = training_log
    _rank_main(flags)
    return sizes


def _rank_main(flags: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = ["pretrain_gpt.py", *flags]
    pretrain_gpt.main()


def _rank(flags: list[str], attention: str) -> dict[str, Any]:
    if attention == "plain":
        plain_attention.put_in_place()
    seen: dict[str, Any] = {"losses": [], "evaluations": [], "gradients": {}, "weights": {}, "peak": 0}
    _listen(seen)
    _rank_main(flags)
    return seen


def _listen(seen: dict[str, Any]) -> None:
    """Look over stock's shoulder: at the schedule's result, the training log, and evaluation."""
    stock_log, stock_evaluate = training.training_log, training.evaluate

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in loss_dict:
            seen["losses"].append(float(loss_dict["lm loss"]))
        return stock_log(loss_dict, *args, **kwargs)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = stock_evaluate(*args, **kwargs)
        if result[0] and "lm loss" in result[0]:
            seen["evaluations"].append(float(result[0]["lm loss"]))
        return result

    training.training_log, training.evaluate = training_log, evaluate
    stock_pretrain = pretrain_gpt.pretrain

    def pretrain(*args: Any, **kwargs: Any) -> None:
        choose = training.get_forward_backward_func
        training.get_forward_backward_func = lambda *a, **k: _recorded(choose(*a, **k), seen)
        stock_pretrain(*args, **kwargs)

    pretrain_gpt.pretrain = pretrain


def _recorded(schedule: Any, seen: dict[str, Any]) -> Any:
    def call(*, model: Any, forward_only: bool = False, **rest: Any) -> Any:
        result = schedule(model=model, forward_only=forward_only, **rest)
        if not forward_only:
            if not seen["gradients"]:
                seen["gradients"] = _gradients(model, lambda parameter: parameter.main_grad)
            seen["peak"] = getattr(schedule, "peak_activation_bytes", 0)
        else:
            seen["weights"] = _gradients(model, lambda parameter: parameter.data)
        return result

    return call


def _gradients(model: Any, value: Any) -> dict[tuple[str, int, int], torch.Tensor]:
    found = {}
    data, tensor = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in model:
        config = get_model_config(chunk)
        inner = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        offset = get_transformer_layer_offset(config, vp_stage=getattr(inner, "vp_stage", None))
        for name, parameter in inner.named_parameters():
            parts = name.split(".")
            if "layers" in parts:
                at = parts.index("layers") + 1
                parts[at] = str(int(parts[at]) + offset)
            found[".".join(parts), data, tensor] = value(parameter).clone()
    return found
