# SPDX-License-Identifier: Apache-2.0
"""The settings of a run: the engine, its stage, the place of states, and the precision."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zero8.optimizer.elementwise import OPTIMIZERS
from zero8.optimizer.muon import ADAM_PARAMS
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_called
from zero8.spec.codec import DEFAULT_CODEC
from zero8.state.policy import Policy

BY_NAME = {one.__name__: one for one in OPTIMIZERS}
"""zero8's optimizers by name."""

GPU, HOST, NVME = "GPU", "host", "NVMe"
HOME = {"none": GPU, "cpu": HOST, "nvme": NVME}
"""The place of the optimizer's states, by what they are offloaded to."""

DTYPE_BYTES = {
    "bf16": (2, 4),
    "fp16": (2, 4),
    "fp32": (4, 4),
    "bf16-masters": (2, 2),
    "24-bit-masters": (2, 2),
}
"""Bytes of a weight in the forward pass, and of one that the optimizer updates.

`bf16-masters` is bf16 without fp32 master weights; `24-bit-masters` is the same, but zero8 keeps 8
more bits of each weight in its state (`weight_correction_bits`).
"""

CHOICES = {
    "engine": ("deepspeed", "fsdp2"),
    "stage": (0, 1, 2, 3),
    "offload": tuple(HOME),
    "dtype": tuple(DTYPE_BYTES),
    "weights": ("plain", "int8"),
}


