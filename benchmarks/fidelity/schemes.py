# SPDX-License-Identifier: Apache-2.0
"""The optimizers whose states are compared, zero8's codecs and others', behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.fidelity.codes import CodedAdam, FlashCode, FourBitCode, RatioCode
from benchmarks.fidelity.training import Layout
from benchmarks.states import state_bytes
from zero8.optimizer import Adam8bitBlockwise
from zero8.spec.codec import CODECS

Named = list[tuple[str, Tensor]]

FP32_CONTROL = "fp32_zero8"
BF16_NOTE = "parameters, and with them gradients and u, are rounded to bfloat16"


@dataclass(frozen=True)
class Scheme:
    """An optimizer that is measured.

    Attributes:
        name: what rows call it; zero8's codecs have their own names.
        make: returns the optimizer for named parameters and betas, with lr 1 and no weight decay.
        second_moment: returns the stored v of a parameter, any shape; None where there is no v.
        block_size: elements per scale, None where there are no blocks.
        implementation: "zero8", "package" (the published one) or "reimplemented".
        note: what a reader of the row must know.
        dtype: of the parameters.
        flat: whether every matrix is handed over as a single row.
    """

    name: str
    make: Callable[[Named, tuple[float, float]], Optimizer]
    second_moment: Callable[[Optimizer, Tensor], Tensor] | None
    block_size: int | None
    implementation: str
    note: str = ""
    dtype: torch.dtype = torch.float32
    flat: bool = False


class Shadow:
    """Parameters that are zero before every step, so that a step leaves -u in them.

        p' = (1 - lr*weight_decay) p - lr * mhat/(sqrt(vhat) + eps) = -u
                                                      for p = 0, lr = 1, weight_decay = 0

    No optimizer needs to be looked into for this.
    """

    def __init__(self, scheme: Scheme, layout: Layout, betas: tuple[float, float]):
        """Make the parameters and their optimizer."""
        self._scheme = scheme
        self._layout = layout.as_rows() if scheme.flat else layout
        self._values = torch.zeros(layout.numel, dtype=scheme.dtype)
        self._params = self._layout.views(self._values)
        self.optimizer = scheme.make(list(zip(layout.names, self._params, strict=True)), betas)

    def update(self, grad: Tensor) -> Tensor:
        """Take a step on a flat gradient and return u, flat float32."""
        self._values.zero_()
        grads = self._layout.views(grad.to(self._scheme.dtype))
        for p, g in zip(self._params, grads, strict=True):
            p.grad = g
        self.optimizer.step()
        return -self._values.float()

    def second_moments(self) -> Tensor:
        """Return the stored v of all parameters, flat float32."""
        read = self._scheme.second_moment
        return torch.cat([read(self.optimizer, p).reshape(-1).float() for p in self._params])

    def bytes_per_param(self) -> float:
        """Return the bytes of all live state tensors, over the number of parameters."""
        return state_bytes(self.optimizer) / self._values.numel()


def usable(schemes: list[Scheme], betas: tuple[float, float]) -> tuple[list[Scheme], list[dict]]:
    """Split schemes into those that can take a step here and the reasons why others cannot."""
    kept, skipped = [], []
    layout = Layout(("probe",), ((256, 256),))
    for scheme in schemes:
        try:
            Shadow(scheme, layout, betas).update(torch.ones(layout.numel))
        except Exception as error:  # a package may be missing, or lack an op or a compiler
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            skipped.append({"scheme": scheme.name, "reason": reason})
        else:
            kept.append(scheme)
    return kept, skipped


# --- zero8 ---------------------------------------------------------------------------------------


def zero8_states(name: str) -> dict[str, Any]:
    """Return the keywords for states in a codec, or for zero8's own float32 ones."""
    return {"fp32_params": ["*"]} if name == FP32_CONTROL else {"codec": name}


def zero8_scheme(codec: str, block_size: int = 256) -> Scheme:
    """Return one of zero8's codecs; blocks of more than 256 run through rows laid end to end."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        return Adam8bitBlockwise(named, lr=1.0, betas=betas, codec=codec, block_size=block_size)

    flat = block_size > 256
    note = "|u| is clipped at its bound"
    note += "; rows are laid end to end, so that a block spans several" * flat
    return Scheme(codec, make, _zero8_v, block_size, "zero8", note, flat=flat)


def zero8_fp32() -> Scheme:
    """Return zero8's own float32 moments: what differs from torch is rounding."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        return Adam8bitBlockwise(named, lr=1.0, betas=betas, **zero8_states(FP32_CONTROL))

    note = "control: float32 moments of zero8 against those of torch"
    return Scheme(FP32_CONTROL, make, _zero8_v, None, "zero8", note)


