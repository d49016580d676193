# SPDX-License-Identifier: Apache-2.0
"""What a step of ZeRO-2 with CPU offload leaves out, and what an AdamW checkpoint becomes."""

import gc

import pytest
import torch
from nests import difference
from torch.utils._python_dispatch import TorchDispatchMode
from zero_worker import MOMENTS, base_optimizer, config, held, make_engine, train

from zero8.spec.adam import ADAM
from zero8.spec.codec import DEFAULT_CODEC, codec_named
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

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


def train_fp32(folder):
    """Train with DeepSpeed's own AdamW and save; return the moments saved."""
    before = storages_as_long_as_the_shard()
    engine = make_engine(config(optimizer="AdamW") | CLIPPED)
    train(engine, STEPS)
    long_buffers = storages_as_long_as_the_shard() - before
    engine.save_checkpoint(folder, tag="adamw")
    (state,) = base_optimizer(engine).state.values()
    return {which: state[which].clone() for which in MOMENTS} | {"long buffers": long_buffers}


def continue_from_fp32(folder):
    """Load DeepSpeed AdamW's checkpoint and take a step in 8 bits."""
    engine = make_engine(config() | CLIPPED)
    engine.load_checkpoint(folder, tag="adamw")
    (state,) = base_optimizer(engine).state.values()
    step, decoded = state["step"], {which: state[which].clone() for which in MOMENTS}
    train(engine, 1, first=STEPS)
    return {"step": step, "decoded": decoded, "held": held(engine)}


def train_all(folder):
    """Run this file's trainings one after the other, each engine gone before the next."""
    result = {"8bit": train_8bit(), "fp32": train_fp32(folder)}
    return result | {"from fp32": continue_from_fp32(folder)}


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    return standing_ranks(2).run(train_all, folder=str(tmp_path_factory.mktemp("train")))


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


def test_cut_block_has_a_scale_of_its_own_on_each_rank(ranks):
    """Row 79 of inner.weight ends rank 0 and begins rank 1: each side uses its whole code range."""
    sides = []
    for rank, (codes_at, block) in zip(
        ranks, ((slice(-74, None), -1), (slice(0, 22), 0)), strict=True
    ):
        (state,) = rank["8bit"]["held"]["states"]
        piece = next(piece for piece in state["pieces"] if piece.name == "inner.weight")
        assert (piece.first + piece.numel if block else piece.first) == 7658 == 79 * 96 + 74
        codes, scales, _ = state["exp_avg"]
        assert codes[codes_at].view(torch.int8).abs().max() == 127
        sides.append(scales[block])
    assert not torch.equal(*sides)


def test_adamw_checkpoint_loads_with_its_moments_to_the_nearest_code(ranks):
    """Encoded or not yet: writing what was loaded gives the codes of what was saved."""
    for rank in ranks:
        loaded, saved = rank["from fp32"], rank["fp32"]
        (state,) = loaded["held"]["states"]
        assert (loaded["step"], state["step"]) == (STEPS, STEPS + 1)
        assert state["history"] > 1e38  # a bound that its steps were not counted for would clip
        table = PieceTable(state["pieces"], SHARD)
        for which in MOMENTS:
            stores = [
                MomentStore.zeros(codec_named(DEFAULT_CODEC), ADAM.moment(which), table)
                for _ in range(2)
            ]
            stores[0].write(0, loaded["decoded"][which])
            stores[1].write(0, saved[which])
            assert difference(*[(s.codes, s.scales, s.dense) for s in stores]) == ""
            assert stores[0].read(0, SHARD).abs().max() > 0
