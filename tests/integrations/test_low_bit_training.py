# SPDX-License-Identifier: Apache-2.0
"""torchao's weights for training in low precision, in plain PyTorch and under FSDP2.

See docs/low-bit-training.md.
"""

from pathlib import Path

import pytest
import torch
from doc_blocks import block_with
from fsdp_checkpoints import content_of
from fsdp_worker import start, whole
from nests import assert_same
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.prototype.quantized_training import (
    BitNetTrainingLinearWeight,
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinearWeight,
    Int8QuantizedTrainingLinearWeight,
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
)
from torchao.quantization import quantize_
from zero_worker import make_engine

from zero8 import Adam8bitBlockwise, assert_active
from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.optimizer.check import check_replaceable

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

QUANTIZED = {
    "int8": int8_weight_only_quantized_training,
    "mixed": int8_mixed_precision_training,
    "bitnet": bitnet_training,
}
CLASSES = [
    Int8QuantizedTrainingLinearWeight,
    Int8MixedPrecisionTrainingLinearWeight,
    Int8MixedPrecisionTrainingConfig,
    BitNetTrainingLinearWeight,
]
"""What torch.load must be told of; torchao itself registers that of float8."""

KINDS = (*QUANTIZED, "float8")
WRAPPED = ("mixed", "bitnet", "float8")


of_each_kind = pytest.mark.parametrize("kind", KINDS)
of_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

COLUMNS, HIDDEN, OUTPUTS = 128, 256, 64
STEPS, MORE = 4, 3


