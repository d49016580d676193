# SPDX-License-Identifier: Apache-2.0
"""torchao's weights for training in low precision, in plain PyTorch and under FSDP2.

See docs/low-bit-training.md.
"""

import importlib

import pytest
import torch
from ranks import ranks_of_sizes
from torch import nn

from zero8 import Muon8bitBlockwise
from zero8.optimizer.check import check_replaceable

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

QUANTIZED = ("int8", "mixed", "bitnet")
KINDS = (*QUANTIZED, "float8")
DTYPES = (torch.float32, torch.bfloat16)

of_each_kind = pytest.mark.parametrize("kind", KINDS)
of_each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def standing_ranks(tmp_path_factory):
    """Ranks of this file alone: ZeRO-3 replaces F.linear for good, and torchao notes what it is."""
    with ranks_of_sizes(tmp_path_factory.mktemp) as of:
        yield of


@pytest.fixture(scope="module")
def worker():
    """The module that makes converted models; it imports torchao."""
    return importlib.import_module("torchao_worker")


# --- Plain PyTorch --------------------------------------------------------------------------------


@of_each_kind
@of_each_dtype
def test_training_lowers_the_loss_and_resumes_with_the_same_bits(kind, dtype, worker, tmp_path):
    model = worker.new_model(kind, dtype)
    optimizer = worker.optimizer_of(model)
    losses = worker.train(model, optimizer, worker.STEPS)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    assert {row.bits for row in optimizer.memory_report().rows} == {8, 32}  # 32: the bias

    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = worker.train(model, optimizer, worker.MORE), worker.bits(model, optimizer)

    resumed = worker.new_model(kind, dtype)
    nn.init.zeros_(resumed[2].bias)
    other = worker.optimizer_of(resumed, lr=7.0)
    with torch.serialization.safe_globals(worker.CLASSES):
        content = torch.load(path, weights_only=True)
    resumed.load_state_dict(content["model"])
    other.load_state_dict(content["optimizer"])
    assert worker.train(resumed, other, worker.MORE) == expected[0]
    assert worker.differing(worker.bits(resumed, other), expected[1]) == []


@pytest.mark.parametrize("kind", ["mixed", "bitnet", "float8"])
@of_each_dtype
def test_step_of_wrapped_weights_has_the_bits_of_plain_ones(kind, dtype, worker):
    found, expected = (worker.stepped_alone(one, dtype) for one in (kind, None))
    inside = "_tensor" if kind == "float8" else "_data"
    renamed = {name.replace(f".{inside}", ""): value for name, value in found.items()}
    assert worker.differing(renamed, expected) == []


@pytest.mark.parametrize("kind", ["mixed", "bitnet", "float8"])
def test_step_of_muon_of_wrapped_weights_has_the_bits_of_plain_ones(kind, worker):
    found = []
    for one in (kind, None):
        model = worker.new_model(one)
        matrices = {"params": [model[0].weight, model[2].weight], "use_muon": True}
        rest = {"params": [model[2].bias], "use_muon": False}
        worker.step_with_gradients(model, Muon8bitBlockwise([matrices, rest]), 2)
        found.append(dict(enumerate(worker.tensors(model).values())))
    assert worker.differing(*found) == []


@of_each_kind
def test_step_in_the_backward_has_the_bits_of_one_after_it(kind, worker):
    found = []
    for in_backward in (False, True):
        model = worker.new_model(kind)
        optimizer = worker.optimizer_of(model)
        if in_backward:
            optimizer.step_in_backward(model)
        worker.train(model, optimizer, 2)
        found.append(worker.bits(model, optimizer))
    assert worker.differing(*found) == []


@of_each_dtype
@pytest.mark.parametrize("steps_before", [0, 2])
def test_int8_step_with_an_lr_of_zero_leaves_codes_and_scales(steps_before, dtype, worker):
    """Those of torchao, and those of a step."""
    model = worker.new_model("int8", dtype)
    optimizer = worker.optimizer_of(model)
    worker.step_with_gradients(model, optimizer, steps_before)
    before = {name: value.clone() for name, value in worker.tensors(model).items()}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    worker.step_with_gradients(model, optimizer, 2)
    assert worker.differing(worker.tensors(model), before) == []
    assert {int(state["step"]) for state in optimizer.state.values()} == {steps_before + 2}


# --- FSDP2 ----------------------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("rounding", ["dither", "hash"])
def test_fsdp2_step_of_int8_weights_has_the_bits_of_one_process(
    rounding, dtype, worker, standing_ranks
):
    arguments = {"kind": "int8", "dtype": dtype, "stochastic_rounding": rounding}
    expected = worker.stepped_alone(**arguments)
    for found in standing_ranks(2).run(worker.stepped, **arguments):
        assert worker.differing(found, expected) == []


@pytest.mark.parametrize("kind", ["mixed", "bitnet", "float8"])
def test_fsdp2_step_of_wrapped_weights_has_the_bits_of_one_process(kind, worker, standing_ranks):
    expected = worker.stepped_alone(kind, torch.bfloat16)
    for found in standing_ranks(2).run(worker.stepped, kind=kind, dtype=torch.bfloat16):
        assert worker.differing(found, expected) == []


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, way) for kind in QUANTIZED for way in ("tensors", "rank")),
        *((kind, "classes") for kind in ("mixed", "bitnet", "float8 layers")),
    ],
)
def test_fsdp2_training_lowers_the_loss_and_resumes_with_the_same_bits(
    kind, way, worker, standing_ranks, tmp_path
):
    arguments = {"kind": kind, "way": way, "folder": tmp_path / "saved", "dtype": torch.float32}
    before = standing_ranks(2).run(worker.save, **arguments)
    after = standing_ranks(2).run(worker.resume, **arguments)
    for (losses, saved, end), (resumed, loaded, resumed_end) in zip(before, after, strict=True):
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
        assert worker.differing(loaded, saved) == []
        assert resumed == losses[worker.STEPS :]
        assert worker.differing(resumed_end, end) == []
    if way == "tensors":
        alone = worker.load_alone(kind, tmp_path / "saved", torch.float32)
        assert worker.differing(alone, before[0][1]) == []


# --- What is refused ------------------------------------------------------------------------------


@of_each_kind
def test_classes_of_torchao_that_reach_deepspeed_are_refused(kind, worker):
    p = worker.new_model(kind)[0].weight
    with pytest.raises(ValueError, match=f"got torchao's {type(p).__name__} under DeepSpeed"):
        check_replaceable("0.weight", p)


@pytest.mark.parametrize("kind", ["swapped", "float8 layers"])
def test_engine_of_deepspeed_trains_layers_of_torchao_that_keep_plain_tensors(
    kind, worker, standing_ranks
):
    for losses in standing_ranks(2).run(worker.train_in_engine, kind=kind):
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]


def test_int8_weights_in_columns_are_refused(worker, standing_ranks):
    for name, message in standing_ranks(2).run(worker.error_of_columns):
        assert name == "ValueError"
        assert "expected whole rows, which have one scale each: shard dimension 0" in message
