# SPDX-License-Identifier: Apache-2.0
"""Steps under FSDP2 have the bits of one process on plain tensors."""

import pytest
from fsdp_worker import (
    LAYOUTS,
    WRITES,
    accumulated,
    clipped,
    differing,
    trained,
    trained_alone,
    trained_by_accelerate,
    trained_by_mover,
    trained_in_ddp,
    written,
)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(layout, size, marks=[pytest.mark.slow] * (size == 3 and layout != "corrected"))
        for layout in LAYOUTS
        for size in (2, 3)
    ],
)
def test_fsdp2_step_has_the_bits_of_one_process(layout, world_size, standing_ranks):
    for got in standing_ranks(world_size).run(trained, layout=layout, steps=4):
        assert differing(got, trained_alone(layout, 4), world_size) == []


@pytest.mark.parametrize("layout", ["offload", "corrected"])
def test_fsdp2_step_in_the_backward_has_the_bits_of_one_process(layout, standing_ranks):
    arguments = {"layout": layout, "steps": 4, "in_backward": True}
    for got in standing_ranks(2).run(trained, **arguments):
        assert differing(got, trained_alone(layout, 4), 2) == []


def test_fsdp2_step_in_the_backward_of_the_last_micro_batch_has_the_bits_of_one_after_it(
    standing_ranks,
):
    run = standing_ranks(2).run
    expected = run(accumulated, layout="offload", in_backward=False)
    for ours, theirs in zip(
        run(accumulated, layout="offload", in_backward=True), expected, strict=True
    ):
        assert differing(ours, theirs) == []


@pytest.mark.parametrize("layout", ["offload", "bfloat16"])
def test_fsdp2_step_with_a_clipped_norm_has_the_bits_of_torchs_clipping(layout, standing_ranks):
    """torch adds n squares in float32, and returns bfloat16 for bfloat16."""
    run = standing_ranks(2).run
    (ours, norms), (others, norms_there) = run(clipped, layout=layout)
    assert norms == norms_there and all(norm > 0.5 for norm in norms)
    numel = sum(entry["values"].numel() for entry in ours.values())
    torchs_error = 2**-7 if layout == "bfloat16" else numel * 2**-25
    results = zip((ours, others), run(clipped, layout=layout, by_norms=norms), strict=True)
    for mine, (theirs, torchs_norms) in results:
        assert differing(mine, theirs) == []
        for norm, torchs in zip(norms, torchs_norms, strict=True):
            assert norm.item() == pytest.approx(torchs.item(), rel=torchs_error)


def test_fsdp2_step_of_an_optimizer_made_before_sharding_has_the_bits_of_one_process(
    standing_ranks,
):
    for got in standing_ranks(2).run(trained_by_accelerate, layout="corrected", steps=3):
        assert differing(got, trained_alone("corrected", 3), 2) == []


def test_fsdp2_step_of_a_model_that_was_moved_has_the_bits_of_one_process(standing_ranks):
    for got in standing_ranks(2).run(trained_by_mover, layout="bfloat16", steps=3):
        assert differing(got, trained_alone("bfloat16", 3), 2) == []


@pytest.mark.parametrize("write", WRITES)
def test_fsdp2_weights_that_a_script_writes_count_as_they_are(write, standing_ranks):
    for got, expected in standing_ranks(2).run(written, write=write):
        assert differing(got, expected) == []
        assert not any(entries["values"].isnan().any() for entries in got.values())


def test_ddp_step_has_the_bits_of_one_process(standing_ranks):
    for got in standing_ranks(2).run(trained_in_ddp, layout="bfloat16", steps=3):
        assert differing(got, trained_alone("bfloat16", 3)) == []
