# SPDX-License-Identifier: Apache-2.0
"""Checks the keywords of the optimizer; every error says what to do instead."""

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import DEFAULT_CODEC, codec_named
from zero8.spec.options import check_flag
from zero8.spec.segment import Rounding
from zero8.spec.shown import shown
from zero8.state.policy import Policy
from zero8.state.settings import Settings

logger = logging.getLogger("zero8")

Value = TypeVar("Value")

# Keys of DeepSpeed's and torch's Adam that select an implementation; zero8 has only one.
NO_EFFECT_KEYS = ("torch_adam", "set_grad_none", "foreach", "fused", "fp32_optimizer_states")

# Keys for features that zero8 lacks: the harmless value, and the reason.
REFUSED_KEYS = {
    "amsgrad": (False, "the maximum of past second moments would need a third moment"),
    "capturable": (False, "zero8 does not step inside CUDA graphs"),
    "differentiable": (False, "the step is not differentiable"),
}

_BETAS = "Did you mean 'betas', as in betas=(0.9, 0.999)?"

ADVICE = {
    # bitsandbytes
    "optim_bits": "Leave it out: moments are 8-bit, except those that fp32_params names.",
    "args": "Leave it out: every setting is a keyword.",
    "block_wise": "Leave it out: every block of block_size elements has a scale.",
    "percentile_clipping": "Leave it out, and clip by torch.nn.utils.clip_grad_norm_.",
    "is_paged": "Leave it out: DeepSpeed's offload_optimizer or FSDP2's CPUOffloadPolicy keeps "
    "states in host memory.",
    # torchao
    "compile_backend": "Leave it out: the kernel is C++, compiled without torch.compile.",
    "bf16_stochastic_round": "Did you mean 'stochastic_rounding'?  It is on by default.",
    # Trainers, papers and other frameworks
    "wd": "Did you mean 'weight_decay'?",
    "learning_rate": "Did you mean 'lr'?",
    "beta1": _BETAS,
    "beta2": _BETAS,
    "momentum": _BETAS,
}
"""What to do with the keywords of other libraries, in sentences."""

ROUNDINGS = {
    "auto": Rounding.DITHER,
    True: Rounding.DITHER,
    "dither": Rounding.DITHER,
    "hash": Rounding.HASH,
    False: Rounding.NEAREST,
}

STATE_DICT_FORMATS = ("8bit", "fp32")

DEFAULTS: dict[str, Any] = {
    "bias_correction": True,
    "block_size": Policy.block_size,
    "codec": DEFAULT_CODEC,
    "min_8bit_size": Policy.min_8bit_size,
    "fp32_params": Policy.fp32_params,
    "stochastic_rounding": "auto",
    "weight_correction_bits": 0,
    "seed": 0,
    "state_dict_format": STATE_DICT_FORMATS[0],
}
"""The settings of a whole optimizer, with their defaults."""

OWN_KEYS = tuple(key for key in DEFAULTS if key != "bias_correction")
"""Keys that no other optimizer has."""

WHOLE_OPTIMIZER_KEYS = ("adam_w_mode", "adamw_mode", *DEFAULTS)
"""Keys that have no meaning in one parameter group."""


def split(algorithm: Algorithm, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the whole optimizer, defaults included, and the other keywords."""
    ours = {*OWN_KEYS, *algorithm.keywords} & DEFAULTS.keys()
    whole = {key: given[key] if key in ours & given.keys() else DEFAULTS[key] for key in DEFAULTS}
    return whole, {key: value for key, value in given.items() if key not in ours}


def check_other_keys(algorithm: Algorithm, class_name: str, others: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown keyword, or one for a feature that zero8 lacks."""
    check_refused_keys(class_name, others)
    no_effect = (*NO_EFFECT_KEYS, *algorithm.no_effect_keys)
    for key, value in others.items():
        if key in REFUSED_KEYS:
            continue
        if key not in no_effect:
            valid = (*algorithm.keywords, *OWN_KEYS)
            texts = (
                f"unknown parameter {key!r} for {class_name}.",
                _hint(key, valid),
                f"Valid ones are {', '.join(valid)}; accepted without effect: "
                f"{', '.join(no_effect)}",
            )
            raise ValueError("  ".join(filter(None, texts)))
        if value:
            logger.warning("%s=%r has no effect on %s", key, value, class_name)


def _hint(key: str, valid: Sequence[str]) -> str:
    """Return advice on an unknown keyword, "" if it resembles none."""
    advice = ADVICE.get(key)
    if advice and (advice is not _BETAS or "betas" in valid):
        return advice
    near = difflib.get_close_matches(key.lower(), valid, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def check_refused_keys(class_name: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError if settings, such as a loaded group's, ask for a feature that zero8 lacks.

    See `REFUSED_KEYS`; `class_name` is the optimizer's.
    """
    for key, (harmless, reason) in REFUSED_KEYS.items():
        value = values.get(key)
        if value is not None and not (isinstance(value, int) and value == harmless):
            raise ValueError(
                f"{key}: got {shown(value)}, {class_name} supports {harmless} only: {reason}"
            )


def checked_settings(algorithm: Algorithm, whole: Mapping[str, Any]) -> Settings:
    """Return `Settings` from keywords as `split` returns them; raise ValueError for a bad value."""
    return Settings(
        Policy(whole["block_size"], whole["min_8bit_size"], whole["fp32_params"]),
        codec_named(whole["codec"]).name,
        ROUNDINGS[_one_of("stochastic_rounding", whole["stochastic_rounding"], ROUNDINGS)],
        _one_of("weight_correction_bits", whole["weight_correction_bits"], (0, 8)),
        check_seed(whole["seed"]),
        check_flag("bias_correction", whole["bias_correction"]),
        algorithm.name,
    )


def check_state_dict_format(name: str) -> str:
    """Return the format of state dicts, or raise ValueError."""
    return _one_of("state_dict_format", name, STATE_DICT_FORMATS)


def _one_of(name: str, value: Value, valid: Iterable[object]) -> Value:
    """Return a value; raise ValueError unless it is one of the valid ones, and of their types."""
    if not any(type(value) is type(one) and value == one for one in valid):
        raise ValueError(f"{name}: got {value!r}, expected one of {list(valid)}")
    return value


def check_seed(seed: object) -> int:
    """Return a seed, an integer, or raise ValueError."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed: got {seed!r}, expected an integer")
    return seed


def check_new_group(algorithm: Algorithm, class_name: str, group: dict[str, Any]) -> None:
    """Raise ValueError unless the settings of a parameter group that a user adds are valid."""
    for key in WHOLE_OPTIMIZER_KEYS:
        if key in group:
            raise ValueError(
                f"{key}: got it in a parameter group, but it holds for the whole optimizer; pass "
                f"it to {class_name} itself"
            )
    check_group(algorithm, class_name, group)


def check_group(algorithm: Algorithm, class_name: str, group: dict[str, Any]) -> None:
    """Raise ValueError unless the settings of a group, perhaps an fp32 optimizer's, are valid."""
    check_refused_keys(class_name, group)
    names = group.get("param_names")
    names = [] if names is None else names
    if not isinstance(names, list | tuple) or not all(
        n is None or isinstance(n, str) for n in names
    ):
        raise ValueError(f"param_names: got {shown(names)}, expected a list of names")
    algorithm.check(group)
