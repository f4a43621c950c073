"""A large vocabulary: even layers, layer partition, and vocabulary parallelism, with passes that sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmarks import vocabulary_job
from benchmarks.emulated import fitted_latency, simulated
from benchmarks.parts import Claim, Part, Row, Say, Statistics, markdown_table, verdict
from megatron.schedules.planner.layer_partition import partition_layers
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.cost_parts import LayerTimes, Link
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_loads import Load, ModelLoads
from megatron.schedules.schedule.model_loads import Part as Layers
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import StageCosts

if TYPE_CHECKING:
    from benchmarks.emulated_engines import Contestant

_RANKS, _LAYERS, _REPETITIONS = 8, 32, 3
_TIMES = 1.0, 1.1, 0.75
# Llama-3-8B's: 128 thousand words at a width of 4096. S holds as much as 6 % of what a rank's layers do.
_OUTPUT, _HELD_BY_S = 2.74, 0.06
_WITHIN = 0.03
# Twice what passes take elsewhere: what eight ranks on a few cores need to meet in a collective, the ranks of a real
# pipeline do not, and S and T are short.
_UNIT_S, _LATENCY_S = 0.040, 0.001

_HOW = """\
Measured as in "Throughput", 40 ms where the cost is 1, 8 ranks, costs F,I,W 1,1.1,0.75. The model has 32 layers and an
output layer that takes as long as 2.74 of them, as in Llama-3-8B; for stock's flag it has 31. Times are relative to the
work of an average rank: 1 is no bubble. Activation memory is relative to 1F1B's."""


class _Entry(NamedTuple):
    """A contestant, its costs in seconds, and how it handles the output layer."""

    contestant: Contestant
    costs: StageCosts
    output_layer: str


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """Yields a row for each contestant and number of microbatches."""
    for n in (16,) if quick else (16, 32):
        yield from _setting(n, 1 if quick else _REPETITIONS, say)
    yield from vocabulary_job.measure(quick, say)


def _setting(n: int, repetitions: int, say: Say) -> Iterator[Row]:
    from benchmarks.emulated_engines import measure as timed  # Megatron, which --help need not wait for

    say(f"vocabulary: planning for {n} microbatches")
    found = _entries(n)
    contestants, costs = [each.contestant for each in found], [each.costs for each in found]
    expected = sum(simulated(one.schedule, own, 0.0) for one, own in zip(contestants, costs, strict=True))
    say(f"vocabulary: {n} microbatches, about {expected * repetitions:.0f} s")
    timings = [Statistics.of(each) for each in timed(contestants, costs, repetitions, 4 * expected * repetitions + 180)]
    measured = zip(contestants, costs, timings, strict=True)
    ours = [(one.schedule, own, timing.median) for one, own, timing in measured if one.engine == "ours"]
    latency = fitted_latency(ours, _UNIT_S / 2)
    for each, timing in zip(found, timings, strict=True):
        yield _row(each, timing, n, latency, repetitions)


def _costs(layers: int, *, shared: bool = False) -> Costs:
    layer, last = Layers(split=Load(1, 1, 1, 1)), Layers(whole=Load(_OUTPUT, _OUTPUT, _OUTPUT))
    kept = _HELD_BY_S * layers / _RANKS, 0.0
    model = ModelLoads(Layers(), (layer,) * layers, last, kept_for_output=kept, shared_vocabulary=shared)
    forward, input_grad, weight_grad = (_UNIT_S * time for time in _TIMES)
    return Costs(LayerTimes(forward, input_grad, weight_grad), model, Link(_LATENCY_S))


