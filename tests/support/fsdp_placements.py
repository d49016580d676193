# SPDX-License-Identifier: Apache-2.0
"""What ranks do with parameters that are DTensors of any placements, and the same without them."""

from dataclasses import dataclass

import torch
from fsdp_worker import start, whole
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

Placements = tuple[Placement, ...]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 3


@dataclass(frozen=True)
class Case:
    """Parameters with one way of distributing them."""

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


def make_distributed(
    case: Case, alone: bool = False, **keywords
) -> tuple[DeviceMesh | None, list[nn.Parameter], object]:
    """Return the mesh, the parameters on it, and their optimizer; plain tensors if it is alone."""
    if alone:
        return None, *make(case, values_of(case), **keywords)
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


def stepped(name: str, alone: bool = False) -> list[dict]:
    """Return `results` after some steps of a case, of ranks or of one process."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case, alone)
    run(case, mesh, params, optimizer, 0, STEPS)
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


# --- Loads  -----------------------------------------------------------------


def saved(name: str, form: str, alone: bool = False) -> dict:
    """Return what there is before the last step, whole: values, and the optimizer's state dict."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case, alone, state_dict_format=form)
    run(case, mesh, params, optimizer, 0, STEPS - 1)
    packed = optimizer.state_dict()
    states = packed["state"].items()
    packed["state"] = {at: {k: whole(v) for k, v in state.items()} for at, state in states}
    return {"values": [whole(p.detach()) for p in params], "optimizer": packed}


def resumed(name: str, saved: dict, alone: bool = False) -> list[dict]:
    """Load what `saved` returns, on every rank, and take the last step; return `results`."""
    case = EVERY[name]
    mesh, params, optimizer = make_distributed(case, alone, lr=7.0)
    with torch.no_grad():
        for p, value in zip(params, saved["values"], strict=True):
            p.copy_(value if alone else distribute_tensor(value, mesh, case.placements))
    optimizer.load_state_dict(saved["optimizer"])
    run(case, mesh, params, optimizer, STEPS - 1, STEPS)
    return results(params, optimizer)
