# SPDX-License-Identifier: Apache-2.0
"""What ranks do with parameters that are DTensors of any placements, and the same without them."""

import copy
import math
import pickle
from dataclasses import dataclass

import torch
from fsdp_worker import start, whole
from nests import difference
from ranks import error_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from zero8 import Adam8bitBlockwise
from zero8.spec.codec import CODECS
from zero8.state.placed import PlacedExtent
from zero8.state.table import Piece

Placements = tuple[Placement, ...]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 3


@dataclass(frozen=True)
class Case:
    """Parameters with one way of distributing them.

    Attributes:
        placements: one for each dimension of the mesh.
        shapes: of the parameters.
        mesh: its shape.
        dtype: of the parameters.
        grads: placements of the gradients; None for those of the parameters.
        keywords: of the optimizer.
    """

    placements: Placements
    shapes: tuple[tuple[int, ...], ...]
    mesh: tuple[int, ...] = (2,)
    dtype: torch.dtype = torch.float32
    grads: Placements | None = None
    keywords: tuple = ()


SMALL = (("block_size", 64),)
BF16 = torch.bfloat16
CORRECTED = (("weight_correction_bits", 8),)
DYNAMIC = (("codec", "dynamic"),)
SIX_BITS = (("codec", "log6"),)
FOUR_BITS = (("codec", "linear4"),)

# Rows of tensor parallelism; experts and convolutions cut inside of a row and before it; a row of
# one whole and one short block, each on a rank; float32 moments of a matrix and a vector.
CASES = {
    "rows": Case((Shard(0),), ((33, 512), (4097,), (1, 5000), (1024, 16), (7, 12, 300))),
    "replicated": Case((Replicate(),), ((33, 512), (301,), (1000, 12))),
    "columns": Case((Shard(1),), ((24, 1024), (5, 12, 300), (8, 64, 4, 4), (10, 30))),
    "columns bfloat16": Case((Shard(1),), ((24, 1024), (3, 20, 300)), dtype=BF16),
    "columns corrected": Case((Shard(1),), ((24, 1024),), dtype=BF16, keywords=CORRECTED),
    "rows log6": Case((Shard(0),), ((33, 301), (1, 5001), (1140, 13)), keywords=SIX_BITS),
    "columns log6": Case((Shard(1),), ((24, 1024), (5, 12, 300)), keywords=SIX_BITS),
    "rows linear4": Case((Shard(0),), ((33, 301), (1, 5001), (1140, 13)), keywords=FOUR_BITS),
    "columns linear4": Case((Shard(1),), ((24, 1024), (5, 12, 300)), keywords=FOUR_BITS),
    "columns dynamic": Case((Shard(1),), ((24, 1024), (5, 12, 300)), keywords=DYNAMIC),
    "columns small": Case((Shard(1),), ((24, 512), (64, 3, 32)), keywords=SMALL),
    "experts": Case((Shard(2),), ((5, 12, 512), (2, 3, 4, 300))),
    "last": Case((Shard(3),), ((2, 3, 2, 512), (2, 3, 2, 5))),
    "replicated gradients": Case((Shard(0),), ((33, 512), (301,)), grads=(Replicate(),)),
    "partial gradients": Case((Shard(1),), ((24, 1024), (10, 30)), grads=(Partial(),)),
    "gradients of columns": Case((Shard(0),), ((33, 512), (1024, 16)), grads=(Shard(1),)),
}
ON_FOUR = {
    "replicas": Case((Replicate(), Shard(0)), ((33, 512), (301,), (1024, 16)), (2, 2)),
    "rows and columns": Case(
        (Shard(0), Shard(1)), ((33, 512), (5, 12, 300), (8, 64, 4, 4)), (2, 2)
    ),
    "rows twice": Case((Shard(0), Shard(0)), ((33, 512), (6, 3, 300), (3, 2000)), (2, 2)),
    "empty columns": Case((Shard(1),), ((64, 6, 32), (64, 3, 300)), (4,), keywords=SMALL),
    "partial replicas": Case(
        (Replicate(), Shard(0)), ((33, 512),), (2, 2), grads=(Partial(), Shard(1))
    ),
}
EVERY = {**CASES, **ON_FOUR}

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


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return values of few bits, so that sums of what ranks hold are exact."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.float8_e4m3fn).float()


def values_of(case: Case) -> list[Tensor]:
    return [numbers(shape, seed).to(case.dtype) for seed, shape in enumerate(case.shapes)]


