"""Splits the backward of Transformer Engine's linears into I and W.

Hook: ``forward`` of each ``Linear``, ``LayerNormLinear`` and ``GroupedLinear`` instance, including Megatron's
subclasses. If a module's ``wgrad_store`` delays passes, its backward gives the operands and the product to that store.
But that store is one first-in, first-out queue per module, and its gradients bypass the parameters' hooks. So during
one forward the module gets

- its own ``wgrad_store`` for this call, which defers to our store under the (stage, microbatch) of the forward;
- in place of each weight, and of each bias added in the product, a leaf with the same data and no hooks, because even a
  delayed backward calls the weights' hooks. The parameters themselves get their gradients in W.

The first microbatch of an iteration quantizes weights anew. Its W would also overwrite ``main_grad`` instead of adding
to it, and lose gradients that another W had added. After each forward the autograd node is changed so that W adds.

FP8: an operand has a copy by rows and one by columns (:mod:`.te_operands`). W reads columns, so the other copy is freed
in I. Scales belong to the operand, and later updates do not change them.

The following are never split; their gradients are computed in I:

- output layers (:func:`.output_layers`);
- modules with a frozen weight;
- weights that are grouped in one, or sharded over a rematerialisation group;
- weights that are Megatron-FSDP's or distributed (2.19), or are several in one product (``parameters_split``);
- experts in fused operations (``use_transformer_engine_op_fuser``), whose linears' own forward never runs;
- modules whose ``forward`` was already replaced.

A norm's gradients are computed in I too. Megatron does not build ``LayerNormMLP``.

Under sequence parallelism a column parallel backward gathers its input for the weight gradient, although it does not
compute that gradient. A flag on the autograd node, or on an object of the node, controls this. The flag is cleared
after each forward, and W gathers the input once, a quantized input with Transformer Engine's own function. Without such
a flag the backward gathers, and only this rank's part is stored if it is not quantized.

Userbuffers (``tp_comm_overlap``) are shared memory, which the next use of the same product overwrites. Nothing that W
reads may lie there (:mod:`.te_operands`).

Based on Transformer Engine 2.3 to 2.20.2, ``pytorch/module/``, and megatron-core 0.19.2,
``extensions/transformer_engine.py``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.schedules.integration.gpu_libraries import ENGINE, LINEARS, te_version
from megatron.schedules.integration.linears import te_operands
from megatron.schedules.integration.linears.local import FROZEN, OWN_FORWARD, output_layers
from megatron.schedules.integration.linears.te_leaves import MARKS, Listener, Use, new_leaves, use_of
from megatron.schedules.integration.linears.te_weight_gradient import WeightGradient
from megatron.schedules.runtime.parameter_leaves import StandIn
from megatron.schedules.runtime.weight_gradients import Key, WeightGradients

_WEIGHT, _BIAS = re.compile(r"weight\d*"), re.compile(r"bias\d*")
# Instance attributes that are read or replaced, besides the parameters.
_ATTRIBUTES = ("wgrad_store", "fuse_wgrad_accumulation", "apply_bias", "sequence_parallel", "parallel_mode", "tp_size")
# Flags that make a backward gather its input (``Linear``'s and ``LayerNormLinear``'s), and settings that may rely on
# the gathered input.
_TO_BE_GATHERED = ("backward_input_needs_gather", "ln_out_needs_gather")
_RELY_ON_IT = ("debug", "ub_bulk_dgrad")
# The first versions quantize a blockwise input after it is gathered.
_QUANTIZED_AFTERWARDS = ("force_hp_input_gather", "force_hp_blockwise_ln_out_gather")
# Attribute of Megatron's experts that is true if Transformer Engine fuses their linears with other operations.
_FUSES = "_with_fused_impl"
_FUSED = "fused with other operations"
_UNKNOWN = "weight or bias of an unknown kind"
# Number of autograd nodes to search for a linear's own: it may add a bias, and cast or reshape the result.
_STEPS_AFTER = 4


def split_te_linears(model_chunk: torch.nn.Module, store: WeightGradients) -> int:
    """Makes Transformer Engine's linears in ``model_chunk`` defer their weight gradients to ``store``.

    Works like :func:`.local.split_linears` for local linears.

    Raises:
        RuntimeError: the linears lack a required attribute: this version of Transformer Engine is unknown.
    """
    bound, whole, kinds = 0, output_layers(model_chunk), linears()
    fused = {part for each in model_chunk.modules() if getattr(each, _FUSES, False) for part in each.modules()}
    for module in model_chunk.modules() if kinds else ():
        if not isinstance(module, kinds) or module in whole:
            continue
        if is_split(module):
            del module.__dict__["forward"]
        if "forward" in module.__dict__:
            continue
        lacking = [name for name in _ATTRIBUTES if not hasattr(module, name)]
        if lacking:
            raise RuntimeError(
                f"Transformer Engine {te_version()}: {type(module).__name__} has no {', '.join(lacking)}, which a "
                "split of its backward needs; use --transformer-impl local, or a schedule that does not split it"
            )
        module.__dict__["forward"] = _Forward(module, store, _FUSED if module in fused else None)
        bound += 1
    return bound


def linears() -> tuple[type, ...]:
    """Returns the classes of Transformer Engine's linears; none if it is not imported."""
    engine = sys.modules.get(ENGINE)
    return () if engine is None else tuple(getattr(engine, name) for name in LINEARS)


