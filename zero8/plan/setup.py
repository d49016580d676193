# SPDX-License-Identifier: Apache-2.0
"""The settings of a run: the engine, its stage, the place of states, and the precision."""

from dataclasses import dataclass, replace

from zero8.algorithms.adam import ADAM
from zero8.algorithms.table import algorithm_called
from zero8.muon import ADAM_PARAMS
from zero8.optimizer import OPTIMIZERS
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import DEFAULT_CODEC, codec_named
from zero8.state.policy import Policy

BY_NAME = {one.__name__: one for one in OPTIMIZERS}
"""zero8's optimizers by name."""
ENGINES = ("deepspeed", "fsdp2")
DEVICES = ("none", "cpu", "nvme")
PLAIN, INT8 = "plain", "int8"
WEIGHTS = (PLAIN, INT8)

WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "bf16-masters": 2, "24-bit-masters": 2}
"""Bytes of a weight in the forward pass.

`bf16-masters` is bf16 without fp32 master weights; `24-bit-masters` is the same, but zero8 keeps 8
more bits of each weight in its state (`weight_correction_bits`).
"""

MASTER_BYTES = {"bf16": 4, "fp16": 4, "fp32": 4, "bf16-masters": 2, "24-bit-masters": 2}
"""Bytes of a weight that the optimizer updates, without those 8 bits."""


