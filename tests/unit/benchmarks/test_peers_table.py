"""Table of the comparison with peers."""

from __future__ import annotations

import pytest

from benchmarks.learner import SHAPES
from benchmarks.peers.figures import Learning, Plan, Run, Step
from benchmarks.peers.limits import MachineLimits, ShapeLimits, useful_flop
from benchmarks.peers.table import UNKNOWN, Result, machine_section, put_between, shape_section

GIB = 1 << 30
PLAN = Plan(warm_up=1, least=2, seconds=0.0)


def result(*step_seconds: float, informative: int = 10, learned: int = 1) -> Result:
    """A result of one run for each given duration of its steps."""
    runs = [
        Run(tuple(Step(n * seconds, 10, informative, reward=n / 10) for n in range(4)), 2 * GIB, 0.0)
        for seconds in step_seconds
    ]
    return Result(PLAN, tuple(runs), learned)


def row(lines: list[str], way: str) -> list[str]:
    """Cells of a way's row."""
    return next([cell.strip() for cell in line.split("|")[2:-1]] for line in lines if line.startswith(f"| {way} |"))


def test_ratios_are_taken_within_each_round() -> None:
    # The second round was slow for both: of medians the ratio would be another.
    results = {"TRL": result(1.0, 10.0, 1.0), "async": result(0.5, 2.5, 0.5)}
    lines = shape_section("demo", "about", results, "TRL", None, None)
    assert row(lines, "async")[:2] == ["20.0 (4.0 to 20.0)", "2.00 (2.00 to 4.00)"]
    assert row(lines, "TRL")[1] == "1.00"


def test_equal_samples_and_informative_samples_are_told_apart() -> None:
    results = {"TRL": result(1.0, informative=5), "async": result(1.0)}
    cells = row(shape_section("demo", "about", results, "TRL", None, None), "async")
    assert (cells[1], cells[3]) == ("1.00", "2.00")


def test_without_an_informative_sample_of_the_peer_the_ratio_is_infinite() -> None:
    results = {"TRL": result(1.0, informative=0), "async": result(1.0)}
    assert row(shape_section("demo", "about", results, "TRL", None, None), "async")[3] == UNKNOWN


def test_a_threshold_that_was_not_reached_is_said() -> None:
    results = {"TRL": result(1.0, learned=1), "async": result(0.5, learned=1), "sync": result(3.0, learned=1)}
    easy = shape_section("demo", "about", results, "TRL", Learning(0.2, 1, 9.0), None)
    hard = shape_section("demo", "about", results, "TRL", Learning(0.9, 1, 9.0), None)
    assert [row(easy, way)[5] for way in results] == ["2.0", "1.0", "6.0"]
    assert row(hard, "TRL")[5] == UNKNOWN


def test_every_row_has_a_cell_for_each_column() -> None:
    limits = ShapeLimits({1: 10.0, 2: 15.0}, plain=5.0, learner=20.0, learner_flop_per_s=5e9)
    results = {"TRL": result(1.0), "async": result(0.5), "sync": result(1.0)}
    lines = shape_section("demo", "about", results, "TRL", Learning(0.2, 1, 9.0), limits)
    assert len({line.count("|") for line in lines[4 : 4 + 2 + len(results)]}) == 1
    assert "Asynchronous ÷ synchronous, trained samples/s: 2.00." in lines


def test_the_learner_is_a_share_of_the_machine() -> None:
    shape = ShapeLimits({1: 10.0}, plain=5.0, learner=20.0, learner_flop_per_s=25e9)
    lines = machine_section(MachineLimits({1: 60e9, 2: 100e9}, 2**30, 5000.0), {"demo": shape})
    assert "| our learner's useful operations, demo | 25 GFLOP/s, 25% of that |" in lines


def test_useful_operations_count_each_prompt_once() -> None:
    shape = SHAPES["demo"]
    width, vocabulary = shape.config["hidden_size"], shape.config["vocab_size"]
    weights = 2 * (2 * width * width + 2 * width * width // 2 + 3 * width * 384)
    prompts = 64 * 14
    responses = 64 * 8 * 4  # 3 to 5 tokens
    assert useful_flop(shape) == pytest.approx(
        6 * (weights * (prompts + responses) + width * vocabulary * responses), rel=0.05
    )


def test_the_document_keeps_what_is_around_the_markers() -> None:
    document = "before\n<!-- peers -->\nold\n<!-- /peers -->\nafter\n"
    once = put_between(document, ["new"])
    assert once == "before\n<!-- peers -->\nnew\n<!-- /peers -->\nafter\n"
    assert put_between(once, ["new"]) == once


@pytest.mark.parametrize("document", ["", "<!-- peers -->", "<!-- /peers --> <!-- peers -->", "<!-- peers -->" * 2])
def test_a_document_without_its_markers_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="there must be one"):
        put_between(document, ["new"])
