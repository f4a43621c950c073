"""W of one use of a Transformer Engine linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.integration.gpu_libraries import te_version
from megatron.schedules.integration.linears import te_operands
from megatron.schedules.integration.linears.fused_accumulation import fused_gradient
from megatron.schedules.integration.linears.products import PLAIN, Product, Spread, part_of
from megatron.schedules.integration.linears.te_leaves import Use
from megatron.schedules.runtime.parameter_leaves import Key


def _part_of(input: Any, grad_output: Any, group: Any) -> tuple[Any, Any]:
    """Returns this rank's part of ``input`` and the ranks to gather it from; None if it stays gathered.

    The number of rows decides.
    """
    rows, whole = (math.prod(operand.size()[:-1]) for operand in (input, grad_output))
    if rows * group.size() == whole:
        return input, group
    if rows == whole:
        return (part_of(input, group), group) if type(input) is Tensor else (input, None)
    raise RuntimeError(
        f"Transformer Engine {te_version()} put off a weight gradient of {rows} rows of input and {whole} of the "
        f"output's gradient on {group.size()} tensor-parallel ranks: it works otherwise than the versions that "
        "splitting its backward was written for; use --transformer-impl local, or a schedule that does not split it"
    )


class WeightGradient(Product):
    """W of one use of a linear.

    Args:
        use: of the linear.
        key, parameters: see :class:`.DeferredGradient`.
        biases: by name, leaves in place of the biases whose gradients are computed with those of the weights.
        tensor_list: the input (tokens, h_in) and the output's gradient (tokens, h_out). For ``GroupedLinear`` a list of
            each, one tensor per expert, and the list of the weight gradients to write.
        func: computes from them the weight gradient and the bias gradient, and may return more. For ``GroupedLinear``
            the first is empty, and the second a list.
    """

    gathered = staticmethod(te_operands.gather)
    _outputs: list[Tensor] | None = None
    _shapes: Sequence[tuple[Any, ...]] = ()

    def __init__(
        self,
        use: Use,
        key: Key,
        parameters: tuple[Tensor, ...],
        biases: Mapping[str, Tensor],
        tensor_list: Sequence[Any],
        func: Callable[..., Any],
    ) -> None:
        self._use, self._biases, self._func = use, biases, func
        parallel = use.column_parallel or use.row_parallel
        if not parallel and set(map(type, tensor_list)) == PLAIN:
            super().__init__(use.store, key, parameters, tensor_list)  # as most: nothing to free or to gather
            return
        input, grad_output, *outputs = tensor_list
        plain = type(grad_output) is Tensor
        if outputs:
            self._outputs = outputs[0]
            if self._outputs and not use.fused:
                # Uninitialised memory of the weights' size, which should not stay allocated from I to W.
                self._shapes = [(out.shape, out.dtype, out.device) for out in self._outputs]
                self._outputs = []
        ahead, over, gathered_over = False, None, None
        if not outputs and parallel:
            ahead, gathered_over = use.fused and use.row_parallel, use.gradient_over if plain else None
            if use.input_over is not None:
                input, over = _part_of(input, grad_output, use.input_over)
        te_operands.keep_columns(grad_output)
        if use.gradient_in_buffer and (ahead or not plain):  # otherwise a copy of this rank's rows is stored
            grad_output = te_operands.out_of_buffers(grad_output)
        if over is None or te_operands.gathered_by_columns(input):
            te_operands.keep_columns(input)
        else:
            te_operands.keep_rows(input)
        super().__init__(use.store, key, parameters, (input, grad_output), Spread(over, gathered_over, ahead))

    def multiply(self, input: Any, grad_output: Any) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Returns the gradients of the weights, and of the biases that are computed here."""
        func = self._func
        del self._func  # it references the backward that it comes from
        if self.gathers:
            te_operands.keep_columns(input)  # may have been gathered by rows
        if self._outputs is None:
            computed = func(input, grad_output)
            return computed[:1], computed[1:2]
        gradients = self._outputs or [torch.empty(s, dtype=t, device=d) for s, t, d in self._shapes]
        _, bias_gradients, *_ = func(input, grad_output, gradients)
        return gradients, bias_gradients

    def completed(self, product: tuple[Sequence[Tensor | None], Sequence[Tensor | None]]) -> Sequence[Tensor | None]:
        """Returns the gradients, with what stands for those that are already in ``main_grad``."""
        gradients, bias_gradients = product
        if self._use.fused:
            gradients = [fused_gradient(each.parameter, each.parameter.dtype) for each in self._use.leaves.stand_ins]
        if self._biases:
            gradients = [*gradients, *(self._bias_gradient(name, bias_gradients) for name in self._biases)]
        return gradients

    def _bias_gradient(self, name: str, computed: Sequence[Tensor | None]) -> Tensor | None:
        """Returns the gradient from I, or else the one from W, which is None or empty if I computed it."""
        early = self._biases[name].grad
        late = computed[int(name.removeprefix("bias") or 0)]
        if early is None and late is not None and late.numel():
            return late
        return early