def _entries(n: int) -> list[_Entry]:
    from benchmarks.emulated_engines import of_ours, stocks

    even, shared = _costs(_LAYERS), _costs(_LAYERS, shared=True)
    account = Decisions(layers=(*(_LAYERS // _RANKS,) * (_RANKS - 1), _LAYERS // _RANKS - 1))
    stock = {
        "even layers": Request("1f1b", _RANKS, n, even),
        "--account-for-loss-in-pipeline-split": Request("1f1b", _RANKS, n, _costs(_LAYERS - 1), decisions=account),
    }
    found = []
    for output_layer, request in stock.items():
        contestant = stocks("1F1B", plan(request))
        found.append(_Entry(contestant, request.costs_on(contestant.schedule.placement), output_layer))
    auto = partition_layers(Request("adaptive", _RANKS, n, even, memory_limit=1.0))
    requests = [(f"adaptive {auto.memory_limit:g}", auto, "layer partition")]
    for name in ("1f1b", "v-half", "v-zb"):
        requests.append((name, Request(name, _RANKS, n, shared), "vocabulary parallelism"))
    for limit in (0.5, 0.625, 1.0):
        asked = Request("adaptive", _RANKS, n, shared, memory_limit=limit)
        requests.append((f"adaptive {limit:g}", asked, "vocabulary parallelism"))
    for name, request, output_layer in requests:
        contestant = of_ours(name, request)
        found.append(_Entry(contestant, request.costs_on(contestant.schedule.placement), output_layer))
    return found


def _row(entry: _Entry, timing: Statistics, n: int, latency: float, repetitions: int) -> dict[str, object]:
    schedule = entry.contestant.schedule
    timeline = simulate(schedule, entry.costs)
    work, expected = timeline.ideal, simulated(schedule, entry.costs, latency)
    return {
        "engine": entry.contestant.engine,
        "schedule": entry.contestant.name,
        "output_layer": entry.output_layer,
        "microbatches": n,
        "repetitions": repetitions,
        "latency_seconds": latency,
        "seconds": round(timing.median, 4),
        "low": round(timing.low, 4),
        "high": round(timing.high, 4),
        "over_work": round(timing.median / work, 4),
        "simulated_over_work": round(expected / work, 4),
        "error": round(timing.median / expected - 1, 4),
        "memory": timeline.peak / _RANKS,
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Returns claims about the simulator, then about real jobs."""
    emulated, jobs = _apart(rows)
    worst = max((row for row in emulated if row["engine"] == "ours"), key=lambda row: abs(row["error"]))
    of_the_simulator = Claim(
        f"With a large vocabulary our schedules take the simulated time, within {_WITHIN:.0%}",
        f"{worst['error']:+.1%} at worst ({worst['schedule']}, {worst['output_layer']}, n={worst['microbatches']})",
        verdict(abs(worst["error"]) <= _WITHIN),
    )
    return [of_the_simulator, *vocabulary_job.claims(jobs)]


def section(rows: Sequence[Row]) -> str:
    """Returns how it was measured, and a table; then the same for real jobs."""
    emulated, jobs = _apart(rows)
    return "\n\n".join((_HOW, _table(emulated), vocabulary_job.section(jobs)))


def _apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if "job" not in row], [row for row in rows if "job" in row]


def _table(rows: Sequence[Row]) -> str:
    """Returns a line for each schedule, a column for each number of microbatches."""
    numbers = list(dict.fromkeys(row["microbatches"] for row in rows))
    found = {(row["engine"], row["schedule"], row["output_layer"], row["microbatches"]): row for row in rows}
    heads = ["", "embedding and output layers", *(f"time, n={n}" for n in numbers), "memory"]
    table = []
    for engine, schedule, output_layer in dict.fromkeys(key[:3] for key in found):
        at = [found.get((engine, schedule, output_layer, n)) for n in numbers]
        times = [f"{row['over_work']:.3f}" if row else "" for row in at]
        memory = max(row["memory"] for row in at if row)
        table.append(
            [
                f"{engine} {schedule}",
                f"`{output_layer}`" if output_layer.startswith("--") else output_layer,
                *times,
                f"{memory:.1%}",
            ]
        )
    return markdown_table(heads, table).strip()


PART = Part("vocabulary", "Large vocabularies", measure, claims, section)
