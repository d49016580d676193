# SPDX-License-Identifier: Apache-2.0
"""A training with its steps behind the forward, in which the thread sanitizer sees who reads what.

`python forward_races.py FRAMEWORK [early]`: `early` takes the waiting away.
"""

import ctypes
import sys
import time

import sanitized_op
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from zero_worker import config, make_engine

from benchmarks.engine.engines import join_ranks
from zero8 import Adam8bitBlockwise
from zero8.environment.worker import Behind

SIZE = 768
OWN_SUB_GROUPS = {"sub_group_size": SIZE**2, "stage3_param_persistence_threshold": 0}


class Layer(nn.Linear):
    """It copies its shard too, by a function that the sanitizer watches, as it does the op."""

    shard: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_bytes = self.shard.numel() * self.shard.element_size()
        for _ in range(10):  # for as long as a step without waits would take
            ctypes.memmove(ctypes.create_string_buffer(num_bytes), self.shard.data_ptr(), num_bytes)
            time.sleep(0.01)
        return super().forward(x)


def under_zero3(model):
    behind = {"zero8": {"step_in_forward": True}}
    engine = make_engine(config(3, dtype={}, zero=OWN_SUB_GROUPS) | behind, model)
    for layer in model:
        layer.shard = layer.weight.ds_tensor
    return engine.backward, engine.step


def under_fsdp2(model):
    for layer in (*model, model):
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for layer in model:
        layer.shard = layer.weight.to_local().detach()
    optimizer = Adam8bitBlockwise(model.parameters())
    optimizer.step_in_forward(model)
    return torch.Tensor.backward, optimizer.step


if __name__ == "__main__":
    sanitized_op.pytest_configure(None)
    join_ranks()
    torch.distributed.init_process_group("gloo")
    model = nn.Sequential(*(Layer(SIZE, SIZE, bias=False) for _ in range(4)))
    under = {"ZeRO-3": under_zero3, "FSDP2": under_fsdp2}[sys.argv[1]]
    backward, step = under(model)
    if "early" in sys.argv:
        Behind.need = lambda self, units: None
    for _ in range(3):
        backward(model(torch.ones(1, SIZE, dtype=next(model.parameters()).dtype)).float().sum())
        step()
