# SPDX-License-Identifier: Apache-2.0
"""Placeholders for what a pickle names, so that reading a file calls nothing that it names.

torch's reader for `weights_only` refuses classes and functions that it does not know.  Checkpoints
of DeepSpeed and torchao name such classes, and nothing of them is needed except the tensors inside.
`allowed` makes torch call a placeholder in their place.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Inert:
    """What a class or a function that a file names would have returned.

    Attributes:
        name: of the class or function, as `module.name`.
        args: the arguments that it was called with.
        state: what would have set the object's attributes.
    """

    def __init__(self, name: str, args: tuple, state: object = None):
        """Set the attributes."""
        self.name, self.args, self.state = name, args, state

    def __setstate__(self, state: object) -> None:
        """Keep what would have set the object's attributes."""
        self.state = state

    def __repr__(self) -> str:
        """Return the name only."""
        return f"<{self.name}>"


class _Named(Tensor):
    """A class that stands for a named one; calls of it return `Inert`.

    torch makes instances only of subclasses of Tensor that hold others, and `settled` replaces
    those.
    """

    name = ""

    def __new__(cls, *args: object) -> Inert:  # type: ignore[misc]  # in the place of an instance
        return Inert(cls.name, args)

    def __setstate__(self, state: object) -> None:
        self.held = state

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> object:
        raise TypeError(f"got a {cls.name} for {func}")  # torch wants it to be defined


def allowed(names: Iterable[str]) -> AbstractContextManager:
    """Return a context in which torch's reader for `weights_only` takes these names as `Inert`."""
    named = [(type("_Named", (_Named,), {"name": name}), name) for name in names]
    own = (Inert, f"{Inert.__module__}.{Inert.__qualname__}")  # else it may not set its state
    return torch.serialization.safe_globals([*named, own])


def settled(found: object) -> object:
    """Return what torch's reader has read, with `Inert` for subclasses of Tensor but Parameter.

    Dicts and lists are changed in place.
    """
    return _settled(found, {})


def _settled(found: object, done: dict[int, tuple[object, object]]) -> object:
    if id(found) in done:
        return done[id(found)][1]
    if isinstance(found, _Named):
        made: object = Inert(type(found).name, (), found.held)
    elif isinstance(found, torch.nn.Parameter):
        made = found.data
    elif isinstance(found, tuple) and not isinstance(found, torch.Size):
        made = tuple(_settled(value, done) for value in found)
    else:
        made = found
    done[id(found)] = found, made  # with it, so that its id stays its own
    if isinstance(made, dict):
        made.update({key: _settled(value, done) for key, value in made.items()})
    elif isinstance(made, list):
        made[:] = (_settled(value, done) for value in made)
    elif isinstance(made, Inert):
        made.state = _settled(made.state, done)
    return made


def names_in(value: object, seen: set[int] | None = None) -> set[str]:
    """Return the names of the classes and functions that an object of `settled` holds or is of."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    if isinstance(value, Inert):
        return {value.name}
    if isinstance(value, type):
        return {value.name} if issubclass(value, _Named) else set()
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, list | tuple | set):
        parts = value
    return set().union(*(names_in(part, seen) for part in parts))