def is_split(linear: torch.nn.Module) -> bool:
    """Returns whether :func:`split_te_linears` has bound this linear to a store."""
    return isinstance(linear.__dict__.get("forward"), _Forward)


def defers(linear: torch.nn.Module) -> bool:
    """Works like :func:`.local.defers` for Transformer Engine's linears."""
    if not is_split(linear) or linear.__dict__["forward"].whole_because == _FUSED:
        return False
    return _why_whole(_weights(linear), _biases(linear)) is None


def whole_because(linear: torch.nn.Module) -> str | None:
    """Works like :func:`.local.whole_because` for Transformer Engine's linears."""
    return linear.__dict__["forward"].whole_because if is_split(linear) else OWN_FORWARD


class _Forward:
    """Replaces one linear's ``forward``. For a split backward it gives the module the call's store and leaves.

    Args:
        module: the linear.
        store: of the calls.
        whole_because: why it is never split; None if its parameters decide.
    """

    def __init__(self, module: torch.nn.Module, store: WeightGradients, whole_because: str | None = None) -> None:
        self._module = module
        self._store = store
        self._listener = Listener(type(module).__name__)
        self._never_split, self.whole_because = whole_because, whole_because

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, key = self._module, self._store.current
        whole = type(module).forward
        # Megatron's linears say whether this is the first microbatch, in which a backward overwrites ``main_grad``.
        first = getattr(module, "is_first_microbatch", True)
        # Without gradients there is nothing to split: evaluation, or the first run of a recomputed block.
        replaced = self._replaced(key) if key is not None and torch.is_grad_enabled() else None
        if replaced is None or key is None:
            output = whole(module, *args, **kwargs)
        else:
            output = replaced.forward(whole, args, kwargs)
            if replaced.use.input_over is not None:
                self._store.leaves.switch(key, _InputInParts(output))
        if first:
            _let_add(output)
        return output

    def _replaced(self, key: Key) -> _Replaced | None:
        """Returns what replaces attributes in the forward of ``key``; None if this linear must not be split."""
        leaves, module = self._store.leaves, self._module
        earlier: _Replaced | None = leaves.kept_by(self)
        if earlier is not None and earlier.use.leaves.are_of(module):
            leaves.add_again(key, earlier.use.leaves.stand_ins)
            if earlier.serves_again:
                return earlier
            use, biases = earlier.use, _biases(module)
        else:
            weights, biases = _weights(module), _biases(module)
            self.whole_because = self._never_split or _why_whole(weights, biases)
            if self.whole_because is not None:
                return None
            use = use_of(module, self._store, new_leaves(leaves, key, module, weights, self._listener))
        # Of this forward alone: W itself looks for their gradients, which are there in I for some operands.
        of_biases = {
            name: leaves.add(key, bias, te_operands.leaf_of(bias), collected=False)
            for name, bias in biases.items()
            if bias.requires_grad
        }
        replaced = _Replaced(use, of_biases, serves_again=not biases and use.leaves.listener is None)
        if use.leaves.places:
            leaves.keep(self, replaced)
        return replaced


def _holders(output: Any) -> tuple[Any, Any]:
    """Objects from which this call's backward reads settings.

    These are the autograd node and, for Linear from 2.16 on, an object of the node.
    """
    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    for _ in range(_STEPS_AFTER):
        holders = node, getattr(node, "backward_objects", None)
        if any(hasattr(holder, "is_first_microbatch") for holder in holders):
            return holders
        node = node.next_functions[0][0] if getattr(node, "next_functions", ()) else None
    raise RuntimeError(
        f"Transformer Engine {te_version()} does not say where its backward reads settings: it works otherwise than "
        "the versions that splitting its backward was written for; use --transformer-impl local, or a schedule that "
        "does not split it"
    )


def _let_add(output: Any) -> None:
    """Makes this call add its weight gradient to ``main_grad``, also for the first microbatch."""
    if (output[0] if isinstance(output, tuple) else output).requires_grad:
        for holder in _holders(output):
            if getattr(holder, "is_first_microbatch", None):
                holder.is_first_microbatch = False


