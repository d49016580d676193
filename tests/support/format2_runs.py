# SPDX-License-Identifier: Apache-2.0
"""Runs that zero8 0.1.0 saved, in states of format 2, and how they go on.

`tests/golden/write_format2.py` runs this file with the zero8 of that time, so that it takes from
zero8 and from the other files in this folder only what both had.

Weights and gradients are numbers of eight bits that integers make: sums and averages over ranks
are exact, and neither the processor nor the version of torch matters.
"""

import hashlib
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fsdp_worker import start
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from zero_worker import base_optimizer, config, make_engine, take_step

from zero8 import Adam8bitBlockwise
from zero8.spec.dynamic import DynamicCode

try:
    from zero8.checkpoint.read.bitsandbytes import from_bitsandbytes
except ImportError:  # it has moved since
    from zero8.checkpoint.bitsandbytes import from_bitsandbytes

SAVED_AFTER, STEPS = 3, 6
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "min_8bit_size": 100}
OTHER_LR = 7.0
"""That of optimizers before they load a checkpoint."""

# A matrix whose rows are two blocks, a vector, groups of narrow rows which two ranks share.
SHAPES = {"wide.weight": (3, 300), "wide.bias": (33,), "narrow.weight": (24, 12)}
LATE = {**SHAPES, "late.weight": (2, 70)}
"""The last one has no gradient, and so no state, before the checkpoint."""

GOLDEN_SHAPES = {"wide.weight": (5, 300), "wide.bias": (5,), "narrow.weight": (24, 30)}
"""Those of the checkpoints that test_golden.py decodes."""

STATE_SHAPES = {"wide": (2, 333), "experts": (2, 2, 100), "vector": (17,)}
"""Those of `plain_state_v1.pt`."""

BITSANDBYTES_SHAPES = {"blocks": (4, 512), "ragged": (5, 300), "narrow": (50, 12), "bias": (9,)}


@dataclass(frozen=True)
class Run:
    """A run that was saved.

    Attributes:
        go_on: loads its checkpoint, takes the other steps, and returns what `digest` does.
        saved: the checkpoint's name in tests/golden; None if there is none.
        world_size: number of ranks; 0 for a process that is no rank.
        options: of the optimizer, or of DeepSpeed's config.
        shapes: of the parameters.
        save: writes the checkpoint into a folder; None if another run has.
    """

    go_on: Callable
    saved: str | None
    world_size: int = 0
    options: dict = field(default_factory=dict)
    shapes: dict = field(default_factory=lambda: SHAPES)
    save: Callable | None = None


def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return numbers of eight bits, of sizes that differ by row, some of them and a row zero."""
    index = torch.arange(torch.Size(shape).numel()) + zlib.crc32(name.encode())
    mixed = index * 2654435761 % 2**32
    values = ((mixed >> 18) % 255 - 127).float().view(shape) / 64
    if len(shape) > 1:
        row = mixed.view(shape[0], -1)[:, 0]
        values *= torch.exp2(-((row >> 9) % 10).float()).view(-1, *[1] * (len(shape) - 1))
        values[shape[0] // 2] = 0.0
    return values


class Part(nn.Module):
    """Parameters of one module."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        super().__init__()
        self._shapes = shapes
        for name, shape in shapes.items():
            values = numbers(f"init {name}", shape).to(dtype)
            self.register_parameter(name.split(".")[-1], nn.Parameter(values))

    def forward(self, step: int) -> Tensor:
        """Return a loss whose gradients are numbers(name and step)."""
        terms = [
            (getattr(self, name.split(".")[-1]) * gradient(name, shape, step)).float().sum()
            for name, shape in self._shapes.items()
            if name != "late.weight" or step > SAVED_AFTER
        ]
        return sum(terms, torch.zeros(()))


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return numbers(f"{name} {step}", shape).bfloat16()


class Model(nn.Module):
    """A module for each first part of the parameters' names; as FSDP and ZeRO-3 expect it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32):
        super().__init__()
        for module, names in itertools.groupby(shapes, lambda name: name.partition(".")[0]):
            self.add_module(module, Part({name: shapes[name] for name in names}, dtype))

    def forward(self, step: int) -> Tensor:
        """Return the sum of the parts' losses."""
        return sum(part(step) for part in self.children())


