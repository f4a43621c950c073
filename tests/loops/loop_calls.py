"""How training loops call megatron-core's schedule function, as read in their sources."""

from __future__ import annotations

from typing import NamedTuple

_ALWAYS = "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size forward_only".split()


class LoopCall(NamedTuple):
    """One call.

    Args:
        source: file, in its wheel or repository.
        line: its first line.
        more: arguments, besides those that every loop gives.
        forward_only: whether it only runs forwards.
        results: what its loss function returns, see :mod:`.calls`.
        listed: whether data iterators are in a list also for one chunk.
        listed_model: whether the model is.
    """

    source: str
    line: int
    more: tuple[str, ...] = ()
    forward_only: bool = False
    results: str = "tensors"
    listed: bool = False
    listed_model: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of all arguments."""
        return (*_ALWAYS, *self.more)


_LENGTH, _GROUPS = "decoder_seq_length", ("adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection")
_BRIDGE, _SWIFT = "megatron/bridge/training", "swift/megatron/trainers/base.py"
_VERL = "verl/workers/engine/megatron/transformer_impl.py"
_SLIME = "slime/backends/megatron_utils/model.py"

CALLS = {
    "Megatron-Bridge 0.6.2": LoopCall(f"{_BRIDGE}/train.py", 915, (_LENGTH, *_GROUPS)),
    "Megatron-Bridge 0.6.2, evaluation": LoopCall(f"{_BRIDGE}/eval.py", 244, _GROUPS, forward_only=True),
    "ms-swift 4.6.0": LoopCall(_SWIFT, 1003),
    "ms-swift 4.6.0, evaluation": LoopCall(_SWIFT, 965, forward_only=True),
    "verl 0.9.1": LoopCall(_VERL, 965, results="nested"),
    "verl 0.9.1, log probabilities": LoopCall(_VERL, 965, forward_only=True, results="nested"),
    "NeMo-RL 7ea279a": LoopCall(
        "nemo_rl/models/megatron/train.py", 428, (_LENGTH,), results="numbers", listed_model=False
    ),
    "NeMo-RL 7ea279a, values": LoopCall(
        "nemo_rl/models/value/workers/megatron_value_worker.py", 743, (_LENGTH,), True, "values", listed_model=False
    ),
    "slime 624b824": LoopCall(_SLIME, 648, (_LENGTH,), results="keys and values", listed=True),
    "slime 624b824, log probabilities": LoopCall(
        _SLIME, 475, forward_only=True, results="lists of tensors", listed=True
    ),
}  # fmt: skip
"""By loop and version or commit."""