def gradients_of(case: Case, step: int) -> list[Tensor]:
    seeds = range(100 * step + 100, 100 * step + 100 + len(case.shapes))
    pairs = zip(case.shapes, seeds, strict=True)
    return [numbers(shape, seed).to(case.dtype) for shape, seed in pairs]


def distributed(value: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Return a DTensor of these placements; of a partial one every rank holds another part."""
    partial = [at for at, placement in enumerate(placements) if isinstance(placement, Partial)]
    stand_in = [Replicate() if at in partial else p for at, p in enumerate(placements)]
    held = distribute_tensor(value, mesh, stand_in).to_local()
    for at in partial:
        held = held * (0.25, 0.75)[mesh.get_coordinate()[at]]
    shape, stride = value.shape, value.stride()
    return DTensor.from_local(held, mesh, placements, shape=shape, stride=stride)


def make(case: Case, values: list[Tensor], **keywords) -> tuple[list[nn.Parameter], object]:
    """Return parameters, called w0 and so on, and their optimizer."""
    params = [nn.Parameter(value) for value in values]
    named = [(f"w{number}", p) for number, p in enumerate(params)]
    keywords = {**OPTIONS, **dict(case.keywords), **keywords}
    return params, Adam8bitBlockwise(named, **keywords)


def make_distributed(case: Case, **keywords) -> tuple[DeviceMesh, list[nn.Parameter], object]:
    """Return the mesh, the parameters on it, and their optimizer."""
    start()
    mesh = init_device_mesh("cpu", case.mesh)
    values = [distribute_tensor(value, mesh, case.placements) for value in values_of(case)]
    return mesh, *make(case, values, **keywords)


def set_distributed(case: Case, mesh: DeviceMesh, params: list, step: int) -> None:
    """Give distributed parameters the gradients of a step."""
    for p, grad in zip(params, gradients_of(case, step), strict=True):
        p.grad = distributed(grad, mesh, case.grads or case.placements)


def run(case: Case, mesh: DeviceMesh | None, params: list, optimizer, begin: int, end: int) -> None:
    """Take some steps, of plain tensors where there is no mesh."""
    for step in range(begin, end):
        if mesh is not None:
            set_distributed(case, mesh, params, step)
        else:
            for p, grad in zip(params, gradients_of(case, step), strict=True):
                p.grad = grad
        optimizer.step()


def results(params: list, optimizer) -> list[dict]:
    """Return for each parameter its values, whole, and the entries of its saved state, whole."""
    states = optimizer.state_dict()["state"]
    return [
        {"values": whole(p.detach()), **{key: whole(v) for key, v in states[number].items()}}
        for number, p in enumerate(params)
    ]


def held(params: list, optimizer) -> tuple[list, list[dict]]:
    """Return copies of what this rank holds: of the parameters, and of each state there is."""

    def copied(value):
        value = value.to_local() if isinstance(value, DTensor) else value
        return value.clone() if isinstance(value, Tensor) else value

    states = [{k: copied(v) for k, v in state.items()} for state in optimizer.state.values()]
    return [copied(p.detach()) for p in params], states


def stepped(name: str) -> list[dict]:
    """Return `results` after some steps of a case."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, STEPS)
    return results(params, optimizer)


def stepped_alone(name: str) -> list[dict]:
    """Return the same of one process on plain tensors."""
    case = EVERY[name]
    params, optimizer = make(case, values_of(case))
    run(case, None, params, optimizer, 0, STEPS)
    return results(params, optimizer)


def norms(names: list[str]) -> dict[str, tuple[float, float]]:
    """Return, by case, the norm of all gradients, and without the last one of the last rank."""
    found = {}
    for name in names:
        case = EVERY[name]
        mesh, params, optimizer = make_distributed(case)
        set_distributed(case, mesh, params, 0)
        norm = optimizer.clip_grad_norm_(1.0).item()
        if torch.distributed.get_rank() == mesh.size() - 1:
            params[-1].grad = None
        # Redistributed gradients must be there on all ranks.
        fewer = optimizer.clip_grad_norm_(1.0).item() if case.grads is None else norm
        found[name] = norm, fewer
    return found


def norms_alone(names: list[str]) -> dict[str, float]:
    """Return the same norms of all gradients, of one process on plain tensors."""
    flat = {name: [grad.flatten() for grad in gradients_of(EVERY[name], 0)] for name in names}
    return {name: torch.cat(grads).double().norm().item() for name, grads in flat.items()}


def stepped_in_strides() -> list[dict]:
    """Return `results` where what each rank holds of a matrix is a view of all its columns."""
    start()
    case, mesh, values = CASES["columns small"], init_device_mesh("cpu", (2,)), []
    for value in values_of(case):
        columns = value.chunk(2, dim=1)[mesh.get_rank()]
        whole_one = {"shape": value.shape, "stride": value.stride()}
        values.append(DTensor.from_local(columns, mesh, case.placements, **whole_one))
    params, optimizer = make(case, values)
    assert not any(p.to_local().is_contiguous() for p in params)
    run(case, mesh, params, optimizer, 0, STEPS)
    return results(params, optimizer)


# --- Boxes ----------------------------------------------------------------------------------------

PLACED = {
    (2,): [(Shard(0),), (Shard(1),), (Shard(2),), (Replicate(),)],
    (2, 2): [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(2), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(1), Replicate()),
    ],
    (4,): [(Shard(0),), (Shard(2),)],
}
PLACED_SHAPES = [(4,), (7,), (1,), (8, 6), (5, 3), (1, 2), (0, 3), (6, 5, 4), (1, 1, 1), (9, 2, 7)]


