# SPDX-License-Identifier: Apache-2.0
"""What the optimizer knows of its parameters: their names, their order, their global shapes."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero8.spec import dither


@dataclass(frozen=True)
class ParamInfo:
    """What policy and dither know of a parameter: its name if it has one, its place, its shape."""

    name: str | None
    index: int
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name, or the index in constructor order."""
        return str(self.index) if self.name is None else self.name

    @property
    def identity(self) -> int:
        """The 64-bit identity that the dither depends on."""
        return dither.identity_of(self.index if self.name is None else self.name)


class KnownParams:
    """The parameters that an optimizer was constructed with.

    Frameworks replace them in the optimizer's groups, by flat partitions or by float32 copies.
    """

    def __init__(self) -> None:
        """Know none."""
        self._originals: dict[int, tuple[weakref.ref[Tensor], ParamInfo]] = {}

    def remember(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[Tensor, str],
        shape_of: Callable[[Tensor], tuple[int, ...]],
    ) -> None:
        """Note the parameters in groups that are not known yet.

        But none that `bears_weak_references` excludes: nothing will replace it in the groups.

        Args:
            groups: of the optimizer.
            names: what a framework calls parameters that come without a name.
            shape_of: returns the global shape of a parameter.
        """
        for p, info in _infos_of(groups).items():
            if id(p) not in self._originals and bears_weak_references(p):
                info = replace(info, name=info.name or names.get(p), shape=shape_of(p))
                self._originals[id(p)] = (weakref.ref(p), info)

    def __contains__(self, p: Tensor) -> bool:
        """Return whether the optimizer was constructed with this tensor."""
        ref, _ = self._originals.get(id(p), (None, None))
        return ref is not None and ref() is p

    def alive(self) -> dict[Tensor, ParamInfo]:
        """Return those that still exist, in constructor order."""
        pairs = [(ref(), info) for ref, info in self._originals.values()]
        return {p: info for p, info in pairs if p is not None}

    def infos(self, groups: Iterable[dict[str, Any]]) -> dict[Tensor, ParamInfo]:
        """Return name, place and global shape of every parameter in the optimizer's groups."""
        known, infos = self.alive(), _infos_of(groups)
        copies = [p for p in infos if p not in known]
        # Without ZeRO, DeepSpeed steps over float32 copies of what is trained, in the same order.
        replaced = [(p, info) for p, info in known.items() if p not in infos]
        trained = [info for p, info in replaced if p.requires_grad and p.numel()]
        if [tuple(p.shape) for p in copies] == [info.shape for info in trained]:
            known |= dict(zip(copies, trained, strict=True))
        return {p: known.get(p, info) for p, info in infos.items()}


def _infos_of(groups: Iterable[dict[str, Any]]) -> dict[Tensor, ParamInfo]:
    """Return what groups say about their parameters."""
    infos: dict[Tensor, ParamInfo] = {}
    for group in groups:
        names = group.get("param_names") or []
        # Others may have put flat or fewer tensors in the place of the named parameters.
        if len(names) != len(group["params"]):
            names = [None] * len(group["params"])
        for name, p in zip(names, group["params"], strict=True):
            # A compiled model's parameters are called as the model's own, as in its checkpoints.
            name = name.replace("_orig_mod.", "") if name else None
            infos[p] = ParamInfo(name, len(infos), tuple(p.shape))
    return infos


def bears_weak_references(p: Tensor) -> bool:
    """Return whether a parameter may have weak references, which is not so of DTensors.

    `model.to` exchanges tensors that wrap others (`torch.utils.swap_tensors`), and fails if there
    is a weak reference to one.
    """
    return not is_traceable_wrapper_subclass(p)