def digest(optimizer: Adam8bitBlockwise) -> dict[str, list]:
    """Return, of each run of elements here, its step and the hashes of weights and moments.

    float32 moments stand for their codes and scales: each code has a value of its own.
    """
    found = {}
    for p, stores in optimizer.all_moments().items():
        state = optimizer.state[p]
        tensors = [p.detach(), state.get("param_correction")]
        weights, correction = (None if t is None else local(t).reshape(-1) for t in tensors)
        for piece in stores[0].table.pieces:
            here = slice(piece.start, piece.start + piece.numel)
            entries = {"step": int(state["step"]), "history": state["history"]}
            entries["weights"] = hash_of(weights[here])
            if correction is not None:
                entries["correction"] = hash_of(correction[here])
            for moment, store in zip(("exp_avg", "exp_avg_sq"), stores, strict=True):
                entries[moment] = hash_of(store.read(piece.start, piece.numel))
            found[f"{piece.name}[{piece.first}:{piece.first + piece.numel}]"] = entries
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def hash_of(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


# --- Plain PyTorch -------------------------------------------------------------------------------


def steps_of(model: nn.Module, optimizer, begin: int, end: int) -> None:
    for step in range(begin, end):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def plain_run(shapes, options: dict) -> tuple[Model, Adam8bitBlockwise]:
    options = {**OPTIONS, **options}
    model = Model(shapes, options.pop("dtype", torch.float32))
    return model, Adam8bitBlockwise(model.named_parameters(), **options)


def save_plain(run: Run, folder: Path) -> None:
    model, optimizer = plain_run(run.shapes, run.options)
    steps_of(model, optimizer, 0, SAVED_AFTER)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, folder / "checkpoint.pt")