class _InputInParts:
    """Keeps a call's backward from gathering its input where it defers to W, which gathers it."""

    def __init__(self, output: Any) -> None:
        self._flags: list[tuple[Any, str]] = []
        for holder in _holders(output):
            relied_on = any(getattr(holder, name, True) for name in _RELY_ON_IT)
            relied_on |= any(getattr(holder, name, False) for name in _QUANTIZED_AFTERWARDS)
            if not relied_on:
                self._flags += [(holder, flag) for flag in _TO_BE_GATHERED if getattr(holder, flag, None) is True]

    def __call__(self, defers: bool) -> None:
        for holder, flag in self._flags:
            setattr(holder, flag, not defers)


def _weights(module: Any) -> dict[str, Tensor]:
    """Returns, by name, the weights of its products."""
    own = module._parameters.items()
    return {name: weight for name, weight in own if weight is not None and _is_a(_WEIGHT, name)}


def _biases(module: Any) -> dict[str, Tensor]:
    """Returns, by name, the biases whose gradients are computed with those of the weights, if they are trained."""
    # If a bias is returned, or added after a reduction, autograd computes its gradient in I.
    if not module.apply_bias or getattr(module, "gemm_bias_unfused_add", False):
        return {}
    own = module._parameters.items()
    return {name: bias for name, bias in own if bias is not None and _is_a(_BIAS, name)}


@cache
def _is_a(kind: re.Pattern[str], name: str) -> bool:
    return kind.fullmatch(name) is not None


def _why_whole(weights: dict[str, Tensor], biases: dict[str, Tensor]) -> str | None:
    """Returns why a linear with these parameters is not split; None if it is."""
    if not weights:
        return "several weights in one"
    for bias in biases.values():
        if bias.requires_grad and type(bias) is not torch.nn.Parameter:
            return _UNKNOWN
    for weight in weights.values():
        if type(weight) is not torch.nn.Parameter and not te_operands.is_primary(weight):
            return _UNKNOWN
        if not weight.requires_grad:
            return FROZEN
        for mark, why in MARKS.items():
            if getattr(weight, mark, False):
                return why
    return None


class _Call:
    """The ``wgrad_store`` of backwards of a linear.

    Args:
        use: of the linear.
        biases: by name, leaves in place of the trained ones whose gradients are computed with those of the weights.

    Attributes:
        in_forward: whether the forward runs.
    """

    __slots__ = ("_biases", "_deferred", "_parameters", "_use", "in_forward")

    def __init__(self, use: Use, biases: Mapping[str, StandIn]) -> None:
        self._use, self._biases = use, {name: each.leaf for name, each in biases.items()}
        self._parameters = tuple(each.parameter for each in (*use.leaves.stand_ins, *biases.values()))
        self.in_forward = self._deferred = False

    def delay_wgrad_compute(self) -> bool:
        """Tells Transformer Engine, in the forward and in the engine's I, to call :meth:`put`."""
        if self.in_forward:
            return True
        use = self._use
        defers = use.store.leaves.deferring is not None
        if (listener := use.leaves.listener) is not None:
            listener.asked(id(self), defers=defers, done=self._deferred)
        return defers

    def put(self, tensor_list: Sequence[Any], func: Callable[..., Any]) -> None:
        """Receives the deferred weight gradient from Transformer Engine's backward: see :class:`.WeightGradient`."""
        use = self._use
        store = use.store
        key = store.leaves.deferring
        assert key is not None
        if use.column_parallel:
            # The input's gradient is being sent to the other ranks; the wait for it follows.
            store.compute_ahead(key)
        store.add(WeightGradient(use, key, self._parameters, self._biases, tensor_list, func))
        if use.leaves.listener is not None:
            self._deferred = True
            use.leaves.listener.deferred(id(self))


class _Replaced:
    """What a linear has as instance attributes in a forward, in place of its own: leaves and ``wgrad_store``.

    Nothing overlaps in bulk.

    Args:
        use, biases: as for :class:`_Call`.
        serves_again: whether all forwards with this use can have it: those have neither biases of their own nor a
            listener, who tells calls apart.
    """

    __slots__ = ("_attributes", "_call", "_names", "_own", "serves_again", "use")

    def __init__(self, use: Use, biases: Mapping[str, StandIn], *, serves_again: bool) -> None:
        self.use, self.serves_again, self._call = use, serves_again, _Call(use, biases)
        leaves = use.leaves.leaves | {name: each.leaf for name, each in biases.items()}
        own = use.module.__dict__
        self._own = {name: own[name] for name in te_operands.BULK if own.get(name)}
        self._attributes = {**dict.fromkeys(self._own, False), **leaves, "wgrad_store": self._call}
        self._own["wgrad_store"] = own["wgrad_store"]
        self._names = tuple(leaves)

    def forward(self, whole: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns what ``whole`` does with the linear."""
        module, call = self.use.module, self._call
        own = module.__dict__
        own.update(self._attributes)
        call.in_forward = True
        try:
            return whole(module, *args, **kwargs)
        finally:
            call.in_forward = False
            own.update(self._own)
            for name in self._names:
                del own[name]
