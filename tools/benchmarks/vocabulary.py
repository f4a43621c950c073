"""A large vocabulary: even layers, layers moved about, and an output layer that all ranks share; passes sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron.schedules.planner.layer_partition import spread_layers
from megatron.schedules.planner.registry import Request, plan
from megatron.schedules.schedule.costs import Costs
from megatron.schedules.schedule.decisions import Decisions
from megatron.schedules.schedule.model_loads import Load, ModelLoads
from megatron.schedules.schedule.model_loads import Part as Layers
from megatron.schedules.schedule.simulator import simulate
from megatron.schedules.schedule.stage_costs import StageCosts
from tools.benchmarks import vocabulary_job
from tools.benchmarks.emulated import fitted_latency, simulated
from tools.benchmarks.parts import Part, Row, Say, Spread, markdown_table

if TYPE_CHECKING:
    from tools.benchmarks.emulated_engines import Contestant

_RANKS, _LAYERS, _REPETITIONS = 8, 32, 3
_TIMES = 1.0, 1.1, 0.75
# Llama-3-8B's: 128 thousand words at a width of 4096. S holds as much as 6 % of what a rank's layers do.
_OUTPUT, _HELD_BY_S = 2.74, 0.06
_WITHIN = 0.03
# Twice what passes take elsewhere: what eight ranks on a few cores need to meet in a collective, the ranks of a real
# pipeline do not, and S and T are short.
_UNIT_S, _HOP_S = 0.040, 0.001

_HOW = """\
As above, real processes and the real messages of a shared vocabulary; a pass sleeps 40 ms where its cost is 1, for S
and T are short and eight ranks meet on the cores of one machine. Costs F,I,W 1,1.1,0.75, 8 ranks, and a model of 32
layers whose output layer takes as long as 2.74 of them, as that of Llama-3-8B. Stock's flag
`--account-for-loss-in-pipeline-split` needs a model of 31 or 39 layers, so its row has 31, and times are given over
what a rank's even share of all work takes. Memory is that of decoder layers and, where it is shared, of the output
layer."""


class _Entry(NamedTuple):
    """A contestant, its costs in seconds, and how its layers and its output layer lie."""

    contestant: Contestant
    costs: StageCosts
    ends: str


def measure(quick: bool, say: Say) -> Iterator[Row]:
    """A row for each contestant and number of microbatches."""
    for n in (16,) if quick else (16, 32):
        yield from _setting(n, 1 if quick else _REPETITIONS, say)
    yield from vocabulary_job.measure(quick, say)


def _setting(n: int, repetitions: int, say: Say) -> Iterator[Row]:
    from tools.benchmarks.emulated_engines import measure as timed  # Megatron, which --help need not wait for

    say(f"vocabulary: planning for {n} microbatches")
    found = _entries(n)
    contestants, costs = [each.contestant for each in found], [each.costs for each in found]
    expected = sum(simulated(one.schedule, own, 0.0) for one, own in zip(contestants, costs, strict=True))
    say(f"vocabulary: {n} microbatches, about {expected * repetitions:.0f} s")
    spreads = [Spread.of(each) for each in timed(contestants, costs, repetitions, 4 * expected * repetitions + 180)]
    measured = zip(contestants, costs, spreads, strict=True)
    ours = [(one.schedule, own, spread.median) for one, own, spread in measured if one.engine == "ours"]
    latency = fitted_latency(ours, _UNIT_S / 2)
    for each, spread in zip(found, spreads, strict=True):
        yield _row(each, spread, n, latency, repetitions)


def _costs(layers: int, *, shared: bool = False) -> Costs:
    layer, last = Layers(split=Load(1, 1, 1, 1)), Layers(whole=Load(_OUTPUT, _OUTPUT, _OUTPUT))
    kept = _HELD_BY_S * layers / _RANKS, 0.0
    model = ModelLoads(Layers(), (layer,) * layers, last, kept_for_output=kept)
    forward, input_grad, weight_grad = (_UNIT_S * time for time in _TIMES)
    return Costs(forward, input_grad, weight_grad, _HOP_S, model=model, shared_vocabulary=shared)


def _entries(n: int) -> list[_Entry]:
    from tools.benchmarks.emulated_engines import of_ours, stocks

    even, shared = _costs(_LAYERS), _costs(_LAYERS, shared=True)
    account = Decisions(layers=(*(_LAYERS // _RANKS,) * (_RANKS - 1), _LAYERS // _RANKS - 1))
    stock = {
        "even layers": Request("1f1b", _RANKS, n, even),
        "--account-for-loss-in-pipeline-split": Request("1f1b", _RANKS, n, _costs(_LAYERS - 1), decisions=account),
    }
    found = []
    for ends, request in stock.items():
        contestant = stocks("1F1B", plan(request))
        found.append(_Entry(contestant, request.costs_on(contestant.schedule.placement), ends))
    auto = spread_layers(Request("adaptive", _RANKS, n, even, memory_limit=1.0))
    requests = [(f"adaptive {auto.memory_limit:g}", auto, "layers placed")]
    for name in ("1f1b", "v-half", "v-zb"):
        requests.append((name, Request(name, _RANKS, n, shared), "vocabulary shared"))
    for limit in (0.5, 0.625, 1.0):
        asked = Request("adaptive", _RANKS, n, shared, memory_limit=limit)
        requests.append((f"adaptive {limit:g}", asked, "vocabulary shared"))
    for name, request, ends in requests:
        contestant = of_ours(name, request)
        found.append(_Entry(contestant, request.costs_on(contestant.schedule.placement), ends))
    return found


def _row(entry: _Entry, spread: Spread, n: int, latency: float, repetitions: int) -> dict[str, object]:
    schedule = entry.contestant.schedule
    timeline = simulate(schedule, entry.costs)
    work, expected = timeline.ideal, simulated(schedule, entry.costs, latency)
    return {
        "engine": entry.contestant.engine,
        "schedule": entry.contestant.name,
        "ends": entry.ends,
        "microbatches": n,
        "repetitions": repetitions,
        "hop_seconds": latency,
        "seconds": round(spread.median, 4),
        "low": round(spread.low, 4),
        "high": round(spread.high, 4),
        "over_work": round(spread.median / work, 4),
        "simulated_over_work": round(expected / work, 4),
        "error": round(spread.median / expected - 1, 4),
        "memory": timeline.peak / _RANKS,
    }


def section(rows: Sequence[Row]) -> str:
    """What was claimed, and a table; then the same of real jobs."""
    jobs = [row for row in rows if "job" in row]
    return "\n\n".join((_emulated([row for row in rows if "job" not in row]), vocabulary_job.section(jobs)))


def _emulated(rows: Sequence[Row]) -> str:
    ours = [row for row in rows if row["engine"] == "ours"]
    worst = max(ours, key=lambda row: abs(row["error"]))
    held = "held" if abs(worst["error"]) <= _WITHIN else "not held"
    claim = (
        f"- Measured within {_WITHIN:.0%} of the simulator: {worst['error']:+.1%} at worst ({worst['schedule']}, "
        f"{worst['ends']}, n={worst['microbatches']}), **{held}**"
    )
    heads = ["", "microbatches", "ends", "time over work", "simulated", "error", "activation memory of 1F1B's"]
    table = [
        [
            f"{row['engine']} {row['schedule']}",
            str(row["microbatches"]),
            str(row["ends"]),
            f"{row['over_work']:.3f} ({row['over_work'] * row['low'] / row['seconds']:.3f}-"
            f"{row['over_work'] * row['high'] / row['seconds']:.3f})",
            f"{row['simulated_over_work']:.3f}",
            f"{row['error']:+.1%}",
            f"{row['memory']:.1%}",
        ]
        for row in rows
    ]
    return "\n\n".join((claim, _HOW, markdown_table(heads, table).strip())) + "\n"


PART = Part("vocabulary", "A large vocabulary", measure, section)
