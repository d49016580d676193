# SPDX-License-Identifier: Apache-2.0
"""DTensors of all placements that keep blocks whole step as one process does; others are refused.

A rank that fails does not leave the others waiting.
"""

import fsdp_faults as faults
import fsdp_placements as ranks
import pytest
import torch
from fsdp_faults import REFUSED
from fsdp_placements import CASES, ON_FOUR
from nests import assert_same
from params import each

pytestmark = pytest.mark.usefixtures("one_torch_thread")


# --- Steps ----------------------------------------------------------------------------------------


@each(ranks.EVERY, ON_FOUR)
def test_distributed_parameters_step_with_the_bits_of_one_process(name, standing_ranks):
    expected = ranks.stepped(name, alone=True)
    for got in standing_ranks(4 if name in ON_FOUR else 2).run(ranks.stepped, name=name):
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


@pytest.mark.slow
def test_fsdp2_over_tensor_parallelism_steps_with_the_bits_of_one_process(standing_ranks):
    _, expected = ranks.stepped_in_parallel(alone=True)
    for placements, got in standing_ranks(4).run(ranks.stepped_in_parallel, alone=False):
        assert "_StridedShard(dim=0, sf=2), Shard(dim=0)" in placements[0]
        assert placements[1] == "(Shard(dim=0), Shard(dim=1))"
        assert_same(got, expected)


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_cut_inside_of_a_block_is_refused_on_all_ranks_and_changes_nothing(name, standing_ranks):
    """The message names the parameter, its shape and what to do."""
    (shape,) = REFUSED[name].shapes
    for got in standing_ranks(2).run(faults.refused, name=name):
        kind, message = got["error"]
        assert kind == "ValueError" and got["later"] == got["error"]
        assert message.startswith(f"bad: got shape {shape} sharded as")
        assert "set a smaller block_size" in message and "fp32_params=['bad']" in message
        assert got["same"] and got["states"] == 0


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
    alone = faults.stepped_over_a_nan(alone=True)
    assert alone["stepped"][0] == "FloatingPointError"
    every = standing_ranks(2).run(faults.stepped_over_a_nan)
    assert_one_rank_met_a_fault_and_all_raise_when_asked(every)
    for got in every:
        assert_same(got["results"], alone["results"])


@pytest.mark.parametrize("is_whole_state", [False, True], ids=["moments", "state"])
@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault_assigned_on_one_rank_is_stepped_over_and_raises_on_all_when_asked(
    name, is_whole_state, standing_ranks
):
    """A rank that raised alone would leave the others waiting in their next collective."""
    arguments = {"name": name, "is_whole_state": is_whole_state}
    every = standing_ranks(2).run(faults.assigned_a_fault, **arguments)
    assert_one_rank_met_a_fault_and_all_raise_when_asked(every)
    for got in every:
        sound, faulty = (values.clone() for values in got["weights"])
        sound[faults.BAD_BLOCK] = faulty[faults.BAD_BLOCK] = 0
        assert torch.equal(faulty, sound)


@pytest.mark.parametrize(
    "breakage", ["without scales", "replicated", "of another step", "of AdamW"]
)
def test_load_of_a_state_that_is_broken_on_one_rank_raises_on_all(breakage, standing_ranks):
    params, optimizer = ranks.make(faults.NONFINITE, ranks.values_of(faults.NONFINITE))
    ranks.run(faults.NONFINITE, None, params, optimizer, 0, 3)
    every = standing_ranks(2).run(faults.loaded_broken, breakage=breakage)
    assert [got["error"][0] for got in every] == ["ValueError"] * 2
    first, second = (got["error"][1] for got in every)
    if breakage == "of another step":
        assert "step 2 on this rank, of steps 1 to 2" in first and "step 1 on this" in second
    elif breakage == "of AdamW":
        assert "fp32 optimizer on some ranks only" in first and second == first
    else:
        assert "other ranks" not in first and "other ranks" in second
    for got in every:
        assert got["same"]
        assert_same(got["results"], ranks.results(params, optimizer))


# --- Loads ---------------------------------------------------------------------------------------


both_forms = pytest.mark.parametrize("form", ["8bit", "fp32"])


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", ["rows", "columns", "replicated", "columns corrected"])
def test_whole_states_load_into_distributed_parameters_as_into_plain_ones(
    name, form, standing_ranks
):
    saved = ranks.saved(name, form, alone=True)
    expected = ranks.resumed(name, saved, alone=True)
    for got in standing_ranks(2).run(ranks.resumed, name=name, saved=saved):
        assert_same(got, expected)


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", ["rows", "columns", "columns corrected", "columns dynamic"])
def test_distributed_states_are_saved_as_those_of_one_process(name, form, standing_ranks):
    expected = ranks.saved(name, form, alone=True)
    for got in standing_ranks(2).run(ranks.saved, name=name, form=form):
        assert_same(got, expected)
