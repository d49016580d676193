# SPDX-License-Identifier: Apache-2.0
"""ZeRO's files of states, mapped: DeepSpeed would hold all of them beside the engine's states.

What has been copied out of them leaves this process's memory.
"""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero8.deepspeed.layout import MASTERS
from zero8.deepspeed.seam import STAGE12, seam
from zero8.files.inside import release
from zero8.state.entries import ENTRIES

_PART_NUMEL = 1 << 24  # 64 MiB


class MappedFiles:
    """The files of one load."""

    def __init__(self):
        """Start without files."""
        self._paths: list[Path] = []

    def load(self, original: Callable, path: str, map_location: Any = None) -> Any:
        """Load a file, in the place of DeepSpeed's own `original`."""
        name = Path(path).name
        is_of_zero = "zero_pp_rank_" in name and name.endswith("_optim_states.pt")
        if not is_of_zero or not zipfile.is_zipfile(path):
            return original(path, map_location=map_location)
        self._paths.append(Path(path))
        found = torch.load(path, map_location=map_location, weights_only=False, mmap=True)
        zero = found.get("optimizer_state_dict") or {}
        for name in MASTERS & zero.keys():
            zero[name] = [MappedMasters.of(tensor, self._release) for tensor in zero[name]]
        states = zero.get("base_optimizer_state") or zero.get("optimizer_state_dict") or {}
        for state in states["state"].values() if "state" in states else ():
            # Other code's entries are kept as they are, and the file may be written again.
            others = {k: x for k, x in state.items() if k not in ENTRIES}
            state |= {k: x.clone() for k, x in others.items() if isinstance(x, Tensor)}
        return found

    def adopted(self, original: Callable, *args: Any) -> Any:
        """Adopt a state by a kind's own `original`."""
        result = original(*args)
        self._release()
        return result

    def _release(self) -> None:
        release(*self._paths)


class MappedMasters(Tensor):
    """Master weights of a partition in a mapped file, which are copied in parts.

    DeepSpeed copies the master weights of a parameter group at once, all of whose pages would be in
    memory then.
    """

    release: Callable[[], None]

    @classmethod
    def of(cls, tensor: Tensor, release: Callable[[], None]) -> "MappedMasters":
        """Return the same memory; `release` takes the file's pages out of memory."""
        mapped = tensor.detach().as_subclass(cls)
        mapped.release = release
        return mapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy this in parts, and fill what is left of a longer target, padding, with zeros."""
        if func == Tensor.data.__get__:  # DeepSpeed copies from that
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            if func is not Tensor.copy_ or not isinstance(args[1], cls):
                return func(*args, **(kwargs or {}))
            target, source = args
            target[source.numel() :].zero_()
            parts = source.split(_PART_NUMEL)
            for its, part in zip(target[: source.numel()].split(_PART_NUMEL), parts, strict=True):
                its.copy_(part)
                source.release()
            return target


@seam(
    STAGE12.partition(":")[0],
    "_get_padded_tensor",
    "the last rank would copy its master weights twice",
    "src_tensor",
    optimizer=None,
)
def get_padded_tensor(original: Callable, src_tensor: Tensor, size: int) -> Tensor:
    """Leave the padding to the copy."""
    is_mapped = isinstance(src_tensor, MappedMasters)
    return src_tensor if is_mapped else original(src_tensor, size)
