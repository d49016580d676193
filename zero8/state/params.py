# SPDX-License-Identifier: Apache-2.0
"""The names, order and global shapes of an optimizer's parameters."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.spec import dither
from zero8.state import float32_modules

TIED = "tied across pipeline stages"
tied_names = WeakTensorKeyDictionary()
"""Weights of which several stages of a pipeline have a copy, with their names, which are the same.

All copies must take the same steps.  Each stage cuts its parameters among its ranks at other
places, and a block that is cut has two scales, so that the codes of the copies would differ.
Float32 moments have no blocks.
"""


@dataclass(frozen=True)
class ParamInfo:
    """A parameter, as the optimizer was given it.

    Attributes:
        name: its name, None if it has none.
        index: its index in constructor order.
        shape: its global shape.
        why_float32: why its moments stay float32 whatever the policy is; empty if it decides.
    """

    name: str | None
    index: int
    shape: tuple[int, ...]
    why_float32: str = ""

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
        """Start without parameters."""
        self._originals: dict[int, tuple[weakref.ref[Tensor], ParamInfo]] = {}
        self._why_float32: dict[Tensor, str] = {}  # of those that `_originals` cannot have

    def remember(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[Tensor, str],
        shape_of: Callable[[Tensor], tuple[int, ...]],
    ) -> None:
        """Note the parameters in groups that are not known yet.

        Those that `bears_weak_references` excludes are skipped: no framework replaces them.
        `names` are a framework's, for parameters that come without one; `shape_of` returns the
        global shape of a parameter.
        """
        for p, info in self._infos_of(groups).items():
            if id(p) not in self._originals and bears_weak_references(p):
                info = replace(info, name=info.name or names.get(p), shape=shape_of(p))
                self._originals[id(p)] = (weakref.ref(p), info)

    def __contains__(self, p: Tensor) -> bool:
        """Return whether the optimizer was constructed with this tensor."""
        ref, _ = self._originals.get(id(p), (None, None))
        return ref is not None and ref() is p

    def keep_in_float32(self, reasons: Mapping[Tensor, str]) -> None:
        """Keep the moments of parameters in float32: copies are in no module that says so."""
        self._why_float32 |= reasons

    def alive(self) -> dict[Tensor, ParamInfo]:
        """Return the parameters that still exist, in constructor order."""
        pairs = [(ref(), info) for ref, info in self._originals.values()]
        return {p: info for p, info in pairs if p is not None}

    def infos(self, groups: Iterable[dict[str, Any]]) -> dict[Tensor, ParamInfo]:
        """Return name, place and global shape of every parameter in the optimizer's groups."""
        known, infos = self.alive(), self._infos_of(groups)
        copies = [p for p in infos if p not in known]
        # Without ZeRO, DeepSpeed steps float32 copies of the trained parameters, in their order.
        replaced = [(p, info) for p, info in known.items() if p not in infos]
        trained = [info for p, info in replaced if p.requires_grad and p.numel()]
        if [infos[p].shape for p in copies] == [info.shape for info in trained]:
            known |= dict(zip(copies, trained, strict=True))
        return {p: known.get(p, info) for p, info in infos.items()}

    def why_float32(self, groups: Iterable[dict[str, Any]]) -> dict[str, str]:
        """Return `ParamInfo.why_float32` by label."""
        # Under ZeRO the groups have flat partitions instead.
        infos = (*self.alive().values(), *self.infos(groups).values())
        return {info.label: info.why_float32 for info in infos}

    def _infos_of(self, groups: Iterable[dict[str, Any]]) -> dict[Tensor, ParamInfo]:
        """Return what is known without names of a framework, and local shapes."""
        infos: dict[Tensor, ParamInfo] = {}
        in_modules, index = float32_modules.params(), -1
        for group in groups:
            names = group.get("param_names") or []
            # A framework may have replaced the named parameters by flat or fewer tensors.
            if len(names) != len(group["params"]):
                names = [None] * len(group["params"])
            for name, p in zip(names, group["params"], strict=True):
                # A compiled model's parameters have the names of the model itself.
                name = name.replace("_orig_mod.", "") if name else None
                if p in in_modules and not bears_weak_references(p):
                    # FSDP2 takes it out of its module between forward and backward.
                    self._why_float32[p] = float32_modules.REASON
                why = float32_modules.REASON if p in in_modules else self._why_float32.get(p, "")
                if p in tied_names:
                    name, why = name or tied_names[p], why or TIED
                index += 1
                if p not in infos:  # a group may have it twice
                    infos[p] = ParamInfo(name, index, tuple(p.shape), why)
        return infos


def bears_weak_references(p: Tensor) -> bool:
    """Return whether weak references to a parameter are safe: not to DTensors and other wrappers.

    `model.to` exchanges tensors that wrap others (`torch.utils.swap_tensors`), which fails if one
    has a weak reference.
    """
    return not is_traceable_wrapper_subclass(p)