@dataclass(frozen=True)
class Setup:
    """The settings of a training run that affect memory.

    Attributes:
        engine: `deepspeed` or `fsdp2`.
        stage: of ZeRO, 0 to 3; FSDP2 is like 3.
        offload: the place of optimizer states: `none` (the GPU), `cpu` or `nvme`.
        offload_params: whether 16-bit weights are in host memory, too (stage 3).
        dtype: a key of `WEIGHT_BYTES`.
        weights: `plain`, or `int8` for torchao's INT8 weights in linear layers.
        world_size: number of ranks, each with a GPU.
        ranks_per_host: ranks that share the memory of a host.
        accumulation_steps: micro-batches per step.
        reduce_bucket_numel: DeepSpeed's `reduce_bucket_size`, elements.
        overlap_comm: DeepSpeed's; None: its default, on for stage 3.
        sub_group_numel: DeepSpeed's `sub_group_size`, elements of a rank.
        max_live_numel: DeepSpeed's `stage3_max_live_parameters`.
        buffer_count: DeepSpeed's, for swapping to NVMe.
        pipelined: whether transfers to and from NVMe overlap with the step.
        policy: which moments zero8 keeps in 8 bits.
        codec: zero8's.
        algorithm_name: of zero8's optimizer and of the fp32 one beside it.
        adam_params: glob patterns of names of matrices that are not Muon's.

    Raises:
        ValueError: on construction, if settings are invalid or incompatible.
    """

    engine: str = "deepspeed"
    stage: int = 2
    offload: str = "cpu"
    offload_params: bool = False
    dtype: str = "bf16"
    weights: str = PLAIN
    world_size: int = 1
    ranks_per_host: int = 8
    accumulation_steps: int = 1
    reduce_bucket_numel: int = 500_000_000
    overlap_comm: bool | None = None
    sub_group_numel: int = 1_000_000_000
    max_live_numel: int = 1_000_000_000
    buffer_count: int = 4
    pipelined: bool = False
    policy: Policy = Policy()
    codec: str = DEFAULT_CODEC
    algorithm_name: str = ADAM.name
    adam_params: tuple[str, ...] = ADAM_PARAMS

    def __post_init__(self):
        """Check the values."""
        for name, valid in (
            ("engine", ENGINES),
            ("stage", (0, 1, 2, 3)),
            ("offload", DEVICES),
            ("dtype", tuple(WEIGHT_BYTES)),
            ("weights", WEIGHTS),
        ):
            if getattr(self, name) not in valid:
                got = getattr(self, name)
                raise ValueError(f"{name}: got {got!r}, expected one of {list(valid)}")
        for name in ("world_size", "ranks_per_host", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        codec_named(self.codec)
        self._check_together()

    def _check_together(self) -> None:
        if self.offload == "nvme" and (self.engine, self.stage) != ("deepspeed", 3):
            raise ValueError("offload: got 'nvme', which only DeepSpeed's stage 3 supports")
        if self.stage == 0 and self.offload != "none":
            raise ValueError(
                f"stage: got 0 with offload {self.offload!r}, expected stage 1, 2 or 3"
            )
        if self.offload_params and self.stage != 3:
            raise ValueError(f"stage: got {self.stage} with offloaded parameters, expected 3")
        if self.engine == "fsdp2" and self.dtype == "fp16":
            raise ValueError("dtype: got 'fp16' with fsdp2, which is not supported; use 'bf16'")
        if self.has_int8_weights:
            self._check_int8()

    def _check_int8(self) -> None:
        if self.engine != "fsdp2":
            raise ValueError(
                f"weights: got {INT8!r} with {self.engine}, expected fsdp2, as ZeRO flattens "
                "weights, and INT8 weights have a scale per row; use --engine fsdp2"
            )
        if self.algorithm.is_of_matrices:
            raise ValueError(
                f"weights: got {INT8!r} with Muon, expected another optimizer, as Muon's matrices "
                "are orthogonalized in floating point; leave out --weights"
            )
        if self.correction_bytes:
            raise ValueError(
                f"weights: got {INT8!r} with dtype {self.dtype!r}, expected another dtype, as the "
                "corrections add bits to bfloat16 weights; use --dtype bf16-masters"
            )

    @property
    def has_int8_weights(self) -> bool:
        """Whether linear layers have INT8 weights."""
        return self.weights == INT8

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of both optimizers."""
        return algorithm_called(self.algorithm_name)

    @property
    def optimizers(self) -> tuple[str, str]:
        """What reports call the fp32 optimizer and zero8's."""
        return self.algorithm.fp32_name.removeprefix("an "), "zero8"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in the forward pass, and of its gradient."""
        return WEIGHT_BYTES[self.dtype]

    @property
    def master_bytes(self) -> int:
        """Bytes of a weight that the optimizer updates, and of the gradient that it reads."""
        return MASTER_BYTES[self.dtype]

    @property
    def zero8_grad_bytes(self) -> int:
        """Bytes of a gradient that zero8 reads: in host memory DeepSpeed's stay narrow."""
        is_narrow = self.engine == "deepspeed" and self.offload == "cpu"
        return self.weight_bytes if is_narrow else self.master_bytes

    @property
    def correction_bytes(self) -> int:
        """Bytes of a weight that zero8 keeps in its state."""
        return int(self.dtype == "24-bit-masters")

    @property
    def ranks_here(self) -> int:
        """Ranks of one host."""
        return min(self.ranks_per_host, self.world_size)

    def describe(self) -> str:
        """Return the settings in words."""
        hosts = -(-self.world_size // self.ranks_per_host)
        how = "FSDP2" if self.engine == "fsdp2" else f"ZeRO stage {self.stage}"
        where = {"none": "no offload", "cpu": "offload to the CPU", "nvme": "offload to NVMe"}
        counts = f"{counted(self.world_size, 'GPU')} on {counted(hosts, 'host')}"
        kind = ", INT8 weights" if self.has_int8_weights else ""
        return f"{how}, {where[self.offload]}, {self.dtype}{kind}, {counts}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "2 hosts"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def with_deepspeed_config(setup: Setup, config: dict) -> Setup:
    """Return a setup with the settings of a DeepSpeed config.

    Raises:
        ValueError: if the config has an unsupported setting.
    """
    zero = config.get("zero_optimization", {})
    optimizer = zero.get("offload_optimizer") or {}
    if config.get("data_types", {}).get("grad_accum_dtype") == "fp32":
        raise ValueError("grad_accum_dtype: got 'fp32', which is not supported; leave it out")
    params_on = (zero.get("offload_param") or {}).get("device", "none")
    if params_on == "nvme":
        raise ValueError("offload_param: got device 'nvme', which is not supported")
    stage = zero.get("stage", 0)
    found = {
        "stage": stage,
        "offload": optimizer.get("device", "none"),
        "offload_params": params_on != "none",
        "dtype": _dtype(config),
        "overlap_comm": zero["overlap_comm"] if type(zero.get("overlap_comm")) is bool else None,
        "buffer_count": optimizer.get("buffer_count", setup.buffer_count),
        "pipelined": bool(optimizer.get("pipeline_read") and optimizer.get("pipeline_write")),
    }
    if _is_number(steps := config.get("gradient_accumulation_steps")):
        found["accumulation_steps"] = steps
    for name, key in (
        ("reduce_bucket_numel", "reduce_bucket_size"),
        ("sub_group_numel", "sub_group_size"),
        ("max_live_numel", "stage3_max_live_parameters"),
    ):
        if _is_number(zero.get(key)):
            found[name] = int(zero[key])
    return replace(setup, **found, **_of_optimizer(config.get("optimizer", {})))


def _is_number(value: object) -> bool:
    # "auto", which the Hugging Face Trainer fills in later, is taken as DeepSpeed's default.
    return isinstance(value, int | float)


def _dtype(config: dict) -> str:
    bf16 = config.get("bf16", {})
    if bf16.get("enabled"):
        if not bf16.get("bf16_master_weights_and_grads"):
            return "bf16"
        optimizer = config.get("optimizer", {})
        bits = optimizer.get("params", {}).get("weight_correction_bits")
        is_corrected = optimizer.get("type") in BY_NAME and bits
        return "24-bit-masters" if is_corrected else "bf16-masters"
    return "fp16" if config.get("fp16", {}).get("enabled") else "fp32"


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