def go_on_plain(run: Run, path: Path) -> dict:
    model, optimizer = plain_run(run.shapes, {**run.options, "lr": OTHER_LR})
    content = torch.load(path / "checkpoint.pt" if path.is_dir() else path, weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    steps_of(model, optimizer, SAVED_AFTER, STEPS)
    return digest(optimizer)


def save_pickled(run: Run, folder: Path) -> None:
    model, optimizer = plain_run(run.shapes, run.options)
    steps_of(model, optimizer, 0, SAVED_AFTER)
    parameters = dict(model.named_parameters())
    torch.save({"parameters": parameters, "optimizer": optimizer}, folder / "checkpoint.pt")


def go_on_pickled(run: Run, path: Path) -> dict:
    content = torch.load(path / "checkpoint.pt", weights_only=False)
    for step in range(SAVED_AFTER, STEPS):
        for name, p in content["parameters"].items():
            if name != "late.weight" or step > SAVED_AFTER:
                p.grad = gradient(name, p.shape, step)
        content["optimizer"].step()
    return digest(content["optimizer"])


def go_on_state(run: Run, path: Path) -> dict:
    """Go on from what test_optimizer_state.py reads, which has no weights."""
    found = {}
    for name, content in torch.load(path, weights_only=True).items():
        codec, dtype = name.split()
        keywords = {"codec": codec, "dtype": getattr(torch, dtype.removeprefix("torch."))}
        model, optimizer = plain_run(run.shapes, keywords)
        optimizer.load_state_dict(content["state_dict"])
        steps_of(model, optimizer, SAVED_AFTER, STEPS)
        found |= {f"{name} {key}": entry for key, entry in digest(optimizer).items()}
    return found


def go_on_bitsandbytes(run: Run, _: Path | None) -> dict:
    """Go on from states as bitsandbytes has them: flat blocks of 256, positive scales."""
    model, optimizer = plain_run(run.shapes, run.options)
    states = {number: their_state(*item) for number, item in enumerate(run.shapes.items())}
    group = {"params": list(states), "lr": 0.01, "betas": (0.9, 0.99)}
    optimizer.load_state_dict(from_bitsandbytes({"state": states, "param_groups": [group]}))
    steps_of(model, optimizer, SAVED_AFTER, STEPS)
    return digest(optimizer)


def their_state(name: str, shape: tuple[int, ...]) -> dict:
    moments = [numbers(f"{moment} {name}", shape) for moment in ("m", "v")]
    if len(shape) == 1:
        return {"step": 17, "state1": moments[0], "state2": moments[1].abs()}
    state: dict = {"step": 17}
    for number, values in enumerate(moments, 1):
        blocks = -(-values.numel() // 256)
        state[f"state{number}"] = (values * 64 + 128).to(torch.uint8)
        state[f"absmax{number}"] = numbers(f"absmax{number} {name}", (blocks,)).abs() + 0.5
        state[f"qmap{number}"] = DynamicCode(signed=number == 1).levels
    return state


# --- FSDP2 ---------------------------------------------------------------------------------------


def sharded_run(run: Run, **keywords) -> tuple[nn.Module, Adam8bitBlockwise]:
    start()
    options = {**OPTIONS, **run.options, **keywords}
    model = fully_shard(Model(run.shapes, options.pop("dtype", torch.float32)))
    return model, Adam8bitBlockwise(model.named_parameters(), **options)


def save_dcp(run: Run, folder: Path) -> None:
    model, optimizer = sharded_run(run)
    steps_of(model, optimizer, 0, SAVED_AFTER)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(content, checkpoint_id=folder)


def go_on_dcp(run: Run, path: Path) -> dict:
    model, optimizer = sharded_run(run, lr=OTHER_LR)
    content = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(content, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    steps_of(model, optimizer, SAVED_AFTER, STEPS)
    return digest(optimizer)


# --- DeepSpeed -----------------------------------------------------------------------------------


def go_on_universal(run: Run, path: Path) -> dict:
    options = {"min_8bit_size": 100, **run.options}
    made = config(**options) | {"checkpoint": {"load_universal": True}}
    engine = make_engine(made, Model(run.shapes))
    loaded, _ = engine.load_checkpoint(str(path))
    assert loaded is not None
    for step in range(SAVED_AFTER, STEPS):
        take_step(engine, step)
    found = digest(base_optimizer(engine))
    engine.destroy()
    return found


# --- All of them ---------------------------------------------------------------------------------

CORRECTED = {"weight_correction_bits": 8}
BF16 = {"dtype": torch.bfloat16}
STAGE3 = {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}


def _plain(saved: str, **options) -> Run:
    return Run(go_on_plain, saved, options=options, shapes=LATE, save=save_plain)


RUNS = {
    "plain, log": _plain("plain_log", codec="log"),
    "plain, dynamic": _plain("plain_dynamic", codec="dynamic"),
    "plain, corrected": _plain("plain_corrected", **BF16, **CORRECTED),
    "plain, fp32": _plain("plain_fp32", state_dict_format="fp32"),
    "plain, pickled optimizer": Run(
        go_on_pickled, "plain_pickled", options=BF16, shapes=LATE, save=save_pickled
    ),
    "plain, of test_golden.py": Run(go_on_plain, "plain_checkpoint.pt", shapes=GOLDEN_SHAPES),
    "plain, format 1": Run(go_on_state, "plain_state_v1.pt", shapes=STATE_SHAPES),
    "bitsandbytes": Run(
        go_on_bitsandbytes, None, options={"codec": "dynamic"}, shapes=BITSANDBYTES_SHAPES
    ),
    "bitsandbytes, to log": Run(go_on_bitsandbytes, None, shapes=BITSANDBYTES_SHAPES),
}
RANKS_RUNS = {
    "FSDP2, corrected": Run(
        go_on_dcp, "dcp_corrected", 2, options={**BF16, **CORRECTED}, save=save_dcp
    ),
    "FSDP2, of test_golden.py": Run(go_on_dcp, "dcp_checkpoint", 2, shapes=GOLDEN_SHAPES),
    "FSDP2, to 1 rank": Run(go_on_dcp, "dcp_checkpoint", 1, shapes=GOLDEN_SHAPES),
    "universal, to ZeRO-2": Run(
        go_on_universal, "universal", 2, options={"stage": 2}, shapes=GOLDEN_SHAPES
    ),
    "universal, to ZeRO-3 on 1 rank": Run(
        go_on_universal, "universal", 1, {"stage": 3, "zero": STAGE3}, GOLDEN_SHAPES
    ),
}
ALL = RUNS | RANKS_RUNS


def save(name: str, path: Path) -> None:
    """Do the steps of one of ALL before its checkpoint, and write that into a folder."""
    ALL[name].save(ALL[name], path)


def go_on(name: str, path: Path | None) -> dict[str, list]:
    """Load the checkpoint of one of ALL, and return the `digest` after its other steps."""
    return ALL[name].go_on(ALL[name], path)
