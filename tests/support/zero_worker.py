# SPDX-License-Identifier: Apache-2.0
"""Models, configs and helpers for what runs on the ranks of the ZeRO tests."""

import inspect
import math
import os
import zlib
from types import MethodType

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from shared_memory import leave_out_shared_memory

import zero8  # noqa: F401  registers the optimizer type

leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

MOMENTS = ("exp_avg", "exp_avg_sq")
BF16_MASTERS = {"bf16_master_weights_and_grads": True}
# Options of `config` for other algorithms than Adam.
LION = {"optimizer": "Lion8bitBlockwise"}
SGD = {"optimizer": "SGD8bitBlockwise", "momentum": 0.9, "nesterov": True, "lr": 0.1}
MIX = {"optimizer": "AdEMAMix8bitBlockwise", "t_alpha": 4, "t_beta3": 4}


class Model(torch.nn.Module):
    """A small net with an embedding, odd sizes and tensors that stay float32."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(67, 96)
        self.inner = torch.nn.Linear(96, 131)
        self.norm = torch.nn.LayerNorm(131)
        self.head = torch.nn.Linear(131, 67, bias=False)

    def forward(self, tokens, targets):
        hidden = torch.tanh(self.inner(self.embed(tokens)))
        logits = self.logits(self.norm(hidden))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def logits(self, hidden):
        """Return what other nets compute in another way."""
        return self.head(hidden)


def pattern(name, shape):
    """Return bfloat16 numbers in float32, of sizes that differ by row, some of them zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        size = torch.randint(-12, 2, shape[:1], generator=generator)
        values *= torch.exp2(size.float()).view(-1, *[1] * (len(shape) - 1))
        values[torch.rand(shape, generator=generator) < 0.1] = 0.0
        values[shape[0] // 2] = 0.0
    return values.bfloat16().float()


class Bag(torch.nn.Module):
    """Parameters of many shapes; the gradients depend on name and step, on nothing else.

    All values are bfloat16 numbers, so that the gradients are the same in every ZeRO layout and
    precision: averages over ranks, sums and casts are exact.
    """

    SHAPES = {
        "embed": (67, 96),  # rows of one block of 96
        "wide": (20, 300),  # 256 + 44
        "conv": (6, 10, 9, 13),  # rows of 117: two dimensions kept
        "long": (2, 2500),  # ten blocks to a row
        "thin": (3000, 2),  # blocks of 128 rows; the last has 56
        "bias": (131,),
        "single": (1,),
        "unused": (60, 70),  # never gets a gradient
        "frozen": (50, 90),  # does not want one
    }
    pattern = staticmethod(pattern)

    def __init__(self):
        super().__init__()
        for name, shape in self.SHAPES.items():
            parameter = torch.nn.Parameter(self.pattern(f"init {name}", shape))
            self.register_parameter(name, parameter.requires_grad_(name != "frozen"))
        self.tied = self.embed

    def forward(self, step, poison=None):
        """Return a loss whose gradient by `name` is pattern(name step); a NaN in `poison`'s."""
        total = 0.0
        # The tied one is used twice, with the same gradient: their sum is exact.
        for name in (*self.SHAPES, "embed"):
            if name in ("unused", "frozen"):
                continue
            parameter = getattr(self, name)
            grad = self.pattern(f"{name} {step}", self.SHAPES[name])
            if name == poison:
                grad.view(-1)[-1] = math.nan
            total = total + (parameter * grad.to(parameter.device, parameter.dtype)).sum()
        return total


def config(stage=2, offload="cpu", dtype=None, optimizer="Adam8bitBlockwise", zero=None, **params):
    """Return a DeepSpeed config; `dtype` is the section that switches bf16 on."""
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.01, **params}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        "steps_per_print": 1000000,
    }
    if offload:
        made["zero_optimization"]["offload_optimizer"] = {"device": offload, "pin_memory": False}
    if dtype is not None:
        made["bf16"] = {"enabled": True, **dtype}
    return made