def wrong_extents(mesh_shape: tuple[int, ...]) -> list:
    """Return what DTensors hold other elements of than their extents say, and how many fit."""
    start()
    mesh, wrong, fit = init_device_mesh("cpu", mesh_shape), [], 0
    for placements in PLACED[mesh_shape]:
        dims = max(getattr(placement, "dim", -1) for placement in placements)
        for shape in (shape for shape in PLACED_SHAPES if len(shape) > dims):
            index = torch.arange(math.prod(shape)).view(shape)
            found = _elements(distribute_tensor(index, mesh, placements))
            if found[0] == found[1]:
                fit += 1
            else:
                wrong.append((placements, shape, *found))
    return [wrong, fit]


def _elements(p: DTensor) -> tuple:
    """Return shape and elements of a DTensor of indices here: by its extent, and as they are."""
    extent, whole_piece = PlacedExtent.of(p, "p"), Piece(0, p.numel(), 0, tuple(p.shape), 0, 0, "p")
    pieces = extent.table(whole_piece).pieces
    listed = [piece.first + i for piece in pieces for i in range(piece.numel)]
    there = p.to_local()
    return (extent.local_shape, listed), (tuple(there.shape), there.flatten().tolist())


# --- FSDP2 on top of tensor parallelism -----------------------------------------------------------

TENSOR_PARALLEL = {
    "column": ((24, 1024), Shard(0)),
    "row": ((24, 1024), Shard(1)),
    "experts": ((8, 4, 512), Shard(2)),
    "norm": ((300,), Replicate()),
    "uneven": ((33, 300), Shard(0)),
    "alone": ((16, 300), None),
}


class Parallel(nn.Module):
    """Parameters that tensor parallelism has placed, and one that it has not.

    Their gradients are known: those of the sum of their products with them.
    """

    def __init__(self, mesh: DeviceMesh | None):
        super().__init__()
        self.mesh = mesh
        for seed, (name, (shape, placement)) in enumerate(TENSOR_PARALLEL.items()):
            self.register_parameter(
                name, nn.Parameter(self._placed(numbers(shape, seed), placement))
            )

    def forward(self, step: int) -> Tensor:
        sums = []
        for seed, (name, (shape, placement)) in enumerate(TENSOR_PARALLEL.items()):
            gradient = self._placed(numbers(shape, 100 * step + 100 + seed), placement)
            total = (getattr(self, name) * gradient).sum()
            sums.append(total.full_tensor() if isinstance(total, DTensor) else total)
        return sum(sums)

    def _placed(self, value: Tensor, placement: Placement | None) -> Tensor:
        if placement is None or self.mesh is None:
            return value
        return distribute_tensor(value, self.mesh, [placement])


