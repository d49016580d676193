# SPDX-License-Identifier: Apache-2.0
"""The names and shapes of a model's parameters."""

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SIDE = 4096
"""Rows and columns of the matrices that a model of unknown shapes is assumed to have."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

Param = tuple[str, tuple[int, ...]]
"""A parameter's name and shape."""


@dataclass(frozen=True)
class Model:
    """A model's parameters, in the engine's order, under a title for reports."""

    title: str
    params: tuple[Param, ...]

    @classmethod
    def of_size(cls, text: str) -> "Model":
        """Return a model of a size such as "8B": matrices of 4096 x 4096, the last one shorter."""
        found = re.fullmatch(r"(\d+(?:\.\d*)?)([KMBT]?)", text.strip().upper())
        numel = round(float(found[1]) * UNITS[found[2]]) if found else 0
        if numel < SIDE:
            raise ValueError(
                f"--parameters: got {text!r}, expected a size such as 350M, 8B or 1.5T, of at "
                f"least {SIDE}"
            )
        whole, rest = divmod(numel // SIDE, SIDE)
        rows = [SIDE] * whole + [rest] * bool(rest)
        params = tuple((f"matrix.{number}", (n, SIDE)) for number, n in enumerate(rows))
        return cls(f"{text} parameters, taken as matrices of {SIDE} x {SIDE}", params)

    @classmethod
    def of_file(cls, path: Path) -> "Model":
        """Return the model of a JSON object of names and shapes, or of a `config.json`."""
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        if not isinstance(content, dict) or not content:
            raise ValueError(f"{path}: expected a JSON object that is not empty")
        if all(_is_shape(value) for value in content.values()):
            params = tuple((name, tuple(shape)) for name, shape in content.items())
        else:
            params = _params_of_config(path, content)
        numel = sum(math.prod(shape) for _, shape in params)
        return cls(f"{path}, {numel / 1e9:.4g}B parameters", params)

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for _, shape in self.params)

    @cached_property
    def largest_numel(self) -> int:
        """Number of elements of the largest parameter."""
        return max(math.prod(shape) for _, shape in self.params)


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


def _params_of_config(path: Path, config: dict) -> tuple[Param, ...]:
    if "model_type" not in config:
        raise ValueError(f"{path}: expected names and shapes, or a config.json with a model_type")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):  # without memory
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # what transformers raises depends on the model
        raise ValueError(f"{path}: transformers makes no language model of it: {error}") from error
    return tuple((name, tuple(param.shape)) for name, param in model.named_parameters())
