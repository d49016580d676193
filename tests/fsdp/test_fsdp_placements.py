# SPDX-License-Identifier: Apache-2.0
"""DTensors of all placements that keep blocks whole step as one process does; others are refused.

A rank that fails does not leave the others waiting.
"""

import fsdp_placements as ranks
import pytest
import torch
from fsdp_placements import CASES, ON_FOUR, PLACED, REFUSED
from nests import assert_same

pytestmark = pytest.mark.usefixtures("one_torch_thread")


# --- Steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_distributed_parameters_step_with_the_bits_of_one_process(name, standing_ranks):
    expected = ranks.stepped_alone(name)
    for got in standing_ranks(2).run(ranks.stepped, name=name):
        assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_distributed_parameters_on_four_ranks_step_with_the_bits_of_one(name, standing_ranks):
    expected = ranks.stepped_alone(name)
    for got in standing_ranks(4).run(ranks.stepped, name=name):
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("cases", "num_ranks"), [(CASES, 2), pytest.param(ON_FOUR, 4, marks=pytest.mark.slow)]
)
def test_norm_of_distributed_gradients_is_that_of_one_process_on_all_ranks(
    cases, num_ranks, standing_ranks
):
    """A rank without a gradient still takes part, and what it had is not counted."""
    expected = ranks.norms_alone(list(cases))
    first, *others = standing_ranks(num_ranks).run(ranks.norms, names=list(cases))
    for name, (norm, fewer) in first.items():
        assert norm == pytest.approx(expected[name], rel=2**-23)
        assert fewer <= norm
    # Ranks whose own gradients are replicated keep them.
    assert all(other[name][0] == first[name][0] for other in others for name in first)


def test_distributed_parameters_in_strides_step_with_the_bits_of_one_process(standing_ranks):
    expected = ranks.stepped_alone("columns small")
    for got in standing_ranks(2).run(ranks.stepped_in_strides):
        assert_same(got, expected)


@pytest.mark.slow
def test_fsdp2_over_tensor_parallelism_steps_with_the_bits_of_one_process(standing_ranks):
    _, expected = ranks.stepped_in_parallel(alone=True)
    for placements, got in standing_ranks(4).run(ranks.stepped_in_parallel, alone=False):
        assert "_StridedShard(dim=0, sf=2), Shard(dim=0)" in placements[0]
        assert placements[1] == "(Shard(dim=0), Shard(dim=1))"
        assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", PLACED)
def test_extent_of_a_distributed_tensor_is_what_the_rank_holds(mesh_shape, standing_ranks):
    for wrong, fit in standing_ranks(torch.Size(mesh_shape).numel()).run(
        ranks.wrong_extents, mesh_shape=mesh_shape
    ):
        assert wrong == []
        assert fit >= 12


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_cut_inside_of_a_block_is_refused_on_all_ranks_and_changes_nothing(name, standing_ranks):
    """The message names the parameter, its shape and what to do, of which the second works."""
    (shape,) = REFUSED[name].shapes
    expected = ranks.refused_alone(name)
    for got in standing_ranks(2).run(ranks.refused, name=name):
        kind, message = got["error"]
        assert kind == "ValueError" and got["later"] == got["error"]
        assert message.startswith(f"bad: got shape {shape} sharded as")
        assert "set a smaller block_size" in message and "fp32_params=['bad']" in message
        assert got["same"] and got["states"] == 0
        assert_same(got["then"], expected)


# --- Trouble on one rank --------------------------------------------------------------------------


def assert_one_rank_met_a_fault_and_all_raise_when_asked(every):
    assert [got["here"] for got in every] == [0, 1]
    for got in every:
        assert got["stepped"] is None
        kind, message = got["checked"]
        assert kind == "FloatingPointError" and message.startswith("1 blocks met a non-finite")
        before, after = got["blocks"]
        assert torch.equal(before, after)


def test_nan_on_one_rank_raises_on_all_ranks_when_asked_and_on_none_before(standing_ranks):
    expected = ranks.stepped_over_a_nan_alone()
    every = standing_ranks(2).run(ranks.stepped_over_a_nan)
    assert_one_rank_met_a_fault_and_all_raise_when_asked(every)
    for got in every:
        assert_same(got["results"], expected)


