# SPDX-License-Identifier: Apache-2.0
"""What a step of ZeRO-2 with CPU offload leaves out."""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zero_worker import base_optimizer, config, make_engine, train

STEPS = 3
CLIPPED = {"gradient_clipping": 1.0}
SHARD = 14090  # 28178 elements, padded to a multiple of 4, on two ranks


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


def long_buffers_of_both():
    """Return how many long float32 buffers come with our engine, and with DeepSpeed's AdamW."""
    found = []
    for optimizer in ("Adam8bitBlockwise", "AdamW"):  # each engine gone before the next
        before = storages_as_long_as_the_shard()
        engine = make_engine(config(optimizer=optimizer) | CLIPPED)
        train(engine, STEPS)
        found.append(storages_as_long_as_the_shard() - before)
        del engine
    return found


def test_no_float32_moments_are_hidden_anywhere(standing_ranks):
    """Against AdamW two float32 moments as long as the shard are gone.

    So is DeepSpeed's buffer of the weights, which are float32 here: it is the masters' memory.
    """
    for ours, theirs in standing_ranks(2).run(long_buffers_of_both):
        assert ours == theirs - 3


class CountCollectives(TorchDispatchMode):
    """Counts what goes to torch.distributed's process groups."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def collectives():
    """Return how many the optimizer's steps make, and how many the whole training."""
    engine = make_engine(config() | CLIPPED)
    inside, around = CountCollectives(), CountCollectives()
    step = base_optimizer(engine).step

    def counted(*args, **kwargs):
        with inside:
            return step(*args, **kwargs)

    base_optimizer(engine).step = counted
    with around:
        train(engine, STEPS)
    return inside.count, around.count


def test_step_makes_no_collective_of_its_own(standing_ranks):
    for inside, around in standing_ranks(2).run(collectives):
        assert inside == 0
        assert around >= STEPS  # the counter does count ZeRO's own
