# SPDX-License-Identifier: Apache-2.0
"""One file of `torch.save` with the state dict of an optimizer, by itself or among others."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from zero8.checkpoint.fragment import Fragment
from zero8.checkpoint.safe_load import load
from zero8.checkpoint.source import Facts, Source
from zero8.checkpoint.states import fragment_of
from zero8.state.extent import Extent


class PlainSource(Source):
    """See `Source`."""

    def __init__(self, path: Path):
        """Look at a file."""
        self.path = path

    def facts(self) -> Facts:
        """See `Source`."""
        return Facts("plain", 1)

    def files(self) -> list[Path]:
        """See `Source`."""
        return [self.path]

    def fragments(self, file: Path) -> Iterator[Fragment]:
        """See `Source`."""
        states, names = self._state_dict["state"], self._names
        for key, state in states.items():
            if not isinstance(state, dict):
                raise ValueError(f"{file}: got a state of {key!r} that is no dict")
            if not state:
                continue
            name = names.get(key, str(key))
            shape = _shape_of(state, name, file)
            weights = self._weights.get(name)
            yield fragment_of(file, name, state, Extent.whole(shape), weights)

    def groups(self) -> list[dict]:
        """See `Source`."""
        names = self._names
        return [
            {**group, "params": [names.get(key, str(key)) for key in group["params"]]}
            for group in self._state_dict["param_groups"]
        ]

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
        return found[0]

    @cached_property
    def _names(self) -> dict:
        """The parameters' names, where the groups say them."""
        names = {}
        for group in self._state_dict["param_groups"]:
            if not isinstance(group, dict) or "params" not in group:
                raise ValueError(f"{self.path}: got a parameter group without params")
            names |= dict(zip(group["params"], group.get("param_names") or [], strict=False))
        return names

    @cached_property
    def _weights(self) -> dict[str, Tensor]:
        """The model's parameters, if they are in the file."""
        model = self._whole.get("model")
        return {k: v for k, v in model.items() if isinstance(v, Tensor)} if model else {}


def _is_of_optimizer(found: object) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("state"), dict)
        and isinstance(found.get("param_groups"), list)
    )


def _shape_of(state: dict, name: str, file: Path) -> tuple[int, ...]:
    for key in ("exp_avg_q8", "exp_avg"):
        if isinstance(state.get(key), Tensor):
            return tuple(state[key].shape)
    raise ValueError(
        f"{file}: state of {name}: got entries {sorted(map(str, state))}, expected those of "
        "Adam8bitBlockwise or of an fp32 Adam"
    )