def stepped_in_parallel(alone: bool) -> tuple[list[str], list[dict]]:
    """Return the placements of the parameters, and `results` after some steps."""
    model = Parallel(None)
    if not alone:
        start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = fully_shard(Parallel(mesh["tp"]), mesh=mesh["dp"])
    params = list(model.parameters())
    optimizer = Adam8bitBlockwise(model.named_parameters(), **OPTIONS)
    for step in range(STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [str(getattr(p, "placements", "")) for p in params], results(params, optimizer)


# --- What is not served, or not finite, or does not fit -------------------------------------------


def refused(name: str) -> dict:
    """Return what an optimizer says to a parameter that is not served, after one that is.

    Returns:
        error: of the constructor.  later: of a step, where the parameter came after that, as
        under Accelerate.  same: whether this rank holds what it held then.  states: how many there
        are.  then: `results` of the steps of an optimizer that keeps float32 moments of it.
    """
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
    states = len(optimizer.state)
    params, optimizer = make(case, [bad.data], fp32_params=["w0"])
    run(case, mesh, params, optimizer, 0, STEPS)
    then = results(params, optimizer)
    return {"error": error, "later": later, "same": same, "states": states, "then": then}


def refused_alone(name: str) -> list[dict]:
    """Return `then` of `refused`, of one process on plain tensors."""
    case = REFUSED[name]
    params, optimizer = make(case, values_of(case), fp32_params=["w0"])
    run(case, None, params, optimizer, 0, STEPS)
    return results(params, optimizer)


NONFINITE = Case((Shard(0),), ((64, 512), (33, 512)))
BAD_BLOCK = (slice(40, 41), slice(256, 512))
"""Of the first parameter, and of the second rank."""


def spoiled(grads: list[Tensor]) -> list[Tensor]:
    grads[0][40, 300] = math.nan
    return grads


def stepped_over_a_nan() -> dict:
    """Return what happens where the gradient of one rank is not finite in the second of 3 steps.

    Returns:
        stepped: the error of that step.  checked: that of `check_finite`.  here: how many blocks
        this rank has counted.  blocks: the weights of the bad block before and after that step.
        results: at the end.
    """
    case = NONFINITE
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, 1)
    before = whole(params[0].detach())
    for p, grad in zip(params, spoiled(gradients_of(case, 1)), strict=True):
        p.grad = distribute_tensor(grad, mesh, case.placements)
    stepped = error_of(optimizer.step)
    here = optimizer.nonfinite_blocks
    checked = error_of(optimizer.check_finite)
    after = whole(params[0].detach())
    run(case, mesh, params, optimizer, 2, 3)
    return {
        "stepped": stepped,
        "checked": checked,
        "here": here,
        "blocks": (before[BAD_BLOCK], after[BAD_BLOCK]),
        "results": results(params, optimizer),
    }


def stepped_over_a_nan_alone() -> list[dict]:
    """Return `results` of the same on plain tensors, where the step raises."""
    case = NONFINITE
    params, optimizer = make(case, values_of(case))
    run(case, None, params, optimizer, 0, 1)
    for p, grad in zip(params, spoiled(gradients_of(case, 1)), strict=True):
        p.grad = grad
    assert error_of(optimizer.step)[0] == "FloatingPointError"
    run(case, None, params, optimizer, 2, 3)
    return results(params, optimizer)


FAULTS = {
    **{codec: ({"codec": codec}, "exp_avg_sq", math.nan) for codec in CODECS},
    "first moment": ({}, "exp_avg", math.nan),
    "infinite": ({}, "exp_avg_sq", math.inf),
    "below 0": ({}, "exp_avg_sq", -1.0),
    "float32": ({"fp32_params": ["w0"]}, "exp_avg", math.nan),
}
"""The optimizer's keywords, and a moment and its value in the bad block."""


def assigned_a_fault(name: str, is_whole_state: bool) -> dict:
    """Return what happens where a moment that is assigned has a fault on one rank.

    Args:
        name: a key of `FAULTS`.
        is_whole_state: whether the state is assigned as a whole, as one of AdamW.

    Returns:
        As `stepped_over_a_nan`, but weights: after the step, and with 0.5 in place of the fault.
    """
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


def _without_scales(state: dict) -> None:
    del state["exp_avg_scale"]


def _of_another_shape(state: dict) -> None:
    state["exp_avg_sq_q8"] = torch.zeros(7, 512, dtype=torch.uint8)


def _replicated(state: dict) -> None:
    codes = state["exp_avg_q8"]
    state["exp_avg_q8"] = distribute_tensor(
        torch.zeros(codes.shape, dtype=codes.dtype),
        codes.device_mesh,
        [Replicate()],
        src_data_rank=None,
    )


def _of_half_a_step(state: dict) -> None:
    state["step"] = 1.5


BREAKAGES = {
    "without scales": _without_scales,
    "of another shape": _of_another_shape,
    "replicated": _replicated,
    "of half a step": _of_half_a_step,
}


