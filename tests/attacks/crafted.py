# SPDX-License-Identifier: Apache-2.0
"""Files that nobody's `save` writes: calls in pickles, states and places that do not fit."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch
from small_optimizers import bytes_of
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


class Call:
    """Is pickled as a call of a function."""

    def __init__(self, function: Callable, *arguments: object):
        self._reduced = function, arguments

    def __reduce__(self) -> tuple:
        return self._reduced


def rezipped(data: bytes, records: dict[str, bytes]) -> bytes:
    """Return a file of torch.save with records replaced, or added after the others."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in (found | records).items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


def with_attributes(owner: type) -> bytes:
    """Return a pickle that sets an attribute of a class, which `__setstate__` does not see."""
    parts = (pickle.dumps(one, 2)[2:-1] for one in (owner, ({}, {"changed": 1})))
    return b"\x80\x02" + b"".join(parts) + pickle.BUILD + pickle.STOP


# --- Files of torch.save -------------------------------------------------------------------------


def adam(**entries: object) -> dict:
    """Return a state dict of AdamW, of one parameter, but for some entries."""
    moments = {"exp_avg": torch.ones(256), "exp_avg_sq": torch.ones(256)}
    return {"state": {0: {"step": 1, **moments, **entries}}, "param_groups": [{"params": [0]}]}


def in_itself() -> dict:
    found: dict = {}
    found["state"] = found
    return found


FILES = {
    "an attribute of a class": lambda: rezipped(
        bytes_of({}), {"data.pkl": with_attributes(OrderedDict)}
    ),
    "a dict in itself": lambda: bytes_of(in_itself()),
    "moments of other lengths": lambda: bytes_of(adam(exp_avg=torch.ones(255))),
    "states in a list": lambda: bytes_of({"state": [1], "param_groups": []}),
    "groups without params": lambda: bytes_of(adam() | {"param_groups": [{}]}),
    "no states": lambda: bytes_of({"x": 1}),
    "empty": lambda: b"",
}
GOOD_FILES = {"of AdamW": lambda: bytes_of(adam())}


# --- Folders of torch.distributed.checkpoint -----------------------------------------------------

STEP, CHUNK = bytes_of(7), bytes_of(torch.ones(4, 64))
KEY = "optimizer.state.p.exp_avg"
AT = MetadataIndex(KEY, (0, 0))


def tensor(size: tuple, *chunks: tuple) -> TensorStorageMetadata:
    made = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), made)


def metadata(change: Callable = lambda entries, places: None) -> bytes:
    """Return a file `.metadata` of one parameter's state, changed by a function."""
    whole = tensor((4, 64), ((0, 0), (4, 64)))
    step = KEY.replace("exp_avg", "step")
    entries = {KEY: whole, f"{KEY}_sq": whole, step: BytesStorageMetadata()}
    place = _StorageInfo("__0_0.distcp", 0, len(CHUNK))
    places = {AT: place, MetadataIndex(f"{KEY}_sq", (0, 0)): place}
    places[MetadataIndex(step)] = _StorageInfo("step.distcp", 0, len(STEP))
    change(entries, places)
    return pickle.dumps(Metadata(entries, storage_data=places))


def placed(**changes: object) -> Callable:
    return lambda entries, places: places.update({AT: replace(places[AT], **changes)})


def shaped(*shape: tuple) -> Callable:
    return lambda entries, places: entries.update({KEY: tensor(*shape)})


METADATA = {
    "an attribute of a class": lambda: with_attributes(Metadata),
    "another object": lambda: pickle.dumps({}),
    "empty": lambda: b"",
} | {
    name: lambda change=change: metadata(change)
    for name, change in {
        "a file above": placed(relative_path="../x.distcp"),
        "a file of a number": placed(relative_path=3),
        "a file that is not there": placed(relative_path="x"),
        "a pipe for a file": placed(relative_path="pipe"),
        "a negative offset": placed(offset=-1),
        "a length beyond": placed(length=2**36),
        "compressed": placed(transform_descriptors=["zstd"]),
        "no place": lambda entries, places: places.pop(AT),
        "another shape": shaped((64, 4), ((0, 0), (64, 4))),
        "chunks that overlap": shaped((6, 64), ((0, 0), (4, 64)), ((3, 0), (2, 64))),
        "chunks that are not all": shaped((5, 64), ((0, 0), (4, 64))),
    }.items()
}
