# SPDX-License-Identifier: Apache-2.0
"""A file of `torch.save` that is, or contains, one state dict of an optimizer.

The optimizer is one of zero8, an fp32 one of the same algorithm, or an 8-bit AdamW of
bitsandbytes or torchao.
"""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from zero8.checkpoint.read.foreign import from_foreign, is_foreign
from zero8.checkpoint.read.fragment import Fragment, fragment_of
from zero8.checkpoint.read.safe_load import damage_in, load
from zero8.checkpoint.read.source import Facts, Source
from zero8.checkpoint.read.torchao_weights import is_weight, values_of
from zero8.spec.shown import shown


class PlainSource(Source):
    """See `Source`."""

    def __init__(self, path: Path):
        """Refer to a file, which is read on demand."""
        self.path = path

    def facts(self) -> Facts:
        """See `Source`."""
        return Facts("plain", 1)

    def files(self) -> list[Path]:
        """See `Source`; the path may be a link, as the caller gives it."""
        return [self.path.resolve()]

    def names(self) -> list[str]:
        """See `Source`."""
        return list(self._states)

    def fragments(self, name: str) -> list[Fragment]:
        """See `Source`."""
        read = self._weights.get(name)
        with damage_in(self.path):
            return [fragment_of(self.path, name, self._states[name], read() if read else None)]

    @cached_property
    def _states(self) -> dict[str, dict]:
        """The states by parameter."""
        found = {}
        for key, state in self._state_dict["state"].items():
            if not isinstance(state, dict):
                raise ValueError(f"{self.path}: got a state of {shown(key)} that is not a dict")
            if state:
                found[self._names.get(key, str(key))] = state
        return found

    def groups(self) -> list[dict]:
        """See `Source`."""
        names = self._names
        return [
            {**group, "params": [names.get(key, str(key)) for key in group["params"]]}
            for group in self._state_dict["param_groups"]
        ]

    def tensors(self) -> dict[str, Callable[[], Tensor]]:
        """See `Source`."""
        return self._weights

    @cached_property
    def _whole(self) -> dict:
        found = load(self.path)
        return found if isinstance(found, dict) else {}

    @cached_property
    def _state_dict(self) -> dict:
        """The state dict of the optimizer."""
        found = [d for d in (self._whole, *self._whole.values()) if _is_of_optimizer(d)]
        if len(found) != 1:
            raise ValueError(
                f"{self.path}: got {len(found)} state dicts of optimizers (dicts with the keys "
                '"state" and "param_groups"), expected one'
            )
        if any(map(is_foreign, found[0]["state"].values())):
            with damage_in(self.path):
                return from_foreign(found[0])
        return found[0]

    @cached_property
    def _names(self) -> dict:
        """The parameters' names, if the groups have them."""
        names = {}
        for group in self._state_dict["param_groups"]:
            if not isinstance(group, dict) or "params" not in group:
                raise ValueError(f"{self.path}: got a parameter group without params")
            keys, texts = group["params"], group.get("param_names") or []
            if not isinstance(keys, list) or not isinstance(texts, list):
                raise ValueError(f"{self.path}: got a parameter group whose params are not a list")
            if not all(isinstance(key, int | str) for key in keys + texts):
                raise ValueError(f"{self.path}: got params that are neither numbers nor names")
            names |= {key: str(text) for key, text in zip(keys, texts, strict=False)}
        return names

    @cached_property
    def _weights(self) -> dict[str, Callable[[], Tensor]]:
        """What returns the model's parameters, by name, if they are in the file."""
        model = self._whole.get("model")
        model = model if isinstance(model, dict) else {}
        weights = {name: saved for name, saved in model.items() if is_weight(saved)}
        return {name: partial(values_of, name, saved) for name, saved in weights.items()}


def _is_of_optimizer(found: object) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("state"), dict)
        and isinstance(found.get("param_groups"), list)
    )
