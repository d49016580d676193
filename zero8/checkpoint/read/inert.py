# SPDX-License-Identifier: Apache-2.0
"""An unpickler that calls nothing that a file names, except what makes plain values and tensors.

Checkpoints of DeepSpeed and torchao name other classes, and nothing of them is needed except the
tensors inside: each becomes a placeholder, `Inert`.
"""

import _codecs
import _compat_pickle
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata


class Inert:
    """What a class or a function that a file names would have returned.

    Each name has a subclass of its own (`placeholder`).

    Attributes:
        name: of the class or function, as `module.name`.
        args: the arguments that it was called with.
        state: what would have set the object's attributes.
    """

    name = ""

    def __new__(cls, *args: object) -> "Inert":
        """Keep the arguments of a call."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: object) -> None:
        """Keep what would have set the object's attributes."""
        self.state = state

    def __repr__(self) -> str:
        """Return the name only."""
        return f"<{self.name}>"


def placeholder(name: str) -> type[Inert]:
    """Return what stands for the class or function of this name."""
    return type("Inert", (Inert,), {"name": name})


def _of_type(function: Callable, cls: type, args: tuple, state: object) -> object:
    """Return a tensor of a class, `Inert` with its state if the class is unknown."""
    if not issubclass(cls, Inert):
        return function(*args)
    made = cls()
    made.state = state
    return made


_KNOWN: dict[str, Any] = {
    "_codecs.encode": _codecs.encode,  # of bytes
    # Python 3.11.0 to 3.11.3 pickle members of enums by it.
    "builtins.getattr": lambda owner, member: owner.__members__[member],
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_parameter": lambda values, *_: values,
    "torch._utils._rebuild_parameter_with_state": lambda values, *_: values,
    "torch.nn.parameter.Parameter": Tensor,
}
for _one in (
    *(bytearray, complex, set, Counter, OrderedDict),
    *(Tensor, torch.UntypedStorage, torch.Size, torch.device, torch.serialization._get_layout),
    *(torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3),
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata),
    *(metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING),
    filesystem._StorageInfo,
):
    _KNOWN[f"{_one.__module__}.{_one.__qualname__}"] = _one


class Unpickler(pickle._Unpickler):
    """See the module; as pickle's, but written in Python, whose steps can be replaced."""

    def find_class(self, module: str, name: str) -> object:
        """Return what stands for a name: of `_KNOWN`, a dtype, or a placeholder."""
        full = f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"  # of protocol 2
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        return _KNOWN[full] if full in _KNOWN else placeholder(full)

    def _build(self) -> None:
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError("it sets attributes of a class or function")
        self.load_build()

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


def names_in(value: object, seen: set[int] | None = None) -> set[str]:
    """Return the names of the classes and functions whose placeholders an object holds or is."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return set()
    seen.add(id(value))
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, Inert):
        return {kind.name}
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, list | tuple | set):
        parts = value
    return set().union(*(names_in(part, seen) for part in parts))
