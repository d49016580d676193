# SPDX-License-Identifier: Apache-2.0
"""Every mode of ZeRO trains, is as close to fp32 AdamW as codes are fine, and resumes.

The cells, and what is varied with each, are in `zero_matrix.CELLS`; to run one:
`pytest tests/zero/test_zero_matrix.py -m "" -k zero2_cpu_bf16`.
"""

import pytest
import torch
from nests import difference
from params import each
from zero_matrix import CELLS, RANKS, SAVED_AFTER, STEPS, run_cell

# The other parameters have less than 4096 elements or less than two dimensions.
QUANTIZED = {"embed.weight", "inner.weight", "head.weight", "down.weight", "unused"}


def check_states(cell, ranks):
    """All is there, and the master weights have the precision that the config asks for."""
    elements, low = {}, cell.precision in ("masters", "states")
    states = [state for rank in ranks for state in rank["after"]["states"]]
    assert {state["master"].dtype for state in states} == {torch.bfloat16 if low else torch.float32}
    for state in states if cell.stage else ():
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "history", "master", "pieces", "step"]
        for piece in state["pieces"]:
            name, is_expert = piece.name, "experts" in piece.name and "weight" in piece.name
            elements[name] = elements.get(name, 0) + piece.numel
            assert bool(piece.block_size) == (name in QUANTIZED or is_expert)
    for name, tensor in ranks[0]["after"]["parameters"].items() if cell.stage else ():
        # Experts are spread over the ranks: each has its own under the same name.
        copies = RANKS if cell.model == "local experts" and "experts" in name else 1
        held_somewhere = 0 if name == "frozen" else copies * tensor.numel()
        assert elements.get(name, 0) == held_somewhere, name


def check_losses(cell, ranks):
    """Losses fall, and follow those of fp32 AdamW.

    To first order the loss changes by gradient * update.  Updates are off by about one code, 1/32,
    independently of each other: over thousands of weights no more than an eighth of that is left of
    the distance gone.  Weights that are kept in bfloat16, and logits with them, are off by up to
    2^-8 of themselves, too.
    """
    ours, theirs = (
        [sum(rank[log][step]["loss"] for rank in ranks) / len(ranks) for step in range(STEPS)]
        for log in ("log", "AdamW log")
    )
    assert ours[-1] < 0.7 * ours[0]
    assert ours[0] == pytest.approx(theirs[0], rel=2**-8)
    rounded = 2**-8 if cell.precision in ("masters", "states") else 0.0
    gone = 0.0
    for step in range(1, STEPS):
        gone += abs(theirs[step] - theirs[step - 1])
        assert abs(ours[step] - theirs[step]) <= gone / 256 + rounded * theirs[0], step


def check_skips(cell, ranks):
    """Steps that overflow are skipped, as with AdamW, and no others."""
    for rank in ranks:
        got, theirs = ([one["skipped"] for one in rank[log]] for log in ("log", "AdamW log"))
        assert got == theirs
        if cell.precision == "fp16" and cell.stage:
            assert 1 <= sum(got) < STEPS - 3
        else:
            assert got == [int(step == cell.poisoned) for step in range(STEPS)]
        # FP16_UnfusedOptimizer takes a step with zero gradients when it is made.
        taken = STEPS - sum(got) + (rank["wrapper"] == "FP16_UnfusedOptimizer")
        assert {state["step"] for state in rank["after"]["states"]} == {taken}


def check_resume(cell, ranks):
    """What is loaded always has the same bits; what follows, wherever it has with fp32 AdamW."""
    for rank in ranks:
        assert difference(rank["before"], rank["loaded"]) == ""
        assert difference(rank["after"], rank["loaded"]) != ""
        resumes = rank["AdamW log"][SAVED_AFTER:] == rank["AdamW resumed log"]
        assert resumes == cell.resumes
        if resumes:
            assert rank["log"][SAVED_AFTER:] == rank["resumed log"]
            assert difference(rank["after"], rank["resumed"]) == ""


def check_schedule(cell, ranks):
    """A scheduler sets the learning rates and betas that AdamW gets."""
    is_scheduled = cell.client_scheduler or "scheduler" in cell.options
    for rank in ranks if is_scheduled else ():
        got, theirs = (
            [(one["lr"], one["betas"]) for one in rank[log]] for log in ("log", "AdamW log")
        )
        assert got == theirs
        assert len({lr for lr, _ in got}) > 2
        cycles = cell.options.get("scheduler", {}).get("type") == "OneCycle"
        assert (len({betas for _, betas in got}) > 2) == cycles


def check_odd(cell, ranks):
    """Frozen parameters stay, and unused ones only decay."""
    for rank in ranks if cell.model == "odd" else ():
        parameters = rank["after"]["parameters"]
        assert parameters["frozen"].eq(0.25).all()
        assert "head.weight" not in parameters  # tied
        # 11 steps with a learning rate of 0.005 and a decay of 0.01, or the next bfloat16 number.
        unused = parameters["unused"].float()
        assert (unused <= 0.5).all() and (unused >= 0.5 - 2**-9).all()


def check_destroyed(cell, ranks):
    """An engine that is gone keeps states alive only where it keeps AdamW's.

    DeepSpeed's stage 3, and experts with offload, keep every optimizer.
    """
    for rank in ranks:
        assert rank["AdamW kept"] or not rank["kept"]


CHECKS = (check_states, check_losses, check_skips, check_resume, check_schedule, check_odd)


@each(CELLS, [name for name, cell in CELLS.items() if not cell.quick])
def test_cell_trains_skips_and_resumes_as_adamw(name, standing_ranks, tmp_path):
    ranks = standing_ranks(RANKS).run(run_cell, name=name, folder=str(tmp_path))
    for check in (*CHECKS, check_destroyed):
        check(CELLS[name], ranks)
