# SPDX-License-Identifier: Apache-2.0
"""What a step of ZeRO-2 with CPU offload leaves out."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zero_worker import base_optimizer, config, held, make_engine, train

STEPS = 3
CLIPPED = {"gradient_clipping": 1.0}
SHARD = 14090  # 28178 elements, padded to a multiple of 4, on two ranks


class CountCollectives(TorchDispatchMode):
    """Counts what goes to torch.distributed's process groups."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def storages_as_long_as_the_shard():
    """Return how many float32 buffers of at least a shard's length are alive."""
    gc.collect()
    found = set()
    for thing in gc.get_objects():
        # Wrappers, such as DTensors, have no memory but that of such tensors.
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            if thing.dtype == torch.float32 and thing.untyped_storage().nbytes() >= 4 * SHARD:
                found.add(thing.untyped_storage().data_ptr())
    return len(found)


def train_8bit():
    """Train; return what is held, and counts of collectives and of long float32 buffers."""
    before = storages_as_long_as_the_shard()
    engine = make_engine(config() | CLIPPED)
    inside, around = CountCollectives(), CountCollectives()
    step = base_optimizer(engine).step

    def counted(*args, **kwargs):
        with inside:
            return step(*args, **kwargs)

    base_optimizer(engine).step = counted
    with around:
        train(engine, STEPS)
    long_buffers = storages_as_long_as_the_shard() - before
    collectives = len(inside.names), len(around.names)
    return {"held": held(engine), "collectives": collectives, "long buffers": long_buffers}


def train_fp32():
    """Train with DeepSpeed's own AdamW; return the count of long float32 buffers."""
    before = storages_as_long_as_the_shard()
    engine = make_engine(config(optimizer="AdamW") | CLIPPED)
    train(engine, STEPS)
    long_buffers = storages_as_long_as_the_shard() - before
    return {"long buffers": long_buffers}


def train_all():
    """Run this file's trainings one after the other, each engine gone before the next."""
    return {"8bit": train_8bit(), "fp32": train_fp32()}


@pytest.fixture(scope="module")
def ranks(standing_ranks):
    return standing_ranks(2).run(train_all)


def test_no_float32_moments_are_hidden_anywhere(ranks):
    """Against AdamW two float32 moments as long as the shard are gone.

    So is DeepSpeed's buffer of the weights, which are float32 here: it is the masters' memory.
    """
    for rank in ranks:
        assert rank["8bit"]["long buffers"] == rank["fp32"]["long buffers"] - 3


def test_step_makes_no_collective_of_its_own(ranks):
    for rank in ranks:
        inside, around = rank["8bit"]["collectives"]
        assert inside == 0
        assert around >= STEPS  # the counter does count ZeRO's own