def new_model(kind: str | None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of which torchao has converted the linear layers; None leaves them plain.

    The weights of "swapped" (INT8 matmuls) and "float8 layers" are plain tensors.
    """
    torch.manual_seed(0)
    layers = nn.Linear(COLUMNS, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS)
    model = nn.Sequential(*layers).to(dtype)
    if kind in ("float8", "float8 layers"):
        gathers = kind == "float8"
        config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers)
        return convert_to_float8_training(model, config=config)
    if kind == "swapped":
        quantize_(model, int8_mixed_precision_training(module_swap=True))
    elif kind is not None:
        quantize_(model, QUANTIZED[kind]())
    return model


def sharded(model: nn.Module) -> nn.Module:
    """Return a model under FSDP2 on all ranks, layer by layer."""
    start()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (*(one for one in model if isinstance(one, nn.Linear)), model):
        fully_shard(layer, mesh=mesh)
    return model


def optimizer_of(
    model: nn.Module, made: type[BlockwiseOptimizer] = Adam8bitBlockwise, **keywords
) -> BlockwiseOptimizer:
    return made(model.named_parameters(), **{"lr": 1e-3, "weight_decay": 0.0, **keywords})


def train(model: nn.Module, optimizer: BlockwiseOptimizer, steps: int) -> list[float]:
    """Take steps on one batch, another on each rank; return the losses."""
    is_sharded = torch.distributed.is_initialized()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() if is_sharded else 0)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(64, n, generator=generator).to(dtype) for n in (COLUMNS, OUTPUTS))
    losses = []
    for _ in range(steps):
        precompute_bitnet_scale_for_fsdp(model)
        precompute_float8_dynamic_scale_for_fsdp(model)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """Return the gradient of a parameter of a shape at a step."""
    generator = torch.Generator().manual_seed(1000 * step + sum(shape))
    return torch.randn(shape, generator=generator)


def step_with_gradients(model: nn.Module, optimizer: BlockwiseOptimizer, steps: int) -> None:
    """Take steps with gradients that depend on nothing but the step and the shapes."""
    for step in range(steps):
        for p in model.parameters():
            grad = gradient(tuple(p.shape), step).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements)
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()


# What the page has for FSDP2: the tensors that parameters are made of, in the model's memory.
PAGE = block_with("docs/low-bit-training.md", "def tensors(model)").text
exec(PAGE.partition("\ncontent = ")[0])
tensors = globals()["tensors"]


def bits(model: nn.Module, optimizer: BlockwiseOptimizer) -> dict:
    """Return the model's tensors and the optimizer's state, whole, by name."""
    states = optimizer.state_dict()["state"]
    found = {name: whole(value) for name, value in tensors(model).items()}
    for number, (name, _) in enumerate(model.named_parameters()):
        found |= {f"{name} {key}": whole(value) for key, value in states[number].items()}
    return found


def _contents(model: nn.Module, optimizer: BlockwiseOptimizer, way: str) -> dict:
    """Return what is saved: tensors as plain ones, or as torchao's classes."""
    if way == "classes":
        return content_of(model, optimizer)
    return {"model": tensors(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _read(model: nn.Module, optimizer: BlockwiseOptimizer, way: str, folder: Path) -> None:
    content = _contents(model, optimizer, way)
    with torch.serialization.safe_globals(CLASSES):
        dcp.load(content, checkpoint_id=folder)
    if way == "classes":
        states = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(model, optimizer, **states)
    else:
        set_optimizer_state_dict(model, optimizer, content["optimizer"])


# --- Plain PyTorch --------------------------------------------------------------------------------


@of_each_kind
@of_each_dtype
def test_training_lowers_the_loss_and_resumes_with_the_same_bits(kind, dtype, tmp_path):
    model = new_model(kind, dtype)
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, STEPS)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    assert {row.bits for row in optimizer.memory_report().rows} == {8, 32}  # 32: the bias

    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = train(model, optimizer, MORE), bits(model, optimizer)

    resumed = new_model(kind, dtype)
    nn.init.zeros_(resumed[2].bias)
    other = optimizer_of(resumed, lr=7.0)
    with torch.serialization.safe_globals(CLASSES):
        content = torch.load(path, weights_only=True)
    resumed.load_state_dict(content["model"])
    other.load_state_dict(content["optimizer"])
    assert train(resumed, other, MORE) == expected[0]
    assert_same(bits(resumed, other), expected[1])


def stepped(kind: str | None, dtype: torch.dtype, change=lambda model: model, **keywords):
    """Return `bits` after steps with known gradients, in plain PyTorch if nothing shards it."""
    model = change(new_model(kind, dtype))
    optimizer = optimizer_of(model, **keywords)
    step_with_gradients(model, optimizer, STEPS)
    return bits(model, optimizer)


@pytest.mark.parametrize("kind", WRAPPED)
@of_each_dtype
def test_step_of_wrapped_weights_has_the_bits_of_plain_ones(kind, dtype):
    found, expected = (stepped(one, dtype) for one in (kind, None))
    inside = "_tensor" if kind == "float8" else "_data"
    renamed = {name.replace(f".{inside}", ""): value for name, value in found.items()}
    assert_same(renamed, expected)


@of_each_kind
def test_step_in_the_backward_has_the_bits_of_one_after_it(kind):
    found = []
    for in_backward in (False, True):
        model = new_model(kind)
        optimizer = optimizer_of(model)
        if in_backward:
            optimizer.step_in_backward(model)
        train(model, optimizer, 2)
        found.append(bits(model, optimizer))
    assert_same(*found)


# --- FSDP2 ----------------------------------------------------------------------------------------


@of_each_dtype
@pytest.mark.parametrize("rounding", ["dither", "hash"])
@on_ranks(2)
def test_fsdp2_step_of_int8_weights_has_the_bits_of_one_process(rounding, dtype):
    arguments = {"kind": "int8", "dtype": dtype, "stochastic_rounding": rounding}
    assert_same(stepped(**arguments, change=sharded), stepped(**arguments))


@pytest.mark.parametrize("kind", WRAPPED)
@on_ranks(2)
def test_fsdp2_step_of_wrapped_weights_has_the_bits_of_one_process(kind):
    arguments = kind, torch.bfloat16
    assert_same(stepped(*arguments, change=sharded), stepped(*arguments))


def save_and_resume(kind: str, way: str, folder: Path) -> dict:
    """Train under FSDP2, save, train on; load and train on.  Return `bits` as they were saved."""

    def new():
        model = sharded(new_model(kind))
        return model, optimizer_of(model)

    made = new()
    losses = train(*made, STEPS)
    dcp.save(_contents(*made, way), checkpoint_id=folder)
    saved = bits(*made)
    losses += train(*made, MORE)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]
    resumed = new()
    _read(*resumed, way, folder)
    assert_same(bits(*resumed), saved)
    assert train(*resumed, MORE) == losses[STEPS:]
    assert_same(bits(*resumed), bits(*made))
    return saved


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "tensors") for kind in QUANTIZED),
        *((kind, "classes") for kind in ("mixed", "bitnet", "float8 layers")),
    ],
)
def test_fsdp2_training_lowers_the_loss_and_resumes_with_the_same_bits(
    kind, way, standing_ranks, tmp_path
):
    folder = tmp_path / "saved"
    saved, _ = standing_ranks(2).run(save_and_resume, kind=kind, way=way, folder=folder)
    if way == "tensors":  # one process loads it, too
        alone = new_model(kind)
        optimizer = optimizer_of(alone)
        _read(alone, optimizer, way, folder)
        assert_same(bits(alone, optimizer), saved)


# --- What is refused ------------------------------------------------------------------------------


@of_each_kind
def test_classes_of_torchao_that_reach_deepspeed_are_refused(kind):
    p = new_model(kind)[0].weight
    with pytest.raises(ValueError, match=f"got torchao's {type(p).__name__} under DeepSpeed"):
        check_replaceable("0.weight", p)


@pytest.mark.parametrize("kind", ["swapped", "float8 layers"])
@on_ranks(2)
def test_engine_of_deepspeed_trains_layers_of_torchao_that_keep_plain_tensors(kind):
    config = {
        "train_micro_batch_size_per_gpu": 64,
        "optimizer": {"type": "Adam8bitBlockwise", "params": {"weight_decay": 0.0}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    engine = make_engine(config, new_model(kind))
    x, y = (gradient((64, n), 0) for n in (COLUMNS, OUTPUTS))
    losses = []
    for _ in range(STEPS):
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert_active(engine)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.98 * losses[0]


@on_ranks(2)
def test_int8_weights_in_columns_are_refused():
    start()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    codes, scales = torch.ones(64, 128, dtype=torch.int8), torch.ones(64)
    local = Int8QuantizedTrainingLinearWeight(codes, scales)
    p = nn.Parameter(DTensor.from_local(local, mesh, [Shard(1)], run_check=False))
    message = "expected whole rows, which have one scale each: shard dimension 0"
    with pytest.raises(ValueError, match=message):
        Adam8bitBlockwise([("weight", p)])