@pytest.mark.parametrize("is_whole_state", [False, True], ids=["moments", "state"])
@pytest.mark.parametrize("name", ranks.FAULTS)
def test_fault_assigned_on_one_rank_is_stepped_over_and_raises_on_all_when_asked(
    name, is_whole_state, standing_ranks
):
    """A rank that raised alone would leave the others waiting in their next collective."""
    arguments = {"name": name, "is_whole_state": is_whole_state}
    every = standing_ranks(2).run(ranks.assigned_a_fault, **arguments)
    assert_one_rank_met_a_fault_and_all_raise_when_asked(every)
    for got in every:
        sound, faulty = (values.clone() for values in got["weights"])
        sound[ranks.BAD_BLOCK] = faulty[ranks.BAD_BLOCK] = 0
        assert torch.equal(faulty, sound)


@pytest.mark.parametrize("breakage", ranks.BREAKAGES)
def test_load_of_a_state_that_is_broken_on_one_rank_raises_on_all(breakage, standing_ranks):
    params, optimizer = ranks.make(ranks.NONFINITE, ranks.values_of(ranks.NONFINITE))
    ranks.run(ranks.NONFINITE, None, params, optimizer, 0, 3)
    every = standing_ranks(2).run(ranks.loaded_broken, breakage=breakage)
    errors = [got["error"] for got in every]
    assert [kind for kind, _ in errors] == ["ValueError"] * 2
    assert "other ranks" not in errors[0][1] and "other ranks" in errors[1][1]
    for got in every:
        assert got["same"]
        assert_same(got["results"], ranks.results(params, optimizer))


def test_load_of_steps_that_differ_between_ranks_raises_on_all_and_changes_nothing(standing_ranks):
    """Each rank may have a disk of its own, and on it another checkpoint."""
    params, optimizer = ranks.make(ranks.NONFINITE, ranks.values_of(ranks.NONFINITE))
    ranks.run(ranks.NONFINITE, None, params, optimizer, 0, 3)
    for got, step in zip(standing_ranks(2).run(ranks.loaded_of_another_step), (2, 1), strict=True):
        kind, message = got["error"]
        assert kind == "ValueError"
        assert f"of step {step} on this rank, of steps 1 to 2 on all" in message
        assert got["same"]
        assert_same(got["results"], ranks.results(params, optimizer))


# --- Copies, loads and the report -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ranks.WAYS)
@pytest.mark.parametrize("name", ["rows", "columns", "columns corrected"])
def test_copy_of_an_optimizer_of_distributed_states_steps_as_the_first(name, way, standing_ranks):
    expected = ranks.stepped_alone(name)
    for both in standing_ranks(2).run(ranks.stepped_as_a_copy, name=name, way=way):
        for got in both:
            assert_same(got, expected)


both_forms = pytest.mark.parametrize("form", ["8bit", "fp32"])


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", ["rows", "columns", "replicated", "columns corrected"])
def test_whole_states_load_into_distributed_parameters_as_into_plain_ones(
    name, form, standing_ranks
):
    saved = ranks.saved_alone(name, form)
    expected = ranks.resumed_alone(name, saved)
    for got in standing_ranks(2).run(ranks.resumed, name=name, saved=saved):
        assert_same(got, expected)


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", ["rows", "columns", "columns corrected", "columns dynamic"])
def test_distributed_states_are_saved_as_those_of_one_process(name, form, standing_ranks):
    expected = ranks.saved_alone(name, form)
    for got in standing_ranks(2).run(ranks.saved_whole, name=name, form=form):
        assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "columns", "columns corrected"])
def test_distributed_states_load_into_plain_parameters_with_the_same_bits(name, standing_ranks):
    expected = ranks.stepped_alone(name)
    for got in standing_ranks(2).run(ranks.resumed_from_ranks, name=name):
        assert_same(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["columns", "rows", "columns corrected"])
def test_memory_report_has_one_row_for_each_distributed_parameter(name, standing_ranks):
    """Columns are many runs of elements, so many pieces of one parameter."""
    shapes = CASES[name].shapes
    for rows, text, sizes in standing_ranks(2).run(ranks.report_of, name=name):
        assert [row["name"] for row in rows] == [f"w{number}" for number in range(len(shapes))]
        assert [row["shape"] for row in rows] == list(shapes)
        counted = ("numel", "state_bytes", "correction_bytes")
        assert [tuple(row[key] for key in counted) for row in rows] == sizes
        lines = [line.split()[0] for line in text.splitlines()]
        assert [line for line in lines if line.startswith("w")] == [row["name"] for row in rows]
