"""Jobs as people write them, drawn at random: a model, its parallel sizes, recompute, and flags of ours.

To extend it, add a model, or a line to one of the functions below. The same seed then draws other jobs, which is fine:
what tests ask of a job holds for every job.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

GATED = "--swiglu --disable-bias-linear --normalization RMSNorm"
LATENT = "--multi-latent-attention --kv-lora-rank 512 --q-lora-rank 1536 --qk-layernorm"
# Billions of parameters, layers, width, heads, groups of queries, width of the MLP, words, tokens of a sample.
MODELS = {
    "7B": (7, 32, 4096, 32, 32, 11008, 32000, 4096, GATED),
    "8B": (8, 32, 4096, 32, 8, 14336, 128256, 8192, GATED),
    "13B": (13, 40, 5120, 40, 40, 20480, 50257, 2048, ""),
    "14B": (14, 40, 5120, 40, 8, 17408, 151936, 4096, f"{GATED} --qk-layernorm --kv-channels 128"),
    "20B": (20, 44, 6144, 64, 64, 24576, 50432, 2048, ""),
    "34B": (34, 48, 8192, 64, 8, 22016, 32000, 16384, GATED),
    "70B": (70, 80, 8192, 64, 8, 28672, 128256, 8192, GATED),
    "175B": (175, 96, 12288, 96, 96, 49152, 51200, 2048, ""),
    "180B": (180, 80, 14848, 232, 8, 59392, 65024, 2048, "--disable-bias-linear"),
}
# The same, with experts.
EXPERTS = {
    "8x7B": (47, 32, 4096, 32, 8, 14336, 32000, 4096, f"{GATED} --num-experts 8 --moe-router-topk 2"),
    "8x22B": (141, 56, 6144, 48, 8, 16384, 32768, 4096, f"{GATED} --num-experts 8 --moe-router-topk 2"),
    "A3B": (
        *(30, 48, 2048, 32, 4, 6144, 151936, 4096),
        f"{GATED} --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --qk-layernorm",
    ),
    "latent": (
        *(16, 27, 2048, 16, 16, 10944, 102400, 4096),
        f"{GATED} {LATENT} --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 "
        "--moe-shared-expert-intermediate-size 2816",
    ),
}
RECOMPUTE = (
    "--recompute-granularity selective",
    "--recompute-granularity selective --recompute-modules layernorm mlp",
    "--recompute-granularity selective --recompute-modules core_attn moe_act",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
)
PRECISIONS = (
    "--bf16",
    "--bf16",
    "--bf16 --transformer-impl local --no-gradient-accumulation-fusion",
    "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
    "--bf16 --fp8-format hybrid --fp8-recipe mxfp8 --first-last-layers-bf16",
    "--fp16",
    "",
)
# What about one job in five has.
SOMETIMES = (
    "--distributed-backend gloo",
    "--attention-dropout 0 --hidden-dropout 0",
    "--position-embedding-type rope",
    "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    "--grad-reduce-in-bf16",
    "--overlap-grad-reduce",
    "--pipeline-layers even",
    "--pipeline-layers auto",
)
LIMITS = ("0.2", "0.35", "50%", "0.8", "1.0", "1.5", "8GiB", "16GiB", "40GiB", "100GiB", "auto")
DEVICES = (24, 40, 48, 64, 80, 96, 141, 192)


@dataclass(frozen=True)
class Job:
    """A job for a dry run.

    Args:
        flags: those that go with every schedule.
        limit: memory limit and saving, which go with ``adaptive`` and ``auto``.
        schedule: name of its schedule.
        machine: value of ``--pipeline-dry-run``.
    """

    flags: tuple[str, ...]
    limit: tuple[str, ...]
    schedule: str
    machine: str

    @property
    def line(self) -> list[str]:
        """Its command line."""
        return [*self.under(self.schedule), *self.limit]

    def under(self, schedule: str) -> list[str]:
        """Command line of the job without its limit, under another schedule."""
        return [*self.flags, "--pipeline-schedule", schedule, "--pipeline-dry-run", self.machine]


def random_job(seed: object, schedules: tuple[str, ...] = ("auto", "auto", "auto", "adaptive"), most: int = 16) -> Job:
    """Draws a job under one of ``schedules`` with at most ``most`` pipeline ranks."""
    draw = random.Random(f"{seed}")
    schedule = draw.choice(schedules)
    size, layers, sizes = _model(draw)
    pipeline = draw.choice([ranks for ranks in (2, 3, 4, 5, 6, 8, 8, 12, 16) if ranks <= most])
    tensor, context, data = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 1, 2)), draw.choice((1, 1, 2, 4, 8))
    expert = draw.choice([1, data]) if "--num-experts" in sizes else 1
    while tensor < 8 and _held(size, pipeline * tensor * expert) > DEVICES[-1] and draw.random() < 0.9:
        tensor *= 2
    distributed, microbatches = draw.random() < 0.7, draw.choice((1, 2, pipeline - 1, pipeline, 2 * pipeline, 13))
    micro = draw.choice((1, 1, 1, 2, 4))
    recompute = draw.choice(("", draw.choice(RECOMPUTE)))
    flags = [
        *(*sizes, *recompute.split(), *draw.choice(PRECISIONS).split()),
        *("--pipeline-model-parallel-size", pipeline, "--tensor-model-parallel-size", tensor),
        *("--context-parallel-size", context, "--expert-model-parallel-size", expert),
        *("--micro-batch-size", micro, "--global-batch-size", micro * data * microbatches, "--train-iters", 100),
        *["--sequence-parallel"] * (tensor > 1 and ("--num-experts" in sizes or draw.random() < 0.7)),
        *["--use-distributed-optimizer"] * distributed,
        *["--untie-embeddings-and-output-weights"] * (draw.random() < 0.6),
        *_ends(draw),
    ]
    for some in SOMETIMES:
        flags += some.split() * (draw.random() < 0.2)
    if schedule == "adaptive" and "--pipeline-layers" not in flags:
        flags += ["--pipeline-layers", "auto"]
    flags += _layers(draw, layers, pipeline, places="--pipeline-layers" in flags)
    held = _held(size, pipeline * tensor * expert, data * context if distributed else 1)
    fitting = [device for device in DEVICES if device > held] or DEVICES[-1:]
    device = draw.choice(("", f"x{draw.choice(fitting)}GiB", f"x{draw.choice(fitting)}GiB", f"x{fitting[0]}GiB"))
    limit = _limit(draw, schedule, "full" in flags)
    if any("=" in word for word in limit) or draw.random() < 0.1:
        flags += ["--pipeline-costs", "1,1.1,0.8,0.05"]
    return Job(tuple(map(str, flags)), limit, schedule, f"{pipeline * tensor * context * data}{device}")


def _held(size: float, parts: int, optimizer_parts: int = 1) -> float:
    """About the GB that a rank needs for its part of ``size`` billion parameters, with some for activations."""
    return 1.5 * (6 + 12 / optimizer_parts) * size / parts


def _model(draw: random.Random) -> tuple[float, int, list[str]]:
    """Billions of parameters, layers, and flags of a model's other sizes."""
    size, layers, hidden, heads, groups, inner, words, length, others = draw.choice(
        [*MODELS.values(), *EXPERTS.values()]
    )
    flags = f"""
        --hidden-size {hidden} --num-attention-heads {heads} --ffn-hidden-size {inner} --vocab-size {words}
        --seq-length {length} --max-position-embeddings {length} {others}
    """
    if groups != heads:
        flags += f"--group-query-attention --num-query-groups {groups}"
    return size, layers, flags.split()


