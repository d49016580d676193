# SPDX-License-Identifier: Apache-2.0
"""The optimizers that users name: their keywords."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zero8.algorithms.adam import ADAM
from zero8.algorithms.lion import LION
from zero8.blockwise import BlockwiseOptimizer
from zero8.spec.codec import DEFAULT_CODEC
from zero8.state import keywords


class Adam8bitBlockwise(BlockwiseOptimizer):
    r"""AdamW whose two moments are kept as 8-bit codes with one float32 scale per block.

    The step is AdamW's (Loshchilov and Hutter, arXiv:1711.05101) with the moments decoded before
    and encoded after it, block by block (Dettmers et al., arXiv:2110.02861):
    `zero8.algorithms.adam` has the equations, `zero8.spec.codec` the codes and their error bounds.
    State: 2 + 12/block_size bytes per element of an 8-bit parameter instead of 8.

    In a DeepSpeed config: `"optimizer": {"type": "Adam8bitBlockwise", "params": {...}}`.

    Args:
        params: parameters, groups, or `model.named_parameters()`; float32 or bfloat16, on the CPU
            or on CUDA GPUs.  Gradients are either, of float32 parameters float16 too.
        lr: learning rate, a number or a one-element tensor; for one that is on a GPU every step
            waits.
        betas: decay rates of the moments.
        eps: added to the root of the second moment; with 0, what has no gradient stays, too.
        weight_decay: decoupled (`adam_w_mode`) or added to the gradient; None (default) is 0, as
            DeepSpeed's, and is logged once where a script of plain PyTorch leaves it so.
        adam_w_mode: AdamW (default) or Adam with L2 regularisation.
        bias_correction: divide the moments by 1 - beta^t.
        maximize: ascend.
        block_size: elements per scale, a power of two in 64..4096.
        codec: "log" (default) or "dynamic"; see `zero8.spec.codec`.
        min_8bit_size: parameters with fewer elements keep float32 moments.
        fp32_params: glob patterns of parameter names that keep float32 moments.
        stochastic_rounding: of bfloat16 parameters: "auto" or "dither" (golden-ratio sequence),
            "hash" (independent), or False (nearest).
        weight_correction_bits: 8 keeps the 8 bits below those of each bfloat16 weight beside the
            states and rounds to the nearest of these 24-bit weights, without noise; 0 does not.
        seed: of the dither; no generator state exists.
        state_dict_format: "8bit" (default), or "fp32": state dicts are those of torch's AdamW, four
            times as large.  `torch.distributed.checkpoint` reads a checkpoint of AdamW through one
            of that form.  Both are exact, and `load_state_dict` takes either.
        huge_pages: move parameters and gradients to huge pages before their first step (Linux 6.1;
            states are made there anyway): faster steps where memory is the limit.
        **others: keys of DeepSpeed's and torch's Adam that select an implementation have no
            effect; `amsgrad=True` and the like are refused.

    Attributes:
        state_dict_format (str): as the argument; may be set between two calls of `state_dict`.
        nonfinite_blocks (int): how many blocks steps have left as they were because of a gradient
            that was not finite, as far as that is known and reported.

    Raises:
        ValueError: for an unknown key or a bad value, or a parameter that it can never step.
    """

    algorithm = ADAM
    fp32_optimizer_states = False  # what DeepSpeed asks of an optimizer for bf16 states

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        block_size: int = 256,
        codec: str = DEFAULT_CODEC,
        min_8bit_size: int = 4096,
        fp32_params: Iterable[str] = (),
        stochastic_rounding: bool | str = "auto",
        weight_correction_bits: int = 0,
        seed: int = 0,
        huge_pages: bool = False,
        state_dict_format: str = "8bit",
        **others: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        is_decoupled = keywords.check_flag("adam_w_mode", adam_w_mode)
        if (adamw_mode := others.pop("adamw_mode", None)) is not None:
            is_decoupled = keywords.check_flag("adamw_mode", adamw_mode)
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": is_decoupled,
        }
        whole = {
            "bias_correction": bias_correction,
            "block_size": block_size,
            "codec": codec,
            "min_8bit_size": min_8bit_size,
            "fp32_params": fp32_params,
            "stochastic_rounding": stochastic_rounding,
            "weight_correction_bits": weight_correction_bits,
            "seed": seed,
            "huge_pages": huge_pages,
            "state_dict_format": state_dict_format,
        }
        super().__init__(params, options, whole, others)


class Lion8bitBlockwise(BlockwiseOptimizer):
    r"""Lion whose moment is kept as 8-bit codes with one float32 scale per block.

    The step is Lion's (Chen et al., arXiv:2302.06675) with the moment decoded before and encoded
    after it: `zero8.algorithms.lion` has the equations, `zero8.spec.codec` the codes and their
    error bounds.  State: 1 + 4/block_size bytes per element of an 8-bit parameter instead of 4.

    Args:
        params: as those of `Adam8bitBlockwise`.
        lr: learning rate, a number or a one-element tensor; Lion's papers advise a third to a tenth
            of AdamW's.
        betas: decay rates: of the average whose sign is the update, and of the moment.
        weight_decay: decoupled; AdamW's times 3 to 10, as lr is smaller.
        maximize: ascend.
        **settings: those of `Adam8bitBlockwise` from `block_size` on, with the same defaults.

    Attributes:
        settings: what holds for the whole optimizer.

    Raises:
        ValueError: for an unknown key or a bad value, or a parameter that it can never step.
    """

    algorithm = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **settings: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        whole, others = keywords.split(settings)
        super().__init__(params, options, whole, others)


OPTIMIZERS: tuple[type[BlockwiseOptimizer], ...] = (Adam8bitBlockwise, Lion8bitBlockwise)
"""Those whose names are public, and known to `torch.optim` and so to DeepSpeed's configs."""