def _zero8_v(optimizer: Optimizer, p: Tensor) -> Tensor:
    _, store = optimizer.moments(p)
    return store.read(0, p.numel())


# --- Packages ------------------------------------------------------------------------------------


def _exp_avg_sq(optimizer: Optimizer, p: Tensor) -> Tensor:
    return optimizer.state[p]["exp_avg_sq"]


def torch_adamw(dtype: torch.dtype) -> Scheme:
    """Return torch's AdamW, whose moments have the parameters' dtype."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        params = [p for _, p in named]
        return torch.optim.AdamW(params, lr=1.0, betas=betas, weight_decay=0.0, fused=True)

    scheme = Scheme("torch_fp32", make, _exp_avg_sq, None, "package", "fused")
    if dtype == torch.bfloat16:
        return replace(scheme, name="torch_bf16", dtype=dtype, note=f"fused; {BF16_NOTE}")
    return scheme


def deepspeed_bf16() -> Scheme:
    """Return DeepSpeedCPUAdam with bfloat16 moments, which it offers for bfloat16 parameters."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        params = [p for _, p in named]
        return DeepSpeedCPUAdam(params, lr=1.0, betas=betas, fp32_optimizer_states=False)

    note = f"DeepSpeedCPUAdam, fp32_optimizer_states=False; {BF16_NOTE}"
    return Scheme("deepspeed_bf16", make, _exp_avg_sq, None, "package", note, torch.bfloat16)


def torchao() -> Scheme:
    """Return torchao's AdamW8bit, compiled as the package does it."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        from torchao.optim import AdamW8bit

        params = [p for _, p in named]
        return AdamW8bit(params, lr=1.0, betas=betas, weight_decay=0.0, block_size=256)

    def second_moment(optimizer: Optimizer, p: Tensor) -> Tensor:
        return optimizer.state[p]["exp_avg_sq"].dequantize()

    note = "AdamW8bit; flat blocks, which are zero8's where rows are multiples of 256"
    return Scheme("torchao", make, second_moment, 256, "package", note)


def bitsandbytes() -> Scheme:
    """Return bitsandbytes' AdamW8bit with its CPU kernels."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit([p for _, p in named], lr=1.0, betas=betas, weight_decay=0.0)

    def second_moment(optimizer: Optimizer, p: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        state = optimizer.state[p]
        return dequantize_blockwise(
            state["state2"], absmax=state["absmax2"], code=state["qmap2"], blocksize=256
        )

    note = "AdamW8bit, the package's CPU kernels; its CUDA kernels round otherwise"
    return Scheme("bitsandbytes", make, second_moment, 256, "package", note)


# --- Re-implementations --------------------------------------------------------------------------


def reimplemented(name: str, code, note: str) -> Scheme:
    """Return Adam in plain PyTorch on one of the codes of `benchmarks.fidelity.codes`."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        return CodedAdam([p for _, p in named], code, lr=1.0, betas=betas)

    def second_moment(optimizer: CodedAdam, p: Tensor) -> Tensor:
        return optimizer.moments(p)[1]

    return Scheme(name, make, second_moment, code.block_size, "reimplemented", note)


def quick_schemes() -> list[Scheme]:
    """Return what the quick run compares."""
    codecs = [zero8_scheme(codec) for codec in ("log", "dynamic")]
    return [zero8_fp32(), *codecs, deepspeed_bf16(), torchao()]


def full_schemes() -> list[Scheme]:
    """Return everything that there is."""
    return [
        *quick_schemes(),
        *(zero8_scheme(codec, 2048) for codec in CODECS),
        torch_adamw(torch.bfloat16),
        bitsandbytes(),
        reimplemented("flashoptim", FlashCode(), "from arXiv:2602.23349"),
        reimplemented("ratio", RatioCode(), "v as in `log`, m as linear 8-bit m/sqrt(v)"),
        reimplemented("4bit", FourBitCode(), "from arXiv:2309.01507, without its rank-1 scales"),
    ]