def _layers(draw: random.Random, layers: int, pipeline: int, *, places: bool) -> list[str]:
    """The model's own number of layers, an odd one, or one that the stages divide, with the ends counted or not."""
    each = layers // pipeline
    kind = draw.choice(
        ("own", "odd", "divisible", "divisible") if places else ("own", "odd", "divisible", "ends", "last")
    )
    if kind == "ends":
        ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        return ["--num-layers", f"{each * pipeline - 2}", *ends.split()]
    if kind == "last":
        return ["--num-layers", f"{each * pipeline - 1}", "--decoder-last-pipeline-num-layers", f"{each - 1}"]
    return ["--num-layers", f"{ {'own': layers, 'odd': layers - 1 + layers % 2, 'divisible': each * pipeline}[kind] }"]


def _ends(draw: random.Random) -> list[str]:
    """Multi-token prediction or vocabulary parallelism, which exclude each other, or none of both."""
    return draw.choice(
        ([], [], [], ["--mtp-num-layers", "1"], ["--pipeline-vocabulary-parallel"]),
    )


def _limit(draw: random.Random, schedule: str, full: bool) -> tuple[str, ...]:
    """A memory limit, which ``adaptive`` needs, and recompute and offload by the planner."""
    limited = schedule == "adaptive" or (schedule == "auto" and draw.random() < 0.5)
    found = ["--pipeline-memory-limit", draw.choice(LIMITS)] * limited
    saving = draw.choice(("", "", "", "none", "offload=25", *([] if full else ["recompute", "both=25"])))
    return (*found, *(["--pipeline-save-memory", saving] if saving and schedule in ("auto", "adaptive") else []))
