# SPDX-License-Identifier: Apache-2.0
"""Seams: the places where zero8 patches DeepSpeed, each declared beside its patch.

    @seam(STAGE3, "step", "no step would be put off")
    def step(original, self, *args, **kwargs): ...

The function takes the place of DeepSpeed's for our optimizers only, and gets that one as its first
argument.  `zero8.deepspeed.seams` checks all seams before it patches any.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from zero8.environment.packages import TESTED

ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
STAGE12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
BF16 = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"

classes: list[type] = []
"""The classes of which optimizers have been made."""


def is_ours(optimizer: object) -> bool:
    """Return whether an optimizer is one of zero8's."""
    return isinstance(optimizer, tuple(classes))


def of_zero(zero: Any, *_: Any, **__: Any) -> object:
    """Return the optimizer inside one of ZeRO's, whose method is called."""
    return zero.optimizer


def of_engine(engine: Any, *_: Any, **__: Any) -> object:
    """Return the optimizer of an engine, whose method is called."""
    return getattr(engine, "basic_optimizer", None)


def of_argument(optimizer: object, *_: Any, **__: Any) -> object:
    """Return the first argument, in calls of functions that take an optimizer."""
    return optimizer


def arguments(original: Callable, owner: object, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call of a method by their names, without `self`."""
    _, *named = inspect.signature(original).bind(owner, *args, **kwargs).arguments.items()
    return dict(named)


@contextmanager
def replaced(thing: object, name: str, value: object) -> Iterator[None]:
    """Override an attribute of an object, not of its class, during the block."""
    own = {name: vars(thing)[name]} if name in vars(thing) else {}
    setattr(thing, name, value)
    try:
        yield
    finally:
        delattr(thing, name)
        vars(thing).update(own)


@dataclass(frozen=True)
class Seam:
    """A member of DeepSpeed that zero8 patches or relies on.

    Attributes:
        owner: its module, or module:class.
        name: its name there.
        parameters: the parameters that zero8 relies on.
        without: what would happen without the patch; empty if zero8 only calls it.
        patch: what takes its place; None for lists and tables, and without a patch.
        optimizer: gets the arguments of a call, and returns the optimizer that must be ours; None:
            the patch decides.
        is_early: whether the import of DeepSpeed patches it.
        kind: its class, if that matters.
    """

    owner: str
    name: str
    parameters: tuple[str, ...] = ()
    without: str = ""
    patch: Callable | None = None
    optimizer: Callable[..., object] | None = None
    is_early: bool = False
    kind: type = object

    @property
    def label(self) -> str:
        """The name with its class, if it is in one."""
        class_name = self.owner.partition(":")[2]
        return f"{class_name}.{self.name}" if class_name else self.name

    def __str__(self) -> str:
        """Return the full name."""
        return f"{self.owner.replace(':', '.')}.{self.name}"

    def found(self) -> object | None:
        """Return the member, None if it is missing."""
        try:
            return getattr(self._owner(), self.name)
        except (ImportError, AttributeError):
            return None

    def check(self) -> None:
        """Raise RuntimeError unless it exists and takes the parameters."""
        there = self.found()
        taken = inspect.signature(there).parameters if callable(there) else ()
        fits = isinstance(there, self.kind) and set(self.parameters) <= set(taken)
        if there is None or not fits:
            raise RuntimeError(
                f"zero8 does not fit this DeepSpeed ({version('deepspeed')}): {self}"
                f"({', '.join(self.parameters)}) is missing or different; use one from "
                "{} to below {}".format(*TESTED["deepspeed"])
            )

    def install(self) -> None:
        """Put the patch in its place."""
        if self.patch is None:
            return
        owner = self._owner()
        original, patch = getattr(owner, self.name), self.patch

        @functools.wraps(original, updated=())
        def patched(*args: Any, **kwargs: Any) -> Any:
            if self.optimizer and not is_ours(self.optimizer(*args, **kwargs)):
                return original(*args, **kwargs)
            return patch(original, *args, **kwargs)

        setattr(owner, self.name, patched)

    @property
    def state(self) -> str:
        """Return "missing", "present", or "installed" if zero8 has patched it."""
        found = self.found()
        if found is None:
            return "missing"
        if isinstance(found, list | dict):  # a list of classes, a table of builders
            is_patched = any("zero8" in repr(entry) for entry in found)
        else:
            is_patched = getattr(found, "__globals__", {}).get("__name__") == __name__
        return "installed" if is_patched else "present"

    def _owner(self) -> Any:
        module, _, class_name = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, class_name) if class_name else found


SEAMS: list[Seam] = []
"""All of DeepSpeed that zero8 depends on."""


def seam(
    owner: str,
    name: str,
    without: str,
    *parameters: str,
    optimizer: Callable[..., object] | None = of_zero,
    is_early: bool = False,
) -> Callable[[Callable], Callable]:
    """Declare the decorated function as a patch; the arguments are those of `Seam`."""

    def declare(patch: Callable) -> Callable:
        SEAMS.append(Seam(owner, name, parameters, without, patch, optimizer, is_early))
        return patch

    return declare


def rely_on(owner: str, name: str, *parameters: str) -> None:
    """Declare a member of DeepSpeed that zero8 calls."""
    SEAMS.append(Seam(owner, name, parameters))
