# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own tests ask of an optimizer, asked of ours and of fp32 AdamW beside it.

`conformance_worker.BEHAVIOURS` is the table.  Where AdamW fails, the failure is DeepSpeed's: it is
listed here with its reason, and expected, so that a repair of DeepSpeed is noticed.
"""

from dataclasses import dataclass

import pytest
import torch
from conformance_worker import (
    ALL,
    BEHAVIOURS,
    OPTIMIZERS,
    load_universal,
    run_cases,
    save_universal,
)
from ranks import run_ranks

# A first run also builds DeepSpeed's ops; a build that is interrupted leaves a lock behind.
pytestmark = pytest.mark.timeout(1800)


@dataclass(frozen=True)
class Limit:
    """Something that DeepSpeed cannot do: why, a part of the error, whether we fail as well."""

    reason: str
    text: str
    ours: bool = True


FLAT = ("zero1", "zero2 offload", "bf16 optimizer")
NO_VIEWS = "argument of type 'NoneType' is not iterable"
LIMITS = {
    **{
        (layout, "groups_state_get"): Limit(
            "views of states are taken after the step of the first group only",
            "exp_avg not found in optimizer state fragment",
            ours=False,
        )
        for layout in ("zero1", "zero2 offload")
    },
    **{
        (layout, name): Limit("views of states are lost by a load", NO_VIEWS, ours=False)
        for layout in FLAT
        for name in ("loaded_state_get", "reloaded_state_set")
    },
    **{
        (layout, "offloaded_state_set"): Limit(
            "views of states are lost by reload_states", NO_VIEWS, ours=False
        )
        for layout in ("zero1", "zero2")
    },
    ("zero3 offload", "odd_param_set"): Limit(
        "parts of equal size are cut from an unpadded value", "exceeds dimension size (131)"
    ),
    ("zero3", "offload_weights"): Limit(
        "padding is counted in parts, not in the buffer", "exceeds dimension size"
    ),
    ("zero3", "offload_optimizer_stage3"): Limit("it was written for FusedAdam", "FusedAdam"),
    ("zero3 offload", "checkpoint_weights"): Limit(
        "of a weight tied within one module, ZeRO-3 saves one name", '"tied"'
    ),
    ("zero3 offload", "checkpoint_module"): Limit(
        "ZeRO-3 saves the weights with the optimizer states only", "AssertionError: conv"
    ),
    **{
        (layout, "checkpoint_elastic"): Limit(
            "the step is looked for in the parameter group, where only FusedAdam has it",
            "AssertionError",
        )
        for layout in ("zero1", "zero2 offload")
    },
    ("zero1", "to_fp32_frozen"): Limit("frozen weights are saved from stage 2 on only", "'frozen'"),
    **{
        ("bf16 optimizer", name): Limit(
            "zero_to_fp32 does not know the files of BF16_Optimizer", "is not a zero checkpoint"
        )
        for name in ("to_fp32", "to_fp32_frozen")
    },
    **{
        (layout, "to_fp32_tied"): Limit(
            "shared weights are looked for among parameters without their second names", "'tied'"
        )
        for layout in ("zero2 offload", "zero3 offload")
    },
}

CASES = [
    (optimizer, layout, name)
    for optimizer in OPTIMIZERS
    for name, behaviour in BEHAVIOURS.items()
    for layout in behaviour.layouts
]
QUICK_NAMES = (
    "full_state_get",
    "full_state_set",
    "groups_state_get",
    "loaded_state_get",
    "checkpoint_all",
    "to_fp32",
    "overflow_fp32",
)
QUICK = [
    case
    for case in CASES
    if case[0] == "ours"
    and case[1] in ("zero2 offload", "zero3 offload")
    and case[2] in QUICK_NAMES
]
SLOW = [case for case in CASES if case not in QUICK]


@pytest.fixture(scope="module")
def quick_results(standing_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("conformance"))
    return standing_ranks(2).run(run_cases, timeout_s=900, cases=QUICK, folder=folder)[0]


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    """Return what runs the cases of one optimizer in one pair of processes, and only once."""
    results = {}

    def of(optimizer):
        if optimizer not in results:
            folder = tmp_path_factory.mktemp("conformance")
            cases = [case for case in SLOW if case[0] == optimizer]
            (results[optimizer], _) = run_ranks(
                run_cases, 2, folder, timeout_s=1500, cases=cases, folder=str(folder)
            )
        return results[optimizer]

    return of


def check(case, error):
    optimizer, layout, name = case
    limit = LIMITS.get((layout, name))
    if limit is None or (optimizer == "ours" and not limit.ours):
        assert error is None, f"{BEHAVIOURS[name].line}: {error}"
    else:
        assert error is not None, f"{limit.reason}: it works now, take it off the list"
        assert limit.text in error


def named(cases):
    return pytest.mark.parametrize("case", cases, ids="-".join)


@named(QUICK)
def test_conformance_of_representative_behaviours(quick_results, case):
    check(case, quick_results[case])


@pytest.mark.slow
@named(SLOW)
def test_conformance(slow_results, case):
    check(case, slow_results(case[0])[case])


PAIRS = [(optimizer, layout) for optimizer in OPTIMIZERS for layout in ALL]


@pytest.fixture(scope="module")
def resharded(tmp_path_factory):
    """Return the masters before and after a step, of each pair: on 2 ranks, then on 1."""
    folder = tmp_path_factory.mktemp("universal")
    arguments = dict(pairs=PAIRS, folder=str(folder), timeout_s=900)
    saved = run_ranks(save_universal, 2, folder, **arguments)[0]
    return saved, run_ranks(load_universal, 1, folder, **arguments)[0]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_universal_checkpoint_of_two_ranks_goes_on_on_one(resharded, pair):
    (before, after), (loaded, stepped) = (masters[pair] for masters in resharded)
    for name in before:
        assert torch.equal(loaded[name], before[name]), name
        assert not torch.equal(after[name], before[name]), name
        # Codes are new only of the one block of a parameter that the ranks had cut.
        difference = (stepped[name] - after[name]).abs()
        # Rows that share a block of "thin" are up to 2^13 apart in size: of an element at the lower
        # end of m's codes one code is as large as itself.
        small = 16 if (pair[0], name) == ("ours", "thin") else 0
        assert (difference > 1e-2 / 16).sum() <= small, name
        assert difference.max() <= 1e-2, name
        assert (difference > 1e-6).sum() <= (256 if pair[0] == "ours" else 0), name


def test_conformance_limits_name_behaviours_of_the_table():
    for layout, name in LIMITS:
        assert layout in BEHAVIOURS[name].layouts
    assert set(QUICK) <= set(CASES)


def test_conformance_table_has_a_line_for_each_behaviour():
    assert len(BEHAVIOURS) >= 30
    assert len({behaviour.line for behaviour in BEHAVIOURS.values()}) == len(BEHAVIOURS)
