# SPDX-License-Identifier: Apache-2.0
"""The engines that are measured, their model, and the optimizers that they step in turns."""

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zero8
from zero8.spec.adam import ADAM
from zero8.spec.muon import MUON

# By algorithm.  Muon multiplies the matrices: its step takes as many times longer as they are wide.
SIDES = {ADAM.name: 2048, MUON.name: 512}
HYPERS = {
    ADAM.name: {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
    MUON.name: {"lr": 1e-4, "momentum": 0.95, "weight_decay": 0.1},
}
DISK = "ZeRO-3 on a disk"
ZERO_STAGES = {"ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, DISK: 3}
FSDP2 = "FSDP2"
ENGINES = (*ZERO_STAGES, FSDP2)


class Case(NamedTuple):
    """The settings that engines in turns have in common.

    Attributes:
        engine: one of `ENGINES`.
        clipping: the limit of the gradients' norm, 0 for none.
        numel: the number of parameters.
        algorithm: the name of that of all optimizers, a key of `SIDES`.
    """

    engine: str
    clipping: float
    numel: int
    algorithm: str = ADAM.name


class Matrices(nn.Module):
    """Square matrices whose gradients are large enough for clipping; the forward is short."""

    def __init__(self, numel: int, side: int):
        """Make `numel` parameters."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(side, side, generator=generator) / side**0.5)
            for _ in range(numel // side**2)
        )

    def forward(self) -> Tensor:
        """Return half the sum of squares."""
        return sum((p.float().square().sum() for p in self.matrices), torch.zeros(())) / 2


class DeepSpeedEngine:
    """DeepSpeed's engine with its optimizer, `base_optimizer`, in host memory."""

    def __init__(self, optimizer: str, params: dict, bf16: dict, case: Case):
        """Make it.

        Args:
            optimizer: the type in DeepSpeed's config.
            params: its parameters there, besides those of `HYPERS`.
            bf16: more of the section "bf16".
            case: the other settings.
        """
        import deepspeed

        offload = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if case.engine == DISK:
            pipelines = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
            offload |= {"device": "nvme", "nvme_path": "runs/bench_disk", **pipelines}
        stage = ZERO_STAGES[case.engine]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": case.clipping,
            "bf16": {"enabled": True, **bf16},
            "optimizer": {"type": optimizer, "params": {**HYPERS[case.algorithm], **params}},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": offload,
                "sub_group_size": case.numel // 16 if case.engine == DISK else 10**9,
                # DeepSpeed's Muon refuses the default in stage 3.
                "reduce_scatter": case.algorithm != MUON.name or stage < 3,
            },
            "steps_per_print": 10**9,
        }
        model = Matrices(case.numel, SIDES[case.algorithm])
        self._engine = deepspeed.initialize(model=model, config=config)[0]
        self.base_optimizer = self._engine.optimizer.optimizer

    def backward(self) -> None:
        """Run a forward and a backward."""
        self._engine.backward(self._engine())

    def step(self) -> None:
        """Clip, step, and get ready for the next forward."""
        self._engine.step()

    def close(self) -> None:
        """Free the memory."""
        self._engine.destroy()
        del self._engine, self.base_optimizer


class Fsdp2Engine:
    """FSDP2 with float32 parameters in host memory, and bf16 in the forward and backward."""

    def __init__(self, optimizer: Callable[[Any], Optimizer], case: Case):
        """Make it; an optimizer with a `clip_grad_norm_` of its own clips by that."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group()
        self._model = Matrices(case.numel, SIDES[case.algorithm])
        self._clipping = case.clipping
        fully_shard(
            self._model,
            offload_policy=CPUOffloadPolicy(pin_memory=torch.cuda.is_available()),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
        self.base_optimizer = optimizer(self._model.parameters())
        by_torch = partial(torch.nn.utils.clip_grad_norm_, list(self._model.parameters()))
        self._clip = getattr(self.base_optimizer, "clip_grad_norm_", by_torch)

    def backward(self) -> None:
        """Run a forward and a backward."""
        self._model().backward()

    def step(self) -> None:
        """Clip, step, and get ready for the next forward."""
        if self._clipping:
            self._clip(self._clipping)
        self.base_optimizer.step()
        self.base_optimizer.zero_grad()

    def close(self) -> None:
        """Free the memory."""
        del self._model, self.base_optimizer, self._clip


Engine = DeepSpeedEngine | Fsdp2Engine


def join_ranks() -> None:
    """Take a launcher's variables, or be the only rank."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


BF16_MASTERS = {"bf16_master_weights_and_grads": True}
OURS = zero8.Adam8bitBlockwise.__name__


class Contender(NamedTuple):
    """An optimizer in an engine.

    Attributes:
        name: the name of its row.
        over: the name of the row that it is compared with.
        make: makes a new engine.
    """

    name: str
    over: str
    make: Callable[[Case], Engine]


DEEPSPEED, DEEPSPEED_BF16 = "DeepSpeed, fp32 masters", "DeepSpeed, bf16 masters and states"
DEEPSPEED_MUON, OUR_MUON = "DeepSpeed's Muon", "zero8's Muon"
TORCH = "torch's fused AdamW"


def _in_deepspeed(name: str, over: str, optimizer: str, params: dict, bf16: dict) -> Contender:
    return Contender(name, over, partial(DeepSpeedEngine, optimizer, params, bf16))


def _in_fsdp2(name: str, optimizer: Callable[..., Optimizer], **params: Any) -> Contender:
    make = partial(Fsdp2Engine, partial(optimizer, **HYPERS[ADAM.name], **params))
    return Contender(name, TORCH, make)


def _our_muon(name: str, **params: Any) -> Contender:
    params["adjust_lr_fn"] = "original"  # as DeepSpeed's
    return _in_deepspeed(name, DEEPSPEED_MUON, zero8.Muon8bitBlockwise.__name__, params, {})


_CORRECTED = {"weight_correction_bits": 8}
_BF16_STATES = BF16_MASTERS | {"bf16_optimizer_states": True}
_IN_DEEPSPEED = (
    _in_deepspeed(DEEPSPEED, DEEPSPEED, "AdamW", {}, {}),
    _in_deepspeed("zero8, fp32 masters", DEEPSPEED, OURS, {}, {}),
    _in_deepspeed("zero8, 24-bit masters", DEEPSPEED, OURS, _CORRECTED, BF16_MASTERS),
    _in_deepspeed(DEEPSPEED_BF16, DEEPSPEED_BF16, "AdamW", {}, _BF16_STATES),
    _in_deepspeed("zero8, bf16 masters", DEEPSPEED_BF16, OURS, {}, BF16_MASTERS),
)
_IN_FSDP2 = (
    _in_fsdp2(TORCH, torch.optim.AdamW, fused=True),
    _in_fsdp2("zero8", zero8.Adam8bitBlockwise),
)
_MUONS = (
    _in_deepspeed(DEEPSPEED_MUON, DEEPSPEED_MUON, "Muon", {}, {}),
    _our_muon(OUR_MUON),
    _our_muon("zero8's Muon, float32", ns_dtype="float32"),
)
CONTENDERS = {
    ADAM.name: dict.fromkeys(ENGINES, _IN_DEEPSPEED) | {DISK: _IN_DEEPSPEED[:3], FSDP2: _IN_FSDP2},
    MUON.name: dict.fromkeys(ZERO_STAGES, _MUONS),
}
"""By algorithm and engine."""
