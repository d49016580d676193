# SPDX-License-Identifier: Apache-2.0
"""Models that torchao has converted, and what ranks do with them under FSDP2.

Needs torchao.
"""

from pathlib import Path

import torch
from fsdp_worker import start
from ranks import error_of
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
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


def note_scales(model: nn.Module) -> None:
    """Have torchao compute what its classes need before a forward under FSDP2."""
    precompute_bitnet_scale_for_fsdp(model)
    precompute_float8_dynamic_scale_for_fsdp(model)


def train(model: nn.Module, optimizer: BlockwiseOptimizer, steps: int) -> list[float]:
    """Take steps on one batch, another on each rank; return the losses."""
    is_sharded = torch.distributed.is_initialized()
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() if is_sharded else 0)
    dtype = next(model.parameters()).dtype
    x, y = (torch.randn(64, n, generator=generator).to(dtype) for n in (COLUMNS, OUTPUTS))
    losses = []
    for _ in range(steps):
        note_scales(model)
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


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that parameters are made of; they share memory with the model.

    As docs/low-bit-training.md has it.
    """
    found = {}
    for name, p in model.named_parameters():
        local = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
        parts = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else [""]
        for part in parts:
            tensor = getattr(local, part) if part else local
            if part == "_precomputed_scale":
                continue
            if isinstance(p, DTensor):
                shape = p.shape[: tensor.ndim]
                stride = torch.empty(shape, device="meta").stride()
                tensor = DTensor.from_local(
                    tensor, p.device_mesh, p.placements, shape=shape, stride=stride
                )
            found[f"{name}.{part}" if part else name] = tensor
    return found


def whole(value):
    """Return a copy of all of a tensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.clone() if isinstance(value, Tensor) else value


def bits(model: nn.Module, optimizer: BlockwiseOptimizer) -> dict:
    """Return the model's tensors and the optimizer's state, whole, by name."""
    states = optimizer.state_dict()["state"]
    found = {name: whole(value) for name, value in tensors(model).items()}
    for number, (name, _) in enumerate(model.named_parameters()):
        found |= {f"{name} {key}": whole(value) for key, value in states[number].items()}
    return found


def differing(ours: dict, theirs: dict) -> list[str]:
    """Return the names of the values of `bits` that are not the same bit for bit."""
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if not _same(value, theirs[name])]


def _same(ours, theirs) -> bool:
    if not isinstance(ours, Tensor):
        return bool(ours == theirs)
    as_bytes = [one.contiguous().view(-1).view(torch.uint8) for one in (ours, theirs)]
    return ours.dtype == theirs.dtype and torch.equal(*as_bytes)


def _contents(model: nn.Module, optimizer: BlockwiseOptimizer, way: str) -> dict:
    """Return what is saved: tensors as plain ones, as torchao's classes, or a rank's own."""
    if way == "rank":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if way == "classes":
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return {"model": tensors(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _write(model: nn.Module, optimizer: BlockwiseOptimizer, way: str, folder: Path) -> None:
    content = _contents(model, optimizer, way)
    if way == "rank":
        folder.mkdir(exist_ok=True)
        torch.save(content, folder / f"rank{torch.distributed.get_rank()}.pt")
    else:
        dcp.save(content, checkpoint_id=folder)


def _read(model: nn.Module, optimizer: BlockwiseOptimizer, way: str, folder: Path) -> None:
    if way == "rank":
        path = folder / f"rank{torch.distributed.get_rank()}.pt"
        content = torch.load(path, weights_only=False)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return
    content = _contents(model, optimizer, way)
    with torch.serialization.safe_globals(CLASSES):
        dcp.load(content, checkpoint_id=folder)
    if way == "classes":
        states = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
        set_state_dict(model, optimizer, **states)
    else:
        set_optimizer_state_dict(model, optimizer, content["optimizer"])


def save(kind: str, way: str, folder: Path, dtype: torch.dtype) -> tuple[list[float], dict, dict]:
    """Train under FSDP2, save, and train on; return losses, and `bits` then and at the end."""
    model = sharded(new_model(kind, dtype))
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, STEPS)
    _write(model, optimizer, way, folder)
    saved = bits(model, optimizer)
    losses += train(model, optimizer, MORE)
    return losses, saved, bits(model, optimizer)


def resume(kind: str, way: str, folder: Path, dtype: torch.dtype) -> tuple[list[float], dict, dict]:
    """Load what `save` saved, and train on; return what `save` returns of these steps."""
    model = sharded(new_model(kind, dtype))
    optimizer = optimizer_of(model)
    _read(model, optimizer, way, folder)
    loaded = bits(model, optimizer)
    return train(model, optimizer, MORE), loaded, bits(model, optimizer)


def load_alone(kind: str, folder: Path, dtype: torch.dtype) -> dict:
    """Load what "tensors" saved into one process without FSDP2; return `bits`."""
    model = new_model(kind, dtype)
    optimizer = optimizer_of(model)
    _read(model, optimizer, "tensors", folder)
    return bits(model, optimizer)


def stepped(kind: str, dtype: torch.dtype, **keywords) -> dict:
    """Return `bits` after steps with known gradients under FSDP2."""
    model = sharded(new_model(kind, dtype))
    optimizer = optimizer_of(model, **keywords)
    step_with_gradients(model, optimizer, STEPS)
    return bits(model, optimizer)


def stepped_alone(kind: str, dtype: torch.dtype, **keywords) -> dict:
    """Return `bits` after steps with known gradients in plain PyTorch."""
    model = new_model(kind, dtype)
    optimizer = optimizer_of(model, **keywords)
    step_with_gradients(model, optimizer, STEPS)
    return bits(model, optimizer)


def error_of_columns() -> tuple[str, str] | None:
    """Return the error of an optimizer of INT8 weights that are cut into columns."""
    start()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    codes, scales = torch.ones(64, 128, dtype=torch.int8), torch.ones(64)
    local = Int8QuantizedTrainingLinearWeight(codes, scales)
    p = nn.Parameter(DTensor.from_local(local, mesh, [Shard(1)], run_check=False))
    return error_of(Adam8bitBlockwise, [("weight", p)])


def train_in_engine(kind: str) -> list[float]:
    """Train a converted model whose parameters are plain tensors in an engine; return losses."""
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
    return losses
