# SPDX-License-Identifier: Apache-2.0
"""The public optimizers and their keywords."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.optimizer.muon import Muon8bitBlockwise
from zero8.spec.adam import ADAM
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.lion import LION
from zero8.spec.options import check_flag
from zero8.spec.sgd import SGD
from zero8.state.keywords import DEFAULTS


class Adam8bitBlockwise(BlockwiseOptimizer):
    r"""AdamW whose two moments are kept as 8-bit codes with one float32 scale per block.

    The step is AdamW's (Loshchilov and Hutter, arXiv:1711.05101) with the moments decoded before
    and encoded after it, block by block (Dettmers et al., arXiv:2110.02861):
    `zero8.spec.adam` has the equations, `zero8.spec.codec` the codes and their error bounds.
    State: 2 + 12/block_size bytes per element of an 8-bit parameter instead of 8.

    In a DeepSpeed config: `"optimizer": {"type": "Adam8bitBlockwise", "params": {...}}`.

    Args:
        params: parameters, groups, or `model.named_parameters()`; float32 or bfloat16, on the CPU
            or on CUDA GPUs.  Gradients have one of these dtypes, or float16 for float32 parameters.
        lr: learning rate, a number or a one-element tensor; a tensor on a GPU makes steps wait.
        betas: decay rates of the moments.
        eps: added to the root of the second moment; 0 is safe even where gradients are 0.
        weight_decay: decoupled (`adam_w_mode`) or added to the gradient; None (default) means 0, as
            in DeepSpeed; outside DeepSpeed, a log line says so once.
        adam_w_mode: AdamW (default) or Adam with L2 regularization.
        bias_correction: divide the moments by 1 - beta^t.
        maximize: ascend instead of descend.
        block_size: elements per scale, a power of two in 64..4096.
        codec: "log" (default), "log6", "dynamic", "fp8" or "linear4"; see
            `zero8.spec.codec`.
        min_8bit_size: parameters with fewer elements keep float32 moments.
        fp32_params: glob patterns of parameter names that keep float32 moments.
        stochastic_rounding: rounding of bfloat16 and INT8 parameters: "auto" or "dither"
            (golden-ratio sequence), "hash" (independent), or False (nearest).
        weight_correction_bits: 0, or 8 to keep 8 more bits of each bfloat16 weight beside the
            states, and to round to nearest.  If a script writes a weight, its value counts;
            the next step drops the 8 bits of all weights of its block.
        seed: seed of the dither; there is no generator state.
        state_dict_format: "8bit" (default), or "fp32" for state dicts like those of torch's AdamW,
            four times as large.  With "fp32", `torch.distributed.checkpoint` reads a checkpoint of
            AdamW.  Both are exact, and `load_state_dict` takes either.
        **others: keys of DeepSpeed's and torch's Adam that select an implementation are accepted
            without effect; `amsgrad=True` and other variants are refused.

    Attributes:
        state_dict_format (str): see the argument; may be set between two calls of `state_dict`.
        nonfinite_blocks (int): blocks that steps have left unchanged because a gradient was not
            finite; blocks of the latest steps may not be counted yet.

    Raises:
        ValueError: for an unknown key, a bad value, or a parameter that cannot be stepped.
    """

    algorithms = (ADAM,)
    fp32_optimizer_states = False  # DeepSpeed requires the attribute for bf16 states

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ADAM.options["lr"],
        betas: tuple[float, float] = ADAM.options["betas"],
        eps: float = ADAM.options["eps"],
        weight_decay: float | None = None,
        *,
        adam_w_mode: bool = ADAM.options["decoupled_weight_decay"],
        bias_correction: bool = DEFAULTS["bias_correction"],
        maximize: bool = ADAM.options["maximize"],
        block_size: int = DEFAULTS["block_size"],
        codec: str = DEFAULTS["codec"],
        min_8bit_size: int = DEFAULTS["min_8bit_size"],
        fp32_params: Iterable[str] = DEFAULTS["fp32_params"],
        stochastic_rounding: bool | str = DEFAULTS["stochastic_rounding"],
        weight_correction_bits: int = DEFAULTS["weight_correction_bits"],
        seed: int = DEFAULTS["seed"],
        state_dict_format: str = DEFAULTS["state_dict_format"],
        **others: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        given = locals()
        is_decoupled = check_flag("adam_w_mode", adam_w_mode)
        if (adamw_mode := others.pop("adamw_mode", None)) is not None:
            is_decoupled = check_flag("adamw_mode", adamw_mode)
        settings = {key: given[key] for key in DEFAULTS}
        options = given | {"decoupled_weight_decay": is_decoupled}
        super().__init__(params, others | settings, options)


class Lion8bitBlockwise(BlockwiseOptimizer):
    r"""Lion whose moment is kept as 8-bit codes with one float32 scale per block.

    The step is Lion's (Chen et al., arXiv:2302.06675) with the moment decoded before and encoded
    after it: `zero8.spec.lion` has the equations, `zero8.spec.codec` the codes and their
    error bounds.  State: 1 + 4/block_size bytes per element of an 8-bit parameter instead of 4.

    Args:
        params: see `Adam8bitBlockwise`.
        lr: learning rate, a number or a one-element tensor; the paper advises a tenth to a third of
            AdamW's.
        betas: decay rates of the average whose sign is the update, and of the moment.
        weight_decay: decoupled weight decay; the paper advises 3 to 10 times AdamW's.
        maximize: ascend instead of descend.
        **settings: those of `Adam8bitBlockwise` from `block_size` on, with the same defaults.
    """

    algorithms = (LION,)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = LION.options["lr"],
        betas: tuple[float, float] = LION.options["betas"],
        weight_decay: float = LION.options["weight_decay"],
        *,
        maximize: bool = LION.options["maximize"],
        **settings: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        super().__init__(params, settings, locals())


class SGD8bitBlockwise(BlockwiseOptimizer):
    r"""SGD with momentum whose moment is kept as 8-bit codes with one float32 scale per block.

    The step is that of `torch.optim.SGD` with the moment decoded before and encoded after it:
    `zero8.spec.sgd` has the equations, `zero8.spec.codec` the codes and their error bounds.
    State: 1 + 4/block_size bytes per element of an 8-bit parameter instead of 4.

    In a DeepSpeed config: `"optimizer": {"type": "SGD8bitBlockwise", "params": {...}}`.

    Args:
        params: see `Adam8bitBlockwise`.
        lr: learning rate, a number or a one-element tensor.
        momentum: decay rate of the moment, above 0: without momentum SGD has no states.
        dampening: the gradient enters the moment times 1 - dampening, from the second step on.
        weight_decay: added to the gradient, or decoupled.
        nesterov: Nesterov's momentum, which needs a dampening of 0.
        maximize: ascend instead of descend.
        decoupled_weight_decay: AdamW's decay instead of torch's, which is L2 regularization.
        **settings: those of `Adam8bitBlockwise` from `block_size` on, with the same defaults.
    """

    algorithms = (SGD,)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = SGD.options["lr"],
        momentum: float = 0.0,  # as torch's; without it SGD has no states, and this raises
        dampening: float = SGD.options["dampening"],
        weight_decay: float = SGD.options["weight_decay"],
        nesterov: bool = SGD.options["nesterov"],
        *,
        maximize: bool = SGD.options["maximize"],
        decoupled_weight_decay: bool = SGD.options["decoupled_weight_decay"],
        **settings: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        super().__init__(params, settings, locals())


class AdEMAMix8bitBlockwise(BlockwiseOptimizer):
    r"""AdEMAMix whose three moments are kept as 8-bit codes with float32 scales per block.

    The step is AdEMAMix's (Pagliardini et al., arXiv:2409.03137): Adam with a second average of the
    gradients, whose memory is long.  `zero8.spec.ademamix` has the equations,
    `zero8.spec.codec` the codes and their error bounds.  State: 3 + 16/block_size bytes per element
    of an 8-bit parameter instead of 12.

    In a DeepSpeed config: `"optimizer": {"type": "AdEMAMix8bitBlockwise", "params": {...}}`.

    Args:
        params: see `Adam8bitBlockwise`.
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the fast average, of the second moment, and of the slow average.
        alpha: the weight of the slow average.
        t_alpha: the number of steps in which alpha rises from 0; None: it is constant.
        t_beta3: the number of steps in which beta3 rises from beta1; None: it is constant.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        **settings: those of `Adam8bitBlockwise` from `block_size` on, with the same defaults.
    """

    algorithms = (ADEMAMIX,)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = ADEMAMIX.options["lr"],
        betas: tuple[float, float, float] = ADEMAMIX.options["betas"],
        alpha: float = ADEMAMIX.options["alpha"],
        t_alpha: float | None = ADEMAMIX.options["t_alpha"],
        t_beta3: float | None = ADEMAMIX.options["t_beta3"],
        eps: float = ADEMAMIX.options["eps"],
        weight_decay: float = ADEMAMIX.options["weight_decay"],
        *,
        maximize: bool = ADEMAMIX.options["maximize"],
        **settings: Any,
    ):
        """Check the arguments and set up the groups; moments are made by the first step."""
        super().__init__(params, settings, locals())


OPTIMIZERS: tuple[type[BlockwiseOptimizer], ...] = (
    Adam8bitBlockwise,
    Lion8bitBlockwise,
    SGD8bitBlockwise,
    AdEMAMix8bitBlockwise,
    Muon8bitBlockwise,
)
"""The public optimizers; `torch.optim` and DeepSpeed's configs get their names."""