def make_engine(ds_config, model=None, groups=None, **options):
    """Return an engine over a freshly seeded model; options are those of `initialize`."""
    # DeepSpeed asks for the processor's own fp16 instructions; torch computes without them.
    get_accelerator().is_fp16_supported = lambda: True
    # DeepSpeed does not forget that an engine has used autocast: all later ones of the process
    # would get its GradScaler.
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    if model is None:
        torch.manual_seed(7)
        model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()) if groups is None else groups,
        config=ds_config,
        **options,
    )
    return engine


MADE = (
    (DeepSpeedZeroOptimizer, "initialize_optimizer_states"),
    (DeepSpeedZeroOptimizer_Stage3, "_create_fp32_partitions"),
    (DeepSpeedZeroOptimizer_Stage3, "_setup_for_real_optimizer"),
)
"""Methods in which DeepSpeed makes gradients and weights of its own."""
PASSES = (
    "unscale_and_clip_grads",
    "_optimizer_step",
    "_reassign_or_swap_out_partitioned_parameters",
)
"""Methods in which, or after which, it makes passes over them."""


def pair(ds_config, model=Bag):
    """Return an engine over a new model, and one with DeepSpeed's own memory and passes.

    `model` makes the model; None stands for a `Model`.
    """
    engine = make_engine(ds_config, model())
    patched = [(*place, getattr(*place)) for place in MADE]
    for zero_class, name, method in patched:
        setattr(zero_class, name, inspect.unwrap(method))
    try:
        other = make_engine(ds_config, model())
    finally:
        for place in patched:
            setattr(*place)
    zero = other.optimizer
    for name in PASSES:
        if hasattr(zero, name):
            setattr(zero, name, MethodType(inspect.unwrap(getattr(type(zero), name)), zero))
    return engine, other


def batch(step, micro=4, rank=None):
    """Return tokens and targets that depend on the step and the rank, by default this one."""
    rank = int(os.environ["RANK"]) if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 60, (micro, 12), generator=generator)  # rows 60..66 are never used
    return tokens, (tokens * 7 + 3) % 67


def train(engine, steps, first=0):
    """Train a `Model` and return the losses."""
    return [take_step(engine, *batch(step)) for step in range(first, first + steps)]


def through_and_resumed(make, train, folder, tag="saved"):
    """Return what a run holds that never stopped, and one that was saved and loaded.

    `make` makes the engine; `train` trains it, from the start or (True) from where it was saved.
    """
    engine = make()
    train(engine, False)
    engine.save_checkpoint(folder, tag=tag)
    through = {"losses": train(engine, True), **held(engine)}
    engine = make()
    engine.load_checkpoint(folder, tag=tag)
    return through, {"losses": train(engine, True), **held(engine)}


def together(function, *args):
    """Call a function on rank 0 while the others wait."""
    if torch.distributed.get_rank() == 0:
        function(*args)
    torch.distributed.barrier()


def take_step(engine, *inputs):
    """Take one step and return the loss."""
    loss = engine(*inputs)
    engine.backward(loss)
    engine.step()
    return loss.item()


def base_optimizer(engine):
    """Return zero8's optimizer inside the engine."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def moments_of(state):
    """Return the 8-bit moments of a state."""
    return [value for value in state.values() if hasattr(value, "store")]


def parameters_of(engine):
    """Return copies on the CPU of the parameters, whole."""
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
            found[name] = p.detach().clone().cpu()
    return found


def held(engine):
    """Return copies on the CPU of the parameters, and of what this rank steps over with its state.

    Padding, which is uninitialized memory in ZeRO-3, is set to zero.
    """
    states = []
    for p, state in base_optimizer(engine).state.items():
        entry = {key: plain(value) for key, value in state.items()}
        entry["master"] = p.detach().clone().cpu()
        if moments := moments_of(state):
            entry["pieces"] = moments[0].store.table.pieces
            held_here = torch.zeros(p.shape, dtype=torch.bool)
            for piece in entry["pieces"]:
                held_here[piece.start : piece.start + piece.numel] = True
            entry["master"][~held_here] = 0.0
        states.append(entry)
    return {"parameters": parameters_of(engine), "states": states}


def plain(value):
    """Return a copy on the CPU: of an 8-bit moment its codes, scales and float32 values."""
    if hasattr(value, "store"):
        store = value.store
        return tuple(t.clone().cpu() for t in (store.codes, store.scales, store.dense))
    return value.clone().cpu() if isinstance(value, torch.Tensor) else value
