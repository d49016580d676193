# SPDX-License-Identifier: Apache-2.0
"""The file `.metadata` of torch.distributed.checkpoint: which tensors, in which chunks.

torch unpickles it freely.  Here nothing but the classes of such files is made.
"""

import io
import pickle
from pathlib import Path, PurePosixPath

import torch
from torch.distributed.checkpoint.metadata import Metadata

from zero8.checkpoint.read.safe_load import damage_in
from zero8.files.inside import opened_at
from zero8.spec.shown import shown

MAX_KEY_CHARACTERS = 4096
"""The longest key: to match it takes time quadratic in its length."""
_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    *(
        f"{_DCP}.metadata.{name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{_DCP}.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
}


class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full == "builtins.getattr":  # by which Python 3.11.0 to 3.11.3 pickle members of enums
            return lambda owner, member: owner.__members__[member]
        if (module.partition(".")[0], name) == ("pathlib", "PosixPath"):
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if full not in _CLASSES and not is_dtype:
            raise pickle.UnpicklingError(f"got {shown(full)}, which such files do not hold")
        return super().find_class(module, name)

    def _build(self) -> None:
        if callable(self.stack[-2]):
            raise pickle.UnpicklingError("it sets attributes of a class or function")
        self.load_build()

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}


def load_metadata(path: Path) -> Metadata:
    """Return the contents of a file `.metadata`, whose places are in files beside it."""
    with io.BufferedReader(opened_at(path, path.parent)) as file, damage_in(path):
        found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"not metadata of {_DCP}: got {shown(found)}")
        for key in found.state_dict_metadata:
            if not isinstance(key, str) or len(key) > MAX_KEY_CHARACTERS:
                raise ValueError(
                    f"got {shown(key)}, expected a key of {MAX_KEY_CHARACTERS} at most"
                )
        for info in found.storage_data.values():
            name = info.relative_path
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise ValueError(f"got a file {shown(name)}, expected a name in the same folder")
            if getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{name}: got a tensor that is compressed or encrypted, which zero8 does not "
                    "read"
                )
        return found
