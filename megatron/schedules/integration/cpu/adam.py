"""Adam for the CPU stand-in. It stores the number of steps where the GPU libraries' Adam does.

Adam of Transformer Engine and Apex stores one number of steps per parameter group; torch stores a tensor per parameter.
With torch's Adam, stock's distributed optimizer cannot resume (``docs/upstream.md`` says why), and checkpoints would
take another code path through stock than on machines with a GPU.
"""

from __future__ import annotations

from typing import Any

import torch


class _StepInGroup(torch.optim.Optimizer):
    """Mixin for torch's optimizers: bitwise the same update, with ``step`` in the parameter groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            done = group.get("step", 0)
            group["step"] = done + 1
            for parameter in group["params"]:
                if self.state.get(parameter):
                    self.state[parameter]["step"] = torch.tensor(float(done))
        result = super().step(closure)
        self._forget_steps()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        for values in filter(None, state["state"].values()):
            values.setdefault("step", torch.tensor(0.0))  # torch reads it when it fills in missing defaults
        super().__setstate__(state)
        self._forget_steps()

    def _forget_steps(self) -> None:
        for values in self.state.values():
            values.pop("step", None)


class _Adam(_StepInGroup, torch.optim.Adam): ...


class _AdamW(_StepInGroup, torch.optim.AdamW): ...


def adam(*args: Any, adam_w_mode: bool = True, **kwargs: Any) -> torch.optim.Optimizer:
    """Replaces the GPU libraries' ``FusedAdam``."""
    return (_AdamW if adam_w_mode else _Adam)(*args, **kwargs)


def enable() -> None:
    """Makes Megatron use :func:`adam` and save it in checkpoints like Apex's Adam."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    optimizer.Adam = adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
