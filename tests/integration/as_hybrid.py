"""Jobs of a GPT as those of the hybrid model with the same layers: each block is two of its symbols."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron.schedules.estimate.layer_pattern import moe_freq_type
from megatron.schedules.job.stage_layers import layout_stages
from tests.integration.server import Megatron

_LOCAL = {"--transformer-impl": 1, "--no-gradient-accumulation-fusion": 0, "--no-persist-layer-norm": 0}
_LAYERS = {
    "--num-layers": 1,
    "--moe-layer-freq": 1,
    "--mtp-num-layers": 1,
    "--pipeline-model-parallel-layout": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
}


# Only fused attention, which takes fewer bits, is spread over context-parallel ranks and keeps packed samples apart.
_FUSED = {"--context-parallel-size", "--dataloader-inter-document-masking", "--sft"}


class HybridModels:
    """A server whose jobs train hybrid models of Transformer Engine's layers, which a GPT's flags describe.

    Args:
        server: has Transformer Engine.
    """

    def __init__(self, server: Megatron) -> None:
        self._server = server

    def __call__(self, job: str, world: int, flags: Sequence[str], *rest: Any, **named: Any) -> Any:
        """The result of ``job``, as :class:`.Megatron` gives it."""
        # The stand-in for fused attention reads lengths of sequences.
        more = ["--attention-backend", "unfused"] if job == "waits" else []
        return self._server(job, world, [*hybrid_flags(flags), *more], *rest, **named)


def hybrid_flags(flags: Sequence[str]) -> list[str]:
    """Flags of the hybrid model. Whatever places a GPT's layers becomes ``|`` in its pattern."""
    known = _LOCAL | _LAYERS
    rest: list[str] = []
    found: dict[str, str] = {}
    words = iter(flags)
    for word in words:
        if word in known:
            found[word] = next(words) if known[word] else ""
        else:
            rest.append(word)
    blocks = _blocks(found, rest)
    ahead = ["/" + blocks[-1]] * int(found.get("--mtp-num-layers", 0))
    if _FUSED & set(rest) and not {"--bf16", "--fp16"} & set(rest):
        rest.append("--bf16")
    # Transformer Engine's Python over plain torch accumulates into main gradients in bf16 alone.
    fused = [] if "--bf16" in rest else ["--no-gradient-accumulation-fusion"]
    return [*rest, *fused, "--hybrid-layer-pattern", _placed(blocks, found, rest) + "".join(ahead)]


def _blocks(found: dict[str, str], rest: Sequence[str]) -> list[str]:
    layers = int(found["--num-layers"])
    attention = "+" if "--multi-latent-attention" in rest else "*"
    frequency = moe_freq_type(found.get("--moe-layer-freq", "1"))
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(layers)]
    return [f"{attention}{'E' if has and '--num-experts' in rest else '-'}" for has in frequency]


def _placed(blocks: Sequence[str], found: dict[str, str], rest: Sequence[str]) -> str:
    if layout := found.get("--pipeline-model-parallel-layout"):
        counts = [stage.count("t") for stage in layout_stages(layout)]
    elif first := found.get("--decoder-first-pipeline-num-layers"):
        last = found.get("--decoder-last-pipeline-num-layers")
        ends = int(first), int(last or 0)
        ranks = int(rest[rest.index("--pipeline-model-parallel-size") + 1])
        chunks = 4 if "adaptive" in rest else 1 if "zb-1p" in rest else 2
        between, left = divmod(len(blocks) - sum(ends), ranks * chunks - 1 - (last is not None))
        assert not left, "equally many layers on each stage between the ends"
        counts = [ends[0], *[between] * (ranks * chunks - 1 - (last is not None)), *([ends[1]] if last else [])]
    else:
        return "".join(blocks)
    at = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return "|".join("".join(blocks[a:b]) for a, b in pairwise(at))
