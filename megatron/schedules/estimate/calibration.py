"""What jobs reach of a GPU's peaks, and times that no data sheet gives: each number with its source.

``python -m benchmarks accuracy`` holds estimates with these numbers against published measurements (docs/accuracy.md),
and fits those marked *fitted* anew without each family of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Reached(NamedTuple):
    """What an architecture reaches.

    Args:
        products: share of the peak that large products reach. In FP8 and FP4 it is a share of their peaks.
        attention: time of attention itself over that of its kernel alone. In part it stands for what layers move around
            attention, so it is too high for much longer sequences than were measured (4,096 and 8,192 tokens).
        attention_in_w: part of the time of attention's backward that is in W. W computes no attention: this part stands
            for what jobs lose elsewhere.
        splitting: time by which I and W together exceed a whole backward, as a part of it. Measured costs do not
            contain it.
    """

    products: float
    attention: float
    attention_in_w: float = 0.0
    splitting: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Numbers of a roofline. The defaults of fields are for all architectures.

    Args:
        reached: what each architecture reaches.
        stream, link: shares of the peak that memory streams and collectives reach. Assumed.
        launch: seconds from one kernel to the next. Assumed.
        block_scaled: rate of MXFP8 products over that of FP8 products with one scale for each tensor. Fitted.
        messages: part of the time of experts' messages that stays exposed where stock's overlap, or a weight gradient,
            runs behind them. Elsewhere all of it does. Fitted.
        routed_passes: times that F and I together read or write every routed token in bf16: permuting, padding,
            gathering and scattering. Fitted.
        experts_host: seconds that F, I and W of a layer with experts wait for the host without CUDA graphs. Fitted.
        each_expert: seconds that they also wait for each expert on the rank, whose products the host starts one by one,
            unless a whole iteration is captured or experts' linears are fused with other operations. Measured with an
            H100: F and the whole backward of a layer of Qwen3-30B-A3B with 128 experts took its host 16.2 ms, and 52 %
            of a profile were the experts' linears.
        partial_graphs: part of ``experts_host`` that is left if parts of layers are captured; none is left if a whole
            iteration is. Fitted.
        fused_dispatch: part of ``routed_passes`` and of ``experts_host`` that is left if the kernels that send tokens
            to experts permute them too (HybridEP). Fitted.
    """

    reached: Mapping[str, Reached] = field(default_factory=lambda: REACHED)
    stream: float = 0.85
    link: float = 0.75
    launch: float = 4e-6
    block_scaled: float = 0.89
    messages: float = 0.1
    routed_passes: float = 17.0
    experts_host: float = 5.5e-3
    each_expert: float = 6.5e-5
    partial_graphs: float = 0.39
    fused_dispatch: float = 0.31


# Fitted to NVIDIA's measurements of recipes: hopper, blackwell (B200 and GB200) and blackwell ultra (B300 and GB300).
# Ampere: assumed, with the share of FlashAttention-2 measured on it. Rubin: as Blackwell. AMD's CDNA3: fitted to a run.
# CDNA4: assumed.
# What divides a backward was measured on one H100, in dense layers (docs/accuracy.md), and is assumed for NVIDIA's
# later GPUs: I and W together took no longer than a whole backward, and I took 1.79 and 1.41 times as long as W in
# layers of Llama-3-8B and Llama-3-70B; 0.22 of attention in W gives 1.77 and 1.47. For AMD's GPUs the price of
# splitting is fitted to measured schedules; they fit better with all of attention in I.
REACHED: Mapping[str, Reached] = {
    "ampere": Reached(0.85, 1.0),
    "hopper": Reached(0.84, 2.7, 0.22),
    "blackwell": Reached(0.67, 2.7, 0.22),
    "blackwell ultra": Reached(0.90, 2.7, 0.22),
    "rubin": Reached(0.67, 2.7, 0.22),
    "cdna3": Reached(0.65, 2.5, splitting=0.03),
    "cdna4": Reached(0.75, 2.5, splitting=0.03),
}
CALIBRATED = Calibration()
ERRORS = "estimated; such times were 6 % (median) to 18 % (one in ten) off published measurements, see docs/accuracy.md"
"""How far off estimates for a GPU are for models that they were not fitted to, in words.

``tests/benchmarks/test_accuracy.py`` holds it against the page.
"""