def loaded_broken(breakage: str) -> dict:
    """Return what happens where the state that is loaded does not fit on the first rank alone.

    Returns:
        error: of `load_state_dict`.  same: whether this rank holds what it held, and the settings.
        results: after a third step.
    """
    case = NONFINITE
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    run(case, mesh, params, optimizer, 1, 2)
    broken = copy.deepcopy(saved)
    broken["param_groups"][0]["lr"] = 7.0
    if torch.distributed.get_rank() == 0:
        BREAKAGES[breakage](broken["state"][1])
    before, groups = held(params, optimizer), copy.deepcopy(settings_of(optimizer))
    error = error_of(optimizer.load_state_dict, broken)
    same = not difference((held(params, optimizer), settings_of(optimizer)), (before, groups))
    run(case, mesh, params, optimizer, 2, 3)
    return {"error": error, "same": same, "results": results(params, optimizer)}


def loaded_of_another_step() -> dict:
    """As `loaded_broken`, where the first rank loads what has been saved a step later."""
    case = NONFINITE
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, 1)
    first = copy.deepcopy(optimizer.state_dict())
    run(case, mesh, params, optimizer, 1, 2)
    second = copy.deepcopy(optimizer.state_dict())
    before = held(params, optimizer)
    mine = second if torch.distributed.get_rank() == 0 else first
    error = error_of(optimizer.load_state_dict, mine)
    same = not difference(held(params, optimizer), before)
    run(case, mesh, params, optimizer, 2, 3)
    return {"error": error, "same": same, "results": results(params, optimizer)}


def settings_of(optimizer) -> list[dict]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


# --- Copies, loads and the report -----------------------------------------------------------------


def _through_pickle(value):
    return pickle.loads(pickle.dumps(value))


WAYS = {"deepcopy": copy.deepcopy, "pickle": _through_pickle}


def stepped_as_a_copy(name: str, way: str) -> tuple[list[dict], list[dict]]:
    """Copy parameters and optimizer before the last step; return `results` of both."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, STEPS - 1)
    twins, its_optimizer = WAYS[way]((params, optimizer))
    for both in ((params, optimizer), (twins, its_optimizer)):
        run(case, mesh, *both, STEPS - 1, STEPS)
    return results(params, optimizer), results(twins, its_optimizer)


def saved_alone(name: str, form: str) -> dict:
    """Return what one process has before the last step: values, and the optimizer's state dict."""
    case = EVERY[name]
    params, optimizer = make(case, values_of(case), state_dict_format=form)
    run(case, None, params, optimizer, 0, STEPS - 1)
    return {"values": [p.detach() for p in params], "optimizer": optimizer.state_dict()}


def saved_whole(name: str, form: str) -> dict:
    """Return what ranks have before the last step, whole, as `saved_alone` does."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case, state_dict_format=form)
    run(case, mesh, params, optimizer, 0, STEPS - 1)
    packed = optimizer.state_dict()
    states = packed["state"].items()
    packed["state"] = {at: {k: whole(v) for k, v in state.items()} for at, state in states}
    return {"values": [whole(p.detach()) for p in params], "optimizer": packed}


def resumed(name: str, saved: dict) -> list[dict]:
    """Load what `saved_alone` returns on every rank and take the last step; return `results`."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case, lr=7.0)
    with torch.no_grad():
        for p, value in zip(params, saved["values"], strict=True):
            p.copy_(distribute_tensor(value, mesh, case.placements))
    optimizer.load_state_dict(saved["optimizer"])
    run(case, mesh, params, optimizer, STEPS - 1, STEPS)
    return results(params, optimizer)


def resumed_alone(name: str, saved: dict) -> list[dict]:
    """Return `results` of the same in one process."""
    case = EVERY[name]
    params, optimizer = make(case, [value.clone() for value in saved["values"]])
    optimizer.load_state_dict(saved["optimizer"])
    run(case, None, params, optimizer, STEPS - 1, STEPS)
    return results(params, optimizer)


def resumed_from_ranks(name: str) -> list[dict]:
    """Load the states of ranks, as they are, into plain tensors; take the last step there."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, STEPS - 1)
    values = [whole(p.detach()) for p in params]
    return resumed_alone(name, {"values": values, "optimizer": optimizer.state_dict()})


def report_of(name: str) -> tuple[list[dict], str, list[tuple[int, int, int]]]:
    """Return rows and text of the report, and of each parameter what it should count.

    That is: elements that this rank holds, bytes of their moments, and of their corrections.
    """
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case)
    run(case, mesh, params, optimizer, 0, 1)
    report, sizes = optimizer.memory_report(), []
    values, states = held(params, optimizer)
    for value, state in zip(values, states, strict=True):
        moments = sum(entry.nbytes for key, entry in state.items() if key.startswith("exp_avg"))
        correction = state.get("param_correction", value[:0])
        sizes.append((value.numel(), moments, correction.nbytes))
    return report.to_dicts(), str(report), sizes
