# SPDX-License-Identifier: Apache-2.0
"""Engines whose tensors are counted where `zero8 plan` says that they are."""

import deepspeed
import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from zero_worker import base_optimizer, config, make_engine, take_step

import zero8
from benchmarks.states import state_bytes
from examples.gpt.engines import join_ranks

BUCKET = 50_000
SUB_GROUP = 200_000
ROWS, WIDTH, LAYERS = 1000, 256, 6


class Stack(torch.nn.Module):
    """An embedding and layers with biases: 650,752 parameters."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(ROWS, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, words):
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.float().square().mean()


def config_of(stage, offload, dtype, optimizer, accumulation, correction_bits=0, params_on=None):
    zero = {"reduce_bucket_size": BUCKET, "sub_group_size": SUB_GROUP}
    if params_on:
        zero["offload_param"] = {"device": params_on}
    params = {"weight_correction_bits": correction_bits} if correction_bits else {}
    kinds = {"dtype": dtype, "optimizer": optimizer}
    made = config(stage=stage, offload=offload, zero=zero, **kinds, **params)
    return made | {"gradient_accumulation_steps": accumulation}


def held_by_engines(cases):
    """Return, by case, the bytes that this rank holds of each kind of thing after two steps."""
    return {name: _held(config_of(*case)) for name, case in cases.items()}


def _held(ds_config):
    if ds_config["zero_optimization"]["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = Stack()
    else:
        model = Stack()
    engine = make_engine(ds_config, model)
    for _ in range(2 * ds_config["gradient_accumulation_steps"]):
        take_step(engine, torch.randint(0, ROWS, (2, 3)))
    zero = engine.optimizer
    found = _of_stage3(zero) if hasattr(zero, "fp32_partitioned_groups_flat") else _of_flat(zero)
    found |= _states(base_optimizer(engine))
    engine.destroy()
    return {what: num_bytes for what, num_bytes in found.items() if num_bytes}


def held_by_fsdp2(cases):
    """Return, by case, the bytes that this rank holds of each kind of thing after a step."""
    return {name: _held_by_fsdp2(*case) for name, case in cases.items()}


def _held_by_fsdp2(dtype, settings):
    join_ranks()
    model = Stack().to(dtype)
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = zero8.Adam8bitBlockwise(model.named_parameters(), lr=1e-2, **settings)
    model(torch.randint(0, ROWS, (2, 3))).backward()
    optimizer.step()
    params = list(model.parameters())
    found = {
        "weights": nbytes([p.to_local() for p in params]),
        "gradients": nbytes([p.grad.to_local() for p in params]),
        **_states(optimizer),
    }
    return {what: num_bytes for what, num_bytes in found.items() if num_bytes}


def _states(optimizer):
    if not hasattr(optimizer, "memory_report"):
        return {"moments": state_bytes(optimizer)}
    rows = optimizer.memory_report().rows
    return {
        "moments": sum(row.state_bytes for row in rows),
        "corrections of bf16 weights": sum(row.correction_bytes for row in rows),
    }


def _of_flat(zero):
    masters = zero.single_partition_of_fp32_groups
    found = {
        "weights": nbytes(zero.bit16_groups_flat),
        "master weights": nbytes(masters),
        "gradients of the step": nbytes([p.grad for p in masters if p.grad is not None]),
    }
    if zero.cpu_offload:
        # Without a GPU ours are in the weights' memory; with one, for which the plan is, those of
        # bfloat16 masters are in these.
        buffers = zero.param_buffer_of_bit16_for_cpu_offload_groups
        is_rounded = masters[0].dtype != buffers[0].dtype
        own = buffers if is_rounded else not_within(zero.bit16_groups_flat, buffers)
        found["weights on their way"] = nbytes(own)
        found["largest gradient"] = zero.temp_grad_buffer_for_cpu_offload.nbytes
        found["accumulated gradients"] = nbytes(zero.accumulated_grads_in_cpu.values())
    return found


def _of_stage3(zero):
    masters, weights = zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
    gradients = zero.grad_partitions_flat_buffer
    return {
        "weights": nbytes(weights),
        "master weights": nbytes(not_within(weights, masters)),
        "gradients": gradients.nbytes,
        "gradients of the step": nbytes(
            not_within([gradients], [p.grad for p in masters if p.grad is not None])
        ),
        "buckets of gradients": nbytes([b.buffer for b in zero.ipg_buckets.values()]),
    }


def not_within(others: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that have memory of their own."""
    memories = {t.untyped_storage().data_ptr() for t in others}
    return [t for t in tensors if t.untyped_storage().data_ptr() not in memories]


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
