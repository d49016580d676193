# SPDX-License-Identifier: Apache-2.0
"""What ranks do with distributed parameters that are not served, not finite, or do not fit."""

import copy
import math

import torch
from fsdp_placements import (
    OPTIONS,
    SMALL,
    Case,
    gradients_of,
    make_distributed,
    numbers,
    results,
    run,
    set_distributed,
)
from fsdp_worker import whole
from nests import difference
from ranks import error_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zero8
from zero8 import Adam8bitBlockwise

# A cut inside of a block, on both ranks or on the second alone; narrow rows, whose blocks are of
# several; a dimension behind the one in which blocks follow each other.
REFUSED = {
    "columns": Case((Shard(1),), ((24, 1000),)),
    "second rank": Case((Shard(1),), ((64, 65),)),
    "large blocks": Case((Shard(1),), ((24, 1024),), keywords=(("block_size", 1024),)),
    "narrow rows": Case((Shard(1),), ((1024, 16),)),
    "convolution": Case((Shard(1),), ((40, 16, 3, 3),)),
    "kernel of it": Case((Shard(2),), ((64, 16, 16),), keywords=SMALL),
}


def held(params: list, optimizer) -> tuple[list, list[dict]]:
    """Return copies of what this rank holds: of the parameters, and of each state there is."""

    def copied(value):
        value = value.to_local() if isinstance(value, DTensor) else value
        return value.clone() if isinstance(value, Tensor) else value

    states = [{k: copied(v) for k, v in state.items()} for state in optimizer.state.values()]
    return [copied(p.detach()) for p in params], states


def refused(name: str) -> dict:
    """Return what an optimizer says to a parameter that is not served, after one that is."""
    case = REFUSED[name]
    mesh, (bad,), _ = make_distributed(case, fp32_params=["w0"])
    good = nn.Parameter(distribute_tensor(numbers((64, 300), 50), mesh, [Shard(0)]))
    options = {**OPTIONS, **dict(case.keywords)}
    error = error_of(Adam8bitBlockwise, [("good", good), ("bad", bad)], **options)
    optimizer = Adam8bitBlockwise([("good", good), ("bad", torch.zeros(bad.shape))], **options)
    optimizer.param_groups[0]["params"][1] = bad
    good.grad = distribute_tensor(numbers((64, 300), 51), mesh, [Shard(0)])
    set_distributed(case, mesh, [bad], 0)
    before = held([good, bad], optimizer)[0]
    later = error_of(optimizer.step)
    after = held([good, bad], optimizer)[0]
    same = all(map(torch.equal, before, after))
    return {"error": error, "later": later, "same": same, "states": len(optimizer.state)}


NONFINITE = Case((Shard(0),), ((64, 512), (33, 512)))
BAD_BLOCK = (slice(40, 41), slice(256, 512))
"""Of the first parameter, and of the second rank."""


def spoiled(grads: list[Tensor]) -> list[Tensor]:
    grads[0][40, 300] = math.nan
    return grads


def stepped_over_a_nan(alone: bool = False) -> dict:
    """Return what happens where the gradient of one rank is not finite in the second of 3 steps."""
    case = NONFINITE
    mesh, params, optimizer = make_distributed(case, alone)
    run(case, mesh, params, optimizer, 0, 1)
    before = whole(params[0].detach())
    for p, grad in zip(params, spoiled(gradients_of(case, 1)), strict=True):
        p.grad = grad if alone else distribute_tensor(grad, mesh, case.placements)
    found = {
        "stepped": error_of(optimizer.step),
        "here": optimizer.nonfinite_blocks,
        "checked": error_of(optimizer.check_finite),
        "blocks": (before[BAD_BLOCK], whole(params[0].detach())[BAD_BLOCK]),
    }
    run(case, mesh, params, optimizer, 2, 3)
    return found | {"results": results(params, optimizer)}


FAULTS = {
    "first moment": ({}, "exp_avg", math.nan),
    "log6": ({"codec": "log6"}, "exp_avg_sq", math.nan),
    "below 0": ({}, "exp_avg_sq", -1.0),
    "float32": ({"fp32_params": ["w0"]}, "exp_avg", math.nan),
}
"""The optimizer's keywords, and a moment and its value in the bad block."""


def assigned_a_fault(name: str, is_whole_state: bool) -> dict:
    """Return what happens where a moment that is assigned has a fault on one rank."""
    keywords, key, fault = FAULTS[name]
    case, weights = NONFINITE, []
    for value in (0.5, fault):
        mesh, params, optimizer = make_distributed(case, **keywords)
        run(case, mesh, params, optimizer, 0, 1)
        before = whole(params[0].detach())
        moment = torch.full(case.shapes[0], 0.5, dtype=torch.float64)
        assigned = {which: moment.clone() for which in ("exp_avg", "exp_avg_sq")}
        assigned[key][40, 300] = value
        for which, values in assigned.items():
            assigned[which] = distribute_tensor(values, mesh, case.placements)
        if is_whole_state:
            optimizer.state[params[0]] = {"step": 1, **assigned}
        else:
            optimizer.state[params[0]] |= assigned
        set_distributed(case, mesh, params, 1)
        stepped = error_of(optimizer.step)
        weights.append(whole(params[0].detach()))
    here = optimizer.nonfinite_blocks
    return {
        "stepped": stepped,
        "checked": error_of(optimizer.check_finite),
        "here": here,
        "blocks": (before[BAD_BLOCK], weights[1][BAD_BLOCK]),
        "weights": weights,
    }


def loaded_broken(breakage: str) -> dict:
    """Return what happens where the state that is loaded does not fit on the first rank alone."""
    case = NONFINITE
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, 1)
    broken = copy.deepcopy(optimizer.state_dict())
    run(case, mesh, params, optimizer, 1, 2)
    broken["param_groups"][0]["lr"] = 7.0
    if torch.distributed.get_rank() == 0:
        if breakage == "of another step":  # each rank may have a disk of its own
            broken = copy.deepcopy(optimizer.state_dict())
        elif breakage == "of AdamW":
            broken["state"] = copy.deepcopy(zero8.export(optimizer)["state"])
        elif breakage == "without scales":
            del broken["state"][1]["exp_avg_scale"]
        else:
            codes = broken["state"][1]["exp_avg_q8"]
            codes = torch.zeros(codes.shape, dtype=codes.dtype)
            codes = distribute_tensor(codes, mesh, [Replicate()], src_data_rank=None)
            broken["state"][1]["exp_avg_q8"] = codes
    elif breakage == "of AdamW":
        broken["state"] = copy.deepcopy(optimizer.state_dict()["state"])
    before = copy.deepcopy((held(params, optimizer), settings_of(optimizer)))
    error = error_of(optimizer.load_state_dict, broken)
    same = not difference((held(params, optimizer), settings_of(optimizer)), before)
    run(case, mesh, params, optimizer, 2, 3)
    return {"error": error, "same": same, "results": results(params, optimizer)}


def settings_of(optimizer) -> list[dict]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
