"""What a rank holds, by arithmetic: known parameter counts, published formulas, and plans in bytes."""

from __future__ import annotations

import pytest

from megatron.schedules.estimate.activations import activations, whole
from megatron.schedules.estimate.build import Build
from megatron.schedules.estimate.device_memory import (
    NOTHING,
    Numbers,
    RankMemory,
    Recompute,
    memory,
    model_memory,
)
from megatron.schedules.estimate.models import MODELS
from megatron.schedules.estimate.parameters import parameters
from megatron.schedules.estimate.parts import Count
from megatron.schedules.estimate.shape import Experts, Latent, Shape
from megatron.schedules.estimate.times import loads
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.simulator import peaks

HIDDEN, HEADS, SEQUENCE, LAYERS = 512, 8, 256, 8
GPT = Shape(("*-",) * LAYERS, HIDDEN, HEADS, SEQUENCE, 1024, groups=HEADS, fused=False)
# arXiv 2412.19437, section 4.2.
DEEPSEEK = Shape(
    ("+-",) * 3 + ("+E",) * 58,
    7168,
    128,
    4096,
    129_280,
    inner=18_432,
    gated=True,
    latent=Latent(1536, 512, 128, 64, 128),
    experts=Experts(2048, 8, 256, 2048),
)


def build(shape: Shape, **more: object) -> Build:
    return Build(shape, (shape.width or shape.hidden) // shape.heads, **more)  # type: ignore[arg-type]


def total(of: Build) -> float:
    found = parameters(of)
    return sum(layer.all for layer in found.layers) + 2 * found.table.all + found.first.all + found.last.all


@pytest.mark.parametrize(
    ("of", "billions"),
    [
        # As published: 8,030,261,248 and 70,553,706,496 (their model cards), and 671B.
        (MODELS["Llama-3-8B"].whole, 8.030261248),
        (MODELS["Llama-3-70B"].whole, 70.553706496),
        (build(DEEPSEEK, biases=False, two_norms=False, head_norms=True, experts=256), 671.026),
    ],
    ids=["Llama-3-8B", "Llama-3-70B", "DeepSeek-V3"],
)
def test_published_models_have_their_parameters(of: Build, billions: float):
    assert total(of) / 1e9 == pytest.approx(billions, abs=1e-3 if billions > 100 else 1e-9)


def test_tensor_parallel_ranks_together_have_the_model_and_norms_and_biases_of_rows_again():
    one, two = total(build(GPT)), total(build(GPT, tensor=2))
    again = LAYERS * (4 * HIDDEN + 2 * HIDDEN) + 2 * HIDDEN  # two norms, two biases behind rows; the last norm
    assert 2 * two - one == again


@pytest.mark.parametrize(
    ("more", "width"),
    [
        # arXiv 2205.05198, table 2, in hidden widths a token; 5as/h of each are attention's scores.
        ({}, 34.0),
        ({"tensor": 4}, 10 + 24 / 4),
        ({"tensor": 4, "sequence_parallel": True}, 34 / 4),
    ],
    ids=["alone", "tensor parallel", "and sequence parallel"],
)
def test_a_layer_keeps_what_the_paper_counts(more: dict[str, object], width: float):
    of = build(GPT, **more)
    layer = activations(of).layers[0]
    scores = 5 * HEADS * SEQUENCE / HIDDEN / of.tensor
    assert whole(layer).forward / HIDDEN == pytest.approx(width + scores)
    assert whole(layer, ("core_attn",)).forward / HIDDEN == pytest.approx(width)


def test_for_w_linears_keep_their_inputs_and_the_gradients_of_what_comes_out_of_them():
    layer = activations(build(GPT)).layers[0]
    assert whole(layer).weights / HIDDEN == 2 * (1 + 1 + 1 + 4) + 2 * (3 + 1 + 4 + 1)


def asked(
    of: Build, counts: tuple[int, ...], recompute: Recompute = NOTHING, offloaded: tuple[float, ...] | None = None
) -> Request:
    """What a plan of ``of`` is made for, so many layers on each stage."""
    costs = Costs(model=loads(of), memory=model_memory(of, SEQUENCE, recompute))
    return Request("1f1b", len(counts), 2 * len(counts), costs, decisions=Decisions(counts, offloaded=offloaded))


def ranks(schedule: str, of: Request, size: int = 4) -> list[float]:
    """Bytes of activations on each rank, parameters aside."""
    made = plan(Request(schedule, size, 2 * size))
    return [rank.activations for rank in in_bytes(made, of, Count(), Numbers(2, 4, 12))]


def in_bytes(made: Schedule, of: Request, count: Count, numbers: Numbers) -> tuple[RankMemory, ...]:
    held, size = of.costs.in_bytes, made.ranks
    assert held is not None
    return memory(made, of.costs_on(made.placement), held.of_rank(size), [count] * size, numbers, [0.0] * size)


def test_bytes_are_a_plans_microbatches_times_those_of_one():
    of = build(GPT)
    one = SEQUENCE * whole(activations(of).layers[0]).forward * LAYERS / 4
    made = plan(Request("1f1b", 4, 8))
    inner = [peak * one for peak in peaks(made, Costs().on(made.placement))][1:-1]
    assert ranks("1f1b", asked(of, (2,) * 4))[1:-1] == pytest.approx(inner)


def test_an_unequal_layer_is_on_the_rank_that_has_it():
    of = build(GPT)
    even, moved = (ranks("1f1b", asked(of, counts)) for counts in ((2, 2, 2, 2), (1, 3, 2, 2)))
    assert moved[0] < even[0]
    assert moved[1] == pytest.approx(1.5 * even[1])
    assert moved[2:] == even[2:]


def test_layers_that_keep_their_input_alone_hold_little_but_one_of_them_as_a_whole():
    of, counts = build(GPT), (2,) * 4
    layer, tokens = activations(of).layers[0], SEQUENCE
    for together, inputs in ((1, 2), (2, 1)):
        found = ranks("1f1b", asked(of, counts, Recompute(layers=None, together=together)))[1]
        # Of the three microbatches' inputs one belongs to the layers that are there as a whole.
        kept = (3 * inputs - 1) * activations(of).input
        assert found == pytest.approx(tokens * (kept + together * whole(layer).forward))


def test_what_goes_to_the_host_is_there_and_not_on_the_device():
    of, counts = build(GPT), (2,) * 4
    text = "\n".join(
        ",".join(row)
        for row in (
            ["0F0", "0O0", "0L0", "0B0"],
            ["1F0", "1O0", "1L0", "1B0"],
            ["2F0", "2O0", "2L0", "2B0"],
            ["3F0", "3O0", "3L0", "3B0"],
        )
    )
    made = plan(Request("file", 4, 1, csv=text))
    offloaded = asked(of, counts, offloaded=(1.0, 1.0, 1.0, 0.5))
    found = in_bytes(made, offloaded, Count(1e6), Numbers(2, 4, 12, on_host=0.5))
    layer = SEQUENCE * whole(activations(of).layers[0]).forward
    assert found[1].activations == pytest.approx(2 * layer)
    assert [rank.host - 6e6 for rank in found[1:]] == pytest.approx([2 * layer, 2 * layer, layer], rel=0.05)
    assert [rank.optimizer for rank in found] == [6e6] * 4


def test_data_parallel_ranks_share_the_optimizer_and_experts_have_fewer_of_them():
    numbers = Numbers(2, 4, 12, shared_by=(8, 2))
    assert numbers.state(Count(dense=16.0, expert=4.0)) == 12 * (16 / 8 + 4 / 2)


def test_a_shared_vocabulary_is_on_all_ranks_alike_and_an_end_has_a_table_without():
    found = parameters(build(GPT, positions=SEQUENCE))
    table = GPT.vocabulary * HIDDEN
    apart, shared = (found.by_stage((2, 2, 2, 2), (0, 1, 2, 3), each) for each in (False, True))
    in_a_v = found.by_stage((1,) * 8, (0, 1, 2, 3, 3, 2, 1, 0), False)
    assert [a.all - b.all for a, b in zip(apart, shared, strict=True)] == [table / 2, -table / 2, -table / 2, table / 2]
    assert in_a_v[0].all - in_a_v[1].all == 2 * table + SEQUENCE * HIDDEN + 2 * HIDDEN
