# SPDX-License-Identifier: Apache-2.0
"""ZeRO-2 with CPU offload on two ranks, from the JSON config alone."""

import gc
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zero_worker import MOMENTS, Model, base_optimizer, config, difference, held, make_engine, train

from zero8.spec.codec import DEFAULT_CODEC, codec_named
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

STEPS = 6
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
    """Train; return losses, states, counts of collectives and of long float32 buffers."""
    before = storages_as_long_as_the_shard()
    engine = make_engine(config() | CLIPPED)
    inside, around = CountCollectives(), CountCollectives()
    step = base_optimizer(engine).step

    def counted(*args, **kwargs):
        with inside:
            return step(*args, **kwargs)

    base_optimizer(engine).step = counted
    with around:
        losses = train(engine, STEPS)
    long_buffers = storages_as_long_as_the_shard() - before
    types = [type(x).__name__ for s in base_optimizer(engine).state.values() for x in s.values()]
    return {
        "losses": losses,
        "state types": types,
        "held": held(engine),
        "collectives": (len(inside.names), len(around.names)),
        "long buffers": long_buffers,
    }


def train_fp32(folder):
    """Train with DeepSpeed's own AdamW and save half way; return losses and the moments saved."""
    before = storages_as_long_as_the_shard()
    engine = make_engine(config(optimizer="AdamW") | CLIPPED)
    losses = train(engine, STEPS // 2)
    long_buffers = storages_as_long_as_the_shard() - before
    engine.save_checkpoint(folder, tag="adamw")
    (state,) = [{**state} for state in base_optimizer(engine).state.values()]
    moments = {which: state[which].clone() for which in MOMENTS}
    losses += train(engine, STEPS - STEPS // 2, first=STEPS // 2)
    return {"losses": losses, "moments": moments, "long buffers": long_buffers}


def continue_from_fp32(folder):
    """Load DeepSpeed AdamW's checkpoint and train on in 8 bits."""
    engine = make_engine(config() | CLIPPED)
    engine.load_checkpoint(folder, tag="adamw")
    (state,) = base_optimizer(engine).state.values()
    step = state["step"]
    decoded = {which: state[which].clone() for which in MOMENTS}
    losses = train(engine, STEPS - STEPS // 2, first=STEPS // 2)
    return {"losses": losses, "step": step, "decoded": decoded, "held": held(engine)}


def train_all(folder):
    """Run this file's trainings one after the other, each engine gone before the next."""
    result = {"8bit": train_8bit(), "fp32": train_fp32(folder)}
    result["from fp32"] = continue_from_fp32(folder)
    engine = make_engine(config(fp32_params=["*"]) | CLIPPED)
    result["all fp32 moments"] = {"losses": train(engine, STEPS)}
    engine = make_engine(config() | CLIPPED)
    result["again"] = {"losses": train(engine, STEPS), "held": held(engine)}
    return result


@pytest.fixture(scope="module")
def ranks(standing_ranks, tmp_path_factory):
    return standing_ranks(2).run(train_all, folder=str(tmp_path_factory.mktemp("train")))


def test_training_lowers_the_loss_and_is_deterministic(ranks):
    for rank in ranks:
        assert rank["8bit"]["losses"][-1] < 0.5 * rank["8bit"]["losses"][0]
        assert rank["8bit"]["losses"] == rank["again"]["losses"]
        assert difference(rank["8bit"]["held"], rank["again"]["held"]) == ""


def expected_state_bytes():
    """Return the bytes of both moments on each rank, counted element by element."""
    shapes = [(name, tuple(p.shape)) for name, p in Model().named_parameters()]
    owners = [(name, shape, i) for name, shape in shapes for i in range(math.prod(shape))]
    scales = 3 if DEFAULT_CODEC == "log" else 2  # of both moments, per block; rows are blocks
    total = []
    for here in (owners[:SHARD], owners[SHARD:]):
        blocks = {(name, i // shape[1]) for name, shape, i in here if len(shape) == 2}
        quantized = sum(len(shape) == 2 for _, shape, _ in here)
        total.append(2 * quantized + 4 * scales * len(blocks) + 8 * (len(here) - quantized))
    return total


def test_state_is_uint8_and_its_bytes_are_those_of_codes_and_scales(ranks):
    """Matrices have rows of 96 and 131, one block each; the cut row has a scale on both ranks."""
    for rank, expected in zip(ranks, expected_state_bytes(), strict=True):
        assert rank["8bit"]["state types"].count("MomentTensor") == 2
        (state,) = rank["8bit"]["held"]["states"]
        tensors = state["exp_avg"] + state["exp_avg_sq"]
        assert [t.dtype for t in tensors] == 2 * [torch.uint8, torch.float32, torch.float32]
        assert sum(t.nbytes for t in tensors) == expected


def test_no_float32_moments_are_hidden_anywhere(ranks):
    """Against AdamW, which has two float32 moments as long as the shard, two buffers are gone."""
    for rank in ranks:
        assert rank["8bit"]["long buffers"] == rank["fp32"]["long buffers"] - 2


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


def test_all_moments_in_float32_equals_deepspeeds_adamw(ranks):
    """The same algorithm in another order of operations.  To first order losses differ by the sum
    of gradient * difference of updates.  An update rounds about 8 times, 2^-21 of its size; where
    a gradient is nothing but the rounding of its sum over 48 tokens (2^-24 * 48 of the typical
    gradient) Adam may step either way, which the loss sees as 2 * 2^-18 of the distance gone.
    A step of training at most doubles what it got from the one before: 2^-17 * 2^5 in 6 steps."""
    for rank in ranks:
        ours, theirs = rank["all fp32 moments"]["losses"], rank["fp32"]["losses"]
        assert ours[0] == theirs[0]
        for step in range(1, STEPS):
            assert abs(ours[step] - theirs[step]) <= distance_gone(theirs, step) * 2**-12


def distance_gone(losses, step, first=0):
    """Return how far the loss has gone from step `first`, up and down added."""
    return sum(abs(losses[t + 1] - losses[t]) for t in range(first, step))


def test_8bit_losses_stay_near_deepspeeds_adamw(ranks):
    """To first order the loss changes by gradient * update, so it follows fp32's to within the
    relative error of the updates times the distance gone.  The first update uses moments before
    they are ever quantized: losses 0 and 1 agree to rounding, as above.  From then on updates are
    off by about one code, 1/32 (m: half of 1/16 or of 1/32; the root of v: 1/32 or less)."""
    for rank in ranks:
        ours, theirs = rank["8bit"]["losses"], rank["fp32"]["losses"]
        assert ours[0] == theirs[0]
        assert abs(ours[1] - theirs[1]) <= distance_gone(theirs, 1) * 2**-17
        for step in range(2, STEPS):
            assert abs(ours[step] - theirs[step]) <= distance_gone(theirs, step, first=1) / 32


def test_adamw_checkpoint_loads_with_its_moments_to_the_nearest_code(ranks):
    """Encoded or not yet: writing what was loaded gives the codes of what was saved."""
    for rank in ranks:
        loaded, saved = rank["from fp32"], rank["fp32"]["moments"]
        (state,) = loaded["held"]["states"]
        assert (loaded["step"], state["step"]) == (STEPS // 2, STEPS)
        table = PieceTable(state["pieces"], SHARD)
        for which in MOMENTS:
            stores = [MomentStore.zeros(codec_named(DEFAULT_CODEC), which, table) for _ in range(2)]
            stores[0].write(0, loaded["decoded"][which])
            stores[1].write(0, saved[which])
            assert difference(*[(s.codes, s.scales, s.dense) for s in stores]) == ""
            assert stores[0].read(0, SHARD).abs().max() > 0


def test_training_goes_on_from_an_adamw_checkpoint(ranks):
    """The first loss depends on weights only; the others follow fp32's as after any step."""
    for rank in ranks:
        ours = rank["from fp32"]["losses"]
        theirs = rank["fp32"]["losses"][STEPS // 2 :]
        assert ours[0] == theirs[0]
        for step in range(1, len(ours)):
            assert abs(ours[step] - theirs[step]) <= distance_gone(theirs, step) / 32
