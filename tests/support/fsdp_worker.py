# SPDX-License-Identifier: Apache-2.0
"""What ranks do with a model under FSDP2, and the same without it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from examples.gpt.engines import join_ranks
from zero8 import Adam8bitBlockwise, AdEMAMix8bitBlockwise, Lion8bitBlockwise, SGD8bitBlockwise
from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.spec.grid import is_narrow, rows_per_block

# Ragged rows, rows of no whole number of blocks, an empty shard on all ranks but one, experts cut
# in their first and in their second dimension, narrow rows whose groups are cut and are not.
SHAPES = {
    "odd": (33, 512),
    "ragged": (64, 200),
    "vector": (301,),
    "one_row": (1, 5000),
    "experts": (5, 12, 300),
    "cut_experts": (3, 12, 300),
    "conv": (40, 16, 3, 3),
    "even_groups": (1024, 16),
    "cut_groups": (1000, 12),
}
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Weights(nn.Module):
    """Parameters whose gradients are known: those of the sum of their products with them."""

    SHAPES = SHAPES

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        for number, (name, shape) in enumerate(self.SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            self.register_parameter(name, nn.Parameter(values.to(dtype)))

    def forward(self, step: int, without: str = "") -> Tensor:
        """Return the loss of a step, which one parameter may have no part in."""
        products = [
            p * self.gradient(name, step).to(p.device, p.dtype)
            for name, p in self.named_parameters()
            if name != without
        ]
        return sum(product.float().sum() for product in products)

    def gradient(self, name: str, step: int) -> Tensor:
        """Return 4 bits: 3 times them are a bfloat16, so that the mean of ranks is exact."""
        generator = torch.Generator().manual_seed(1000 * step + list(self.SHAPES).index(name))
        numbers = torch.randn(self.SHAPES[name], generator=generator)
        return numbers.to(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Layout:
    """One way of sharding."""

    dtype: torch.dtype = torch.float32
    offload: bool = False
    mixed: bool = False
    replicas: int = 1
    keywords: tuple = ()
    made: type = Adam8bitBlockwise


LAYOUTS = {
    "float32": Layout(),
    "offload": Layout(offload=True),
    "mixed": Layout(mixed=True, offload=True),
    "bfloat16": Layout(torch.bfloat16),
    "corrected": Layout(torch.bfloat16, keywords=(("weight_correction_bits", 8),)),
    "dynamic": Layout(keywords=(("codec", "dynamic"),)),
    "log6": Layout(keywords=(("codec", "log6"),)),
    "linear4": Layout(keywords=(("codec", "linear4"),)),
    "lion": Layout(torch.bfloat16, made=Lion8bitBlockwise),
    "ademamix": Layout(
        keywords=(("betas", (0.9, 0.95, 0.99)), ("t_alpha", 6), ("t_beta3", 6)),
        made=AdEMAMix8bitBlockwise,
    ),
    "sgd": Layout(
        offload=True, keywords=(("momentum", 0.9), ("nesterov", True)), made=SGD8bitBlockwise
    ),
}


def sharded(layout: Layout, model: nn.Module | None = None) -> nn.Module:
    """Return the model, a new one unless given, under FSDP2."""
    model, device = model or Weights(layout.dtype), join_ranks().type
    world = torch.distributed.get_world_size()
    shape, names = (world,), ("shard",)
    if layout.replicas > 1:
        shape, names = (layout.replicas, world // layout.replicas), ("replicate", "shard")
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if layout.mixed else None
    offload = CPUOffloadPolicy(pin_memory=device == "cuda") if layout.offload else None
    return fully_shard(
        model,
        mesh=init_device_mesh(device, shape, mesh_dim_names=names),
        shard_placement_fn=lambda p: Shard(1) if p is model.cut_experts else None,
        **({"mp_policy": mixed} if mixed else {}),
        **({"offload_policy": offload} if offload else {}),
    )


def optimizer_of(model: nn.Module, layout: Layout, **keywords) -> BlockwiseOptimizer:
    known = layout.made.algorithm.keywords
    options = {key: value for key, value in OPTIONS.items() if key in known}
    keywords = {**options, **dict(layout.keywords), **keywords}
    return layout.made(model.named_parameters(), **keywords)


def made(layout: str, steps: int = 0, **keywords) -> tuple[nn.Module, BlockwiseOptimizer]:
    """Return a model under FSDP2 and its optimizer after some steps; `layout` is of `LAYOUTS`."""
    join_ranks()
    model = sharded(LAYOUTS[layout])
    optimizer = optimizer_of(model, LAYOUTS[layout], **keywords)
    run(model, optimizer, 0, steps)
    return model, optimizer


def run(model: nn.Module, optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def start() -> None:
    join_ranks()


def whole(value):
    """Return a copy on the CPU of what all ranks hold of a tensor together, on every rank."""
    if isinstance(value, DTensor):
        # NCCL does not gather what is kept on the CPU.
        value = value.to(value.device_mesh.device_type).full_tensor()
    return value.clone().cpu() if isinstance(value, Tensor) else value


def results(model: nn.Module, optimizer) -> dict[str, dict]:
    """Return by parameter its values, whole, and the entries of its saved state, whole."""
    states = optimizer.state_dict()["state"]
    found = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        entries = {key: whole(value) for key, value in states.get(number, {}).items()}
        found[name] = {"values": whole(p.detach()), **entries}
    return found


def trained(layout: str, steps: int, way: str = "after the backward") -> dict[str, dict]:
    """Return `results` after some steps, in one of these ways.

    Alone: of one process on plain tensors.  In DDP, and under FSDP2 otherwise.  Accelerate 1.15
    makes the optimizer before the model is sharded, puts stand-ins into the groups, then the
    sharded parameters, and carries the states, of which there are none, to the device and back.
    `model.to` exchanges DTensors, as it does no plain tensors.
    """
    of = LAYOUTS[layout]
    model = Weights(torch.float32 if way == "moved" else of.dtype)
    if way == "Accelerate":
        optimizer = optimizer_of(model, of)
        (group,) = optimizer.param_groups
        group["params"] = [torch.empty(1) for _ in group["params"]]
        group["params"] = list(sharded(of, model).parameters())
        optimizer.load_state_dict(optimizer.state_dict())
        run(model, optimizer, 0, steps)
        return results(model, optimizer)
    if way == "DDP":
        join_ranks()
    elif way != "alone":
        model = sharded(of, model)
    optimizer = optimizer_of(model, of)
    if way == "moved":
        model.to(of.dtype)
    if way == "in the backward":
        optimizer.step_in_backward(model)
    run(DistributedDataParallel(model) if way == "DDP" else model, optimizer, 0, steps)
    return results(model, optimizer)


def clipped(
    layout: str, by_norms: list[Tensor] | None = None
) -> tuple[dict[str, dict], list[Tensor]]:
    """Return `results` after steps that are clipped, and the norms."""
    model, optimizer = made(layout)
    norms = []
    for step in range(3):
        model(step).backward()
        if by_norms is None:
            norms.append(optimizer.clip_grad_norm_(0.5))
        else:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(whole(torch.nn.utils.get_total_norm(grads)))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, by_norms[step])
        optimizer.step()
        optimizer.zero_grad()
    return results(model, optimizer), norms


def accumulated(layout: str, in_backward: bool) -> dict[str, dict]:
    """Return `results` after steps of two micro-batches, the first without synchronization."""
    model, optimizer = made(layout)
    if in_backward:
        optimizer.step_in_backward(model)
    for step in range(3):
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(2 * step + is_last).backward()
        optimizer.step()
        optimizer.zero_grad()
    return results(model, optimizer)


def rows_of_cut_groups(name: str, *world_sizes: int, block_size: int = 256) -> list[int]:
    """Return the rows of a parameter that share a block with rows of another rank."""
    shape = SHAPES[name]
    if not is_narrow(shape):
        return []
    per_group = rows_per_block(shape, block_size)
    rows = set()
    for world_size in world_sizes:
        chunk = -(-shape[0] // world_size)
        for boundary in range(chunk, shape[0], chunk):
            if boundary % per_group:
                first = boundary // per_group * per_group
                rows |= set(range(first, min(first + per_group, shape[0])))
    return sorted(rows)


def differing(got: dict[str, dict], expected: dict[str, dict], *world_sizes: int) -> list[str]:
    """Return what is not equal bit by bit, outside of groups of rows that a boundary cuts."""
    wrong = []
    for name, entries in expected.items():
        assert got[name].keys() == entries.keys(), name
        cut = rows_of_cut_groups(name, *world_sizes)
        for key, value in entries.items():
            ours = got[name][key]
            if isinstance(value, Tensor) and value.ndim and key != "format" and cut:
                kept = torch.ones(len(value), dtype=torch.bool)
                kept[cut] = False
                ours, value = ours[kept], value[kept]
            same = torch.equal(ours, value) if isinstance(value, Tensor) else ours == value
            if not same:
                wrong.append(f"{name}.{key}")
    return wrong
