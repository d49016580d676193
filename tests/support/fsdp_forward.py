# SPDX-License-Identifier: Apache-2.0
"""Trainings under FSDP2 whose steps go on behind the next forward, or not, with the same events."""

import copy
import time
from collections.abc import Iterator

import torch
from fsdp_worker import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from examples.gpt.engines import join_ranks
from zero8 import Adam8bitBlockwise, Muon8bitBlockwise
from zero8.optimizer.in_forward import InForward

STEPS = 4
SIZES = (96, 40, 96, 7)  # ragged on two and three ranks


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 96)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Layers(nn.Module):
    """Layers that FSDP2 shards one by one; events use some of them twice, seldom or not at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, SIZES, SIZES[1:]))
        self.rare = nn.Linear(96, 96)
        self.tied = Tied()
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.norm = nn.LayerNorm(96)  # the root's own

    def forward(self, x: Tensor, event: str, step: int) -> Tensor:
        """Return the outputs; the event says how the layers are used."""
        x = self.tied(self.frozen(self.norm(x)))
        if event == "rarely used" and step % 2:
            x = self.rare(x)
        if event == "other order" and step % 2:
            x = self.layers[1](self.layers[0](x))
        for layer in self.layers:
            if event == "activation checkpointing":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return x


def trained(event: str, is_behind: bool, mixed: bool = False) -> list:
    """Return losses, weights and states of a training in which something happens at each step."""
    join_ranks()
    torch.manual_seed(0)
    model = Layers()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    options = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in (*model.layers, model.rare, model.tied, model.frozen):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if event == "prefetch":
        model.layers[0].set_modules_to_forward_prefetch(list(model.layers[1:]))
    optimizer = Adam8bitBlockwise(model.parameters(), lr=0.01, weight_decay=0.1, seed=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps = slow(optimizer.step_in_forward(model)) if is_behind else None
    found: list = []
    for step in range(STEPS):
        for part in range(2 if event == "accumulation" else 1):
            model.set_requires_gradient_sync(event != "accumulation" or part == 1)
            loss = model(inputs(step, part), event, step).square().mean()
            loss.backward()
        found.append(loss.item())
        found += before_step(event, step, optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=event != "gradients set to zero")
        found += after_step(event, step, model, optimizer, steps)
    if event == "removed":
        assert not is_behind or "unshard" not in vars(model._get_fsdp_state()._fsdp_param_group)
    if steps is not None:
        steps.wait()
    states = optimizer.state_dict()["state"]
    found += [whole(p.detach()) for p in model.parameters()]
    return found + [whole(x) for number in sorted(states) for x in states[number].values()]


def slow(steps: InForward) -> InForward:
    """Have the thread sleep before each step, so that whatever does not wait comes too early."""
    take_step = steps._take_step

    def late(*args) -> None:
        time.sleep(0.005)
        take_step(*args)

    steps._take_step = late
    return steps


def inputs(step: int, part: int) -> Tensor:
    """Return a batch of this rank."""
    seed = 100 * step + 10 * part + torch.distributed.get_rank()
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))


def before_step(event: str, step: int, optimizer) -> Iterator:
    """Clip."""
    if event in ("clipped", "accumulation", "gradients set to zero"):
        yield optimizer.clip_grad_norm_(0.05 if step else 1e6)


def after_step(event: str, step: int, model, optimizer, steps) -> Iterator:
    """Let something happen while the thread steps."""
    if event == "evaluation" and step % 2:
        with torch.no_grad():
            yield model(inputs(99, 0), event, step)
    elif event == "saved and loaded" and step == 2:
        yield [whole(value) for value in model.state_dict().values()]
        saved = copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(saved)
    elif event == "reported":
        yield str(optimizer.memory_report())
    elif event == "removed" and step == 2 and steps is not None:
        steps.remove()


def failing(way: str) -> list[str]:
    """Return what each call of `step` raises, where the second step of rank 0 fails.

    `way` is the method by which the optimizer steps beside these calls.
    """
    join_ranks()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = Adam8bitBlockwise(model.parameters(), lr=0.01, weight_decay=0.0)
    steps, raised = getattr(optimizer, way)(model), []
    take_step = steps._take_step

    def fail(*_) -> None:
        raise ValueError("bad")

    for step in range(4):
        steps.wait()
        is_bad = step == 1 and torch.distributed.get_rank() == 0
        steps._take_step = fail if is_bad else take_step
        model(torch.ones(2, 8)).sum().backward()
        try:
            optimizer.step()
            raised.append("")
        except (ValueError, OSError) as error:
            raised.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
    return raised


def refused() -> list[str]:
    """Return the messages for models and optimizers whose steps cannot go on behind a forward."""
    join_ranks()
    plain, model = nn.Linear(8, 8), nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    messages = []
    for stepped, forward, made in (
        (plain, plain, Adam8bitBlockwise),
        (plain, model, Adam8bitBlockwise),
        (model, model, Muon8bitBlockwise),
    ):
        optimizer = made(stepped.named_parameters(), lr=0.1, weight_decay=0.0)
        try:
            optimizer.step_in_forward(forward)
        except ValueError as error:
            messages.append(str(error))
    return messages
