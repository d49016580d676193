# SPDX-License-Identifier: Apache-2.0
"""From 8-bit states back to fp32 Adams: `zero8.export`, and the error where it was forgotten."""

import pytest
import torch
from small_optimizers import named_params, run

import zero8
from zero8.deepspeed.moment_tensor import MomentTensor


def trained(optimizer_class=zero8.Adam8bitBlockwise):
    """Return parameters and an optimizer after two steps: 8-bit, narrow, and kept in float32."""
    params = named_params({"wide": (64, 130), "narrow": (600, 8), "bias": (9,)})
    optimizer = optimizer_class(list(params.items()), lr=1e-2)
    run(optimizer, params.values(), 2)
    return params, optimizer


def test_export_loads_into_adamw_which_holds_the_decoded_moments_and_steps():
    params, optimizer = trained()
    adamw = torch.optim.AdamW(list(params.items()))
    adamw.load_state_dict(zero8.export(optimizer))
    for p in params.values():
        for which, store in zip(("exp_avg", "exp_avg_sq"), optimizer.moments(p), strict=True):
            assert torch.equal(adamw.state[p][which].flatten(), store.read(0, p.numel()))
        assert adamw.state[p]["step"].item() == 2
    assert adamw.param_groups[0]["lr"] == 1e-2 and optimizer.state_dict_format == "8bit"
    adamw.step()


def test_states_of_a_zero_partition_on_their_way_back_are_refused_with_the_command_to_use():
    params, optimizer = trained()
    p = params["wide"]
    moments = [MomentTensor(store) for store in optimizer.moments(p)]
    state = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
    optimizer.state[p] = {"step": 2, "history": 1.0, **state}
    with pytest.raises(ValueError, match="--to zero for DeepSpeed's"):
        zero8.export(optimizer)
    with pytest.raises(ValueError, match="--to zero for DeepSpeed's"):
        torch.optim.AdamW([p]).load_state_dict(
            {"state": {0: state}, "param_groups": [{"params": [0]}]}
        )


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("kept", [["wide"], ["bias"]], ids=["8-bit", "float32"])
def test_load_of_our_states_into_another_optimizer_is_refused_and_changes_nothing(
    optimizer_class, kept
):
    params, ours = trained()
    saved = ours.state_dict()
    numbers = [list(params).index(name) for name in kept]
    saved["state"] = {number: saved["state"][number] for number in numbers}
    other = optimizer_class(params.values(), lr=3.0)
    with pytest.raises(ValueError, match=f"which {optimizer_class.__name__} cannot read. Go on"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 3.0 and not other.state


def test_load_of_what_is_not_ours_is_left_to_torch():
    params, adamw = trained(torch.optim.AdamW)
    again = torch.optim.AdamW(params.values())
    again.load_state_dict(adamw.state_dict())
    assert torch.equal(
        again.state[params["wide"]]["exp_avg"], adamw.state[params["wide"]]["exp_avg"]
    )
    with pytest.raises(ValueError, match="different number of parameter groups"):
        again.load_state_dict({"state": {}, "param_groups": []})
