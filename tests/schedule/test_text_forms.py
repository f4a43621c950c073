"""The text forms: what is written reads back, and what cannot be read is refused in one line that says why."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.schedule.placement import interleaved, sequential, v_shape, zigzag
from megatron.schedules.schedule.schedule import Schedule
from megatron.schedules.schedule.text_forms import from_csv, from_json, to_csv, to_json
from megatron.schedules.utils.errors import PlanError
from tests.planner.made_schedules import NAMED, examples, planned, schedules, written


def no_csv(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        from_csv(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def no_json(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (3, 4), (4, 8)])
def test_named_schedules_read_back(name: str, ranks: int, microbatches: int):
    schedule = planned(name, ranks, microbatches).schedule
    assert from_csv(to_csv(schedule), name) == schedule
    assert from_json(to_json(schedule)) == schedule


@examples(150)
@given(schedules())
def test_any_schedule_reads_back(schedule: Schedule):
    assert from_json(to_json(schedule)) == schedule
    read = from_csv(to_csv(schedule), schedule.name)
    assert (read.order, read.microbatches) == (schedule.order, schedule.microbatches)
    assert read.placement.rank_of == schedule.placement.rank_of


@pytest.mark.parametrize(
    "placement",
    [sequential(3), v_shape(3), interleaved(3, 2), interleaved(2, 4), zigzag(2, 3), zigzag(3, 4)],
    ids=str,
)
def test_a_placement_is_known_by_its_stages(placement):
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        rows.append(",".join([f"{s}F0" for s in stages] + [f"{s}B0" for s in reversed(stages)]))
    assert from_csv("\n".join(rows)).placement == placement


def test_another_placement_is_read_as_it_stands():
    read = from_csv("1F0,3F0,3B0,1B0\n0F0,2F0,2B0,0B0\n")
    assert (read.placement.name, read.placement.rank_of) == ("custom", (1, 0, 1, 0))


def test_csv_is_one_row_a_rank_and_one_cell_a_pass():
    schedule = planned("v-half", 3, 5).schedule
    rows = list(csv.reader(io.StringIO(to_csv(schedule))))
    assert rows == [[str(work) for work in row] for row in schedule.order]


def test_idle_slots_spaces_and_either_line_ending_are_passed_over():
    assert from_csv("0F0,, 0B0 ,\r\n,1F0,1B0\r\n") == from_csv("0F0,0B0\n1F0,1B0")
    assert from_csv("0F0,0B0\r1F0,1B0") == from_csv("0F0,0B0\n1F0,1B0")


def test_json_takes_more_beside_the_schedule():
    schedule = planned("1f1b", 2, 2).schedule
    assert from_json(json.dumps(json.loads(to_json(schedule)) | {"costs": [1, 1, 1]})) == schedule


# --- CSV that is no schedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", "\r\n"])
def test_an_empty_csv(text: str):
    assert no_csv(text).startswith("the schedule's CSV is empty: one row a rank is needed")


def test_a_csv_of_idle_slots_only():
    no_csv(",,\n,")


@pytest.mark.parametrize(
    ("text", "place", "cell"),
    [
        ("0F0,0X0\n1F0,1B0", "row 1, cell 2", "'0X0'"),
        ("0F0,0B0\n1F0,,hello", "row 2, cell 3", "'hello'"),
        ("0F0,0B0\n\n1F0,hello", "row 3, cell 2", "'hello'"),
        ("0F0;0B0\n1F0;1B0", "row 1, cell 1", "'0F0;0B0'"),
        ("rank,passes\n0F0,0B0", "row 1, cell 1", "'rank'"),
        ("0F0,-1B0", "row 1, cell 2", "'-1B0'"),
        ("0F0,0SEND_F0", "row 1, cell 2", "'0SEND_F0'"),
    ],
)
def test_a_cell_that_is_no_pass_is_named_by_its_place(text: str, place: str, cell: str):
    message = no_csv(text)
    assert message.startswith(f"CSV {place}: {cell} is not a pass")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0B0\n0F1,0B1", "stage 0 stands on rank 0 and on rank 1; a stage has one rank"),
        ("0F0,0B0\n3F0,3B0", "stages must be numbered from 0 with equally many on each of the 2 ranks, not [0, 3]"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0", "stages must be numbered from 0 with equally many on each of the 2 ranks"),
        ("0F0,1F0,1B0,0B0\n,", "every rank must hold equally many stages; the CSV gives [2, 0]"),
        ("0F0,0B0\n1F0", "1B0 (or 1I0 and 1W0) is missing"),
        ("0F1,0B1\n1F1,1B1", "0F0 is missing"),
        ("0F0,0F0,0B0\n1F0,1B0", "0F0 stands 2 times"),
        ("0B0,0F0\n1F0,1B0", "0B0 stands before 0F0, which it needs"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "the order cannot finish: rank 0 at 0B0, rank 1 at 1F1"),
    ],
)
def test_cells_that_make_no_schedule(text: str, expected: str):
    assert expected in no_csv(text)


def test_one_number_too_many_takes_no_time():
    """Nothing may be made for each of the microbatches or stages that a slip of the keyboard asks for."""
    assert "0F0 is missing" in no_csv("0F99999999,0B0\n1F0,1B0")
    assert "stages must be numbered from 0" in no_csv("0F0,0B0\n99999999F0,1B0")


@pytest.mark.parametrize("text", ['"' + "0F0," * 50_000, "9" * 5000 + "F0,0B0"], ids=["open quote", "long number"])
def test_text_beyond_the_readers_limits(text: str):
    no_csv(text)


@examples(300)
@given(st.text('01F B,W\n\r"', max_size=24))
def test_any_csv_is_a_schedule_or_is_refused(text: str):
    try:
        schedule = from_csv(text)
    except PlanError:
        return
    assert from_csv(to_csv(schedule)) == schedule


# --- JSON that is no schedule -------------------------------------------------------------------------------------


GOOD = json.loads(to_json(written(v_shape(2), 1, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")))


def test_what_the_wrong_ones_are_made_from_is_right():
    assert from_json(json.dumps(GOOD)).microbatches == 1


@pytest.mark.parametrize("text", ["", "{", "null", "3", "[]", '"order"', "{}", "NaN", "[" * 100_000])
def test_what_is_no_schedule_at_all(text: str):
    assert no_json(text).startswith("this JSON is not a schedule")


@pytest.mark.parametrize("key", ["name", "placement", "microbatches", "order"])
def test_nothing_can_be_left_out(key: str):
    assert key in no_json(json.dumps({k: v for k, v in GOOD.items() if k != key}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("microbatches", "1"),
        ("microbatches", 1.0),
        ("microbatches", None),
        ("microbatches", 0),
        ("microbatches", 2),
        ("order", None),
        ("order", []),
        ("order", "0F0"),
        ("order", [["0F0", 3], []]),
        ("order", [[None], []]),
        ("order", [["0F0", "3F0", "3B0", "hello"], ["1F0", "2F0", "2B0", "1B0"]]),
        ("placement", None),
        ("placement", "v"),
        ("placement", {"name": "v"}),
        ("placement", {"name": "v", "rank_of": None}),
        ("placement", {"name": "v", "rank_of": []}),
        ("placement", {"name": "v", "rank_of": ["0", "1", "1", "0"]}),
        ("placement", {"name": "v", "rank_of": [0.0, 1.0, 1.0, 0.0]}),
        ("placement", {"name": "v", "rank_of": [0, -1, -1, 0]}),
        ("placement", {"name": "v", "rank_of": [0, 1, 1]}),
    ],
)
def test_nothing_can_be_of_another_sort(key: str, value: object):
    no_json(json.dumps({**GOOD, key: value}))


@pytest.mark.parametrize(
    ("rank_of", "order"),
    [
        ([0, 0, 1], [["0F0", "1F0", "1B0", "0B0"], ["2F0", "2B0"]]),
        ([0, 2], [["0F0", "0B0"], [], ["1F0", "1B0"]]),
    ],
    ids=["two stages and one", "a rank without"],
)
def test_every_rank_holds_equally_many_stages(rank_of: list[int], order: list[list[str]]):
    """A placement's chunks, and with them every cost, would otherwise be made up."""
    made = {"name": "mine", "placement": {"name": "custom", "rank_of": rank_of}, "microbatches": 1, "order": order}
    assert "equally many" in no_json(json.dumps(made))
