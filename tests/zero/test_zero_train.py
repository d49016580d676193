# SPDX-License-Identifier: Apache-2.0
"""What a step of ZeRO-2 with CPU offload leaves out."""

import gc

import torch
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from zero_worker import base_optimizer, config, make_engine, train

SHARD = 14090  # 28178 elements, padded to a multiple of 4, on two ranks


def storages_as_long_as_the_shard():
    """Return how many float32 buffers of at least a shard's length are alive."""
    gc.collect()
    # Wrappers, such as DTensors, have no memory but that of such tensors.
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    dense = (x for x in tensors if (x.dtype, x.layout) == (torch.float32, torch.strided))
    storages = [x.untyped_storage() for x in dense]
    return len({one.data_ptr() for one in storages if one.nbytes() >= 4 * SHARD})


@on_ranks(2)
def test_no_float32_moments_are_hidden_anywhere():
    """Against AdamW two float32 moments as long as the shard are gone.

    So is DeepSpeed's buffer of the weights, which are float32 here: it is the masters' memory.
    """
    found = []
    for optimizer in ("Adam8bitBlockwise", "AdamW"):  # each engine gone before the next
        before = storages_as_long_as_the_shard()
        engine = make_engine(config(optimizer=optimizer) | {"gradient_clipping": 1.0})
        train(engine, 3)
        found.append(storages_as_long_as_the_shard() - before)
        del engine
    assert found[0] == found[1] - 3


class CountCollectives(TorchDispatchMode):
    """Counts what goes to torch.distributed's process groups."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_step_makes_no_collective_of_its_own():
    engine = make_engine(config() | {"gradient_clipping": 1.0})
    inside, around = CountCollectives(), CountCollectives()
    step = base_optimizer(engine).step

    def counted(*args, **kwargs):
        with inside:
            return step(*args, **kwargs)

    base_optimizer(engine).step = counted
    with around:
        train(engine, 3)
    assert inside.count == 0
    assert around.count >= 3  # the counter does count ZeRO's own