@dataclass(frozen=True)
class Setup:
    """The settings of a training run that affect memory.

    Attributes:
        stage: of ZeRO; FSDP2 is like 3.
        offload: the place of optimizer states: `none` (the GPU), `cpu` or `nvme`.
        offload_params: whether 16-bit weights are in host memory, too (stage 3).
        weights: of linear layers: `plain`, or `int8` for torchao's INT8 weights.
        accumulation_steps: micro-batches per step.
        page_locks: whether frameworks page-lock what is in host memory.
        max_round_mib: torch's `pinned_max_round_threshold_mb`; None if it rounds all tensors up.
        reduce_bucket_numel: DeepSpeed's `reduce_bucket_size`, in elements, as its other sizes.
        pipelined: whether DeepSpeed's transfers to and from NVMe overlap with the step.
        algorithm_name: of zero8's optimizer and of the fp32 one beside it.
        adam_params: glob patterns of names of matrices that are not Muon's.
        is_8bit: whether the optimizer is zero8's, or its fp32 twin.

    Raises:
        ValueError: on construction, if settings are invalid or incompatible.
    """

    engine: str = "deepspeed"
    stage: int = 2
    offload: str = "cpu"
    offload_params: bool = False
    dtype: str = "bf16"
    weights: str = "plain"
    world_size: int = 1
    ranks_per_host: int = 8
    page_locks: bool = True
    max_round_mib: int | None = None
    accumulation_steps: int = 1
    reduce_bucket_numel: int = 500_000_000
    overlap_comm: bool = False
    sub_group_numel: int = 1_000_000_000
    max_live_numel: int = 1_000_000_000
    buffer_count: int = 4
    pipelined: bool = False
    policy: Policy = Policy()
    codec: str = DEFAULT_CODEC
    algorithm_name: str = ADAM.name
    adam_params: tuple[str, ...] = ADAM_PARAMS
    is_8bit: bool = True

    def __post_init__(self):
        """Check the values."""
        for name, valid in CHOICES.items():
            if (got := getattr(self, name)) not in valid:
                raise ValueError(f"{name}: got {got!r}, expected one of {list(valid)}")
        for name in ("world_size", "ranks_per_host", "accumulation_steps"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"{name}: got {count}, expected at least 1")
        for conflict in self._conflicts():
            raise ValueError(conflict)

    def _conflicts(self) -> Iterator[str]:
        if self.offload == "nvme" and (self.engine, self.stage) != ("deepspeed", 3):
            yield "offload: got 'nvme', which only DeepSpeed's stage 3 supports"
        if self.stage == 0 and self.offload != "none":
            yield f"stage: got 0 with offload {self.offload!r}, expected stage 1, 2 or 3"
        if self.offload_params and self.stage != 3:
            yield f"stage: got {self.stage} with offloaded parameters, expected 3"
        if self.engine == "fsdp2" and self.dtype == "fp16":
            yield "dtype: got 'fp16' with fsdp2, which is not supported; use 'bf16'"
        others = self.engine != "fsdp2" or self.algorithm.is_of_matrices or self.correction_bytes
        if self.has_int8_weights and others:
            yield "weights: got 'int8', expected fsdp2, not Muon, and no 24-bit-masters"

    @property
    def has_int8_weights(self) -> bool:
        """Whether linear layers have INT8 weights."""
        return self.weights == "int8"

    @property
    def algorithm(self) -> Algorithm:
        """The optimizer's algorithm."""
        return algorithm_called(self.algorithm_name)

    @property
    def optimizer(self) -> str:
        """What reports call the optimizer."""
        return "zero8" if self.is_8bit else self.algorithm.fp32_name.removeprefix("an ")

    @property
    def twins(self) -> tuple["Setup", "Setup"]:
        """The same settings with the fp32 optimizer and with zero8's."""
        return replace(self, is_8bit=False), replace(self, is_8bit=True)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in the forward pass, and of its gradient."""
        return DTYPE_BYTES[self.dtype][0]

    @property
    def master_bytes(self) -> int:
        """Bytes of a weight that the optimizer updates."""
        return DTYPE_BYTES[self.dtype][1]

    @property
    def grad_bytes(self) -> int:
        """Bytes of a gradient that the step reads: for zero8, what DeepSpeed offloads is narrow."""
        is_narrow = self.is_8bit and self.engine == "deepspeed" and self.offload != "none"
        return self.weight_bytes if is_narrow else self.master_bytes

    @property
    def correction_bytes(self) -> int:
        """Bytes of a weight that zero8 keeps in its state."""
        return int(self.is_8bit and self.dtype == "24-bit-masters")

    @property
    def ranks_here(self) -> int:
        """Ranks of one host."""
        return min(self.ranks_per_host, self.world_size)

    def describe(self) -> str:
        """Return the settings in words."""
        hosts = -(-self.world_size // self.ranks_per_host)
        how = "FSDP2" if self.engine == "fsdp2" else f"ZeRO stage {self.stage}"
        kind = f"{self.dtype}, INT8 weights" if self.has_int8_weights else self.dtype
        counts = f"{counted(self.world_size, 'GPU')} on {counted(hosts, 'host')}"
        return f"{how}, offload {self.offload}, {kind}, {counts}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "2 hosts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- A DeepSpeed config --------------------------------------------------------------------------


def with_ds_config(setup: Setup, config: dict) -> Setup:
    """Return a setup with the settings of a DeepSpeed config."""
    zero = config.get("zero_optimization", {})
    offload = zero.get("offload_optimizer") or {}
    params_on = (zero.get("offload_param") or {}).get("device", "none")
    if config.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        raise ValueError("grad_accum_dtype: got 'fp32', which is not supported; leave it out")
    if params_on == "nvme":
        raise ValueError("offload_param: got device 'nvme', which is not supported")
    found = {
        "stage": zero.get("stage", 0),
        "offload": offload.get("device", "none"),
        "offload_params": params_on != "none",
        "page_locks": offload.get("pin_memory", True),
        "dtype": _dtype(config),
        "overlap_comm": zero.get("overlap_comm") is True,
        "buffer_count": offload.get("buffer_count", setup.buffer_count),
        "pipelined": bool(offload.get("pipeline_read") and offload.get("pipeline_write")),
    }
    for name, value in (
        ("accumulation_steps", config.get("gradient_accumulation_steps")),
        ("reduce_bucket_numel", zero.get("reduce_bucket_size")),
        ("sub_group_numel", zero.get("sub_group_size")),
        ("max_live_numel", zero.get("stage3_max_live_parameters")),
    ):
        # The Hugging Face Trainer fills in "auto" later, here it is DeepSpeed's default.
        if isinstance(value, int | float):
            found[name] = int(value)
    return replace(setup, **found, **_of_optimizer(config.get("optimizer", {})))


def _dtype(config: dict) -> str:
    bf16, optimizer = config.get("bf16", {}), config.get("optimizer", {})
    if not bf16.get("enabled"):
        return "fp16" if config.get("fp16", {}).get("enabled") else "fp32"
    if not bf16.get("bf16_master_weights_and_grads"):
        return "bf16"
    has_more_bits = optimizer.get("params", {}).get("weight_correction_bits")
    return (
        "24-bit-masters" if optimizer.get("type") in BY_NAME and has_more_bits else "bf16-masters"
    )


def _of_optimizer(section: dict) -> dict:
    if section.get("type") not in BY_NAME:
        return {}
    params = section.get("params", {})
    keys = ("block_size", "min_8bit_size", "fp32_params")
    return {
        "algorithm_name": BY_NAME[section["type"]].algorithm.name,
        "codec": params.get("codec", DEFAULT_CODEC),
        "policy": Policy(**{key: params[key] for key in keys if key in params}),
        "adam_params": tuple(params.get("adam_params", ADAM_PARAMS)),
    }
