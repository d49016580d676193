# SPDX-License-Identifier: Apache-2.0
"""Small files that ask for much memory or time, and large ones that take no room on their disk.

A file of 8 MB has 1,500 tensors in one storage, which begins in the zip at an address that is no
multiple of 16: a copy for each takes 12 GB.  A tensor of 7 x 7 x 7 x 7 x 7 elements is cut into
chunks of one element: a comparison of each with all its neighbours along one dimension takes
minutes.  3,000 states of 8 MB share one storage: looking at all of them takes minutes.

A pickle of 1 MB uses a long text or tuple, which it holds once, 20,000 times and more: a copy for
each use takes gigabytes, or minutes.  300 parameters have their steps at one place of a file, where
there is a long pickle.  A file that has been made longer by truncate(2) holds zeros.
"""

import itertools
import os
import pickle
import zipfile
from pathlib import Path

import torch
from attack import Attack, checkpoint, main, whole
from crafted_cases import CHUNK, LENGTH, chunk, floats, metadata, place, with_entry
from crafted_files import (
    EMPTY_LIST,
    MARK,
    PERSISTENT_ID,
    REDUCE,
    TUPLE,
    dict_of,
    list_of,
    named,
    saved,
    storage,
    tensor,
    tuple_of,
    value,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zero8.algorithms.adam import ADAM

TENSORS, STORAGE_FLOATS = 1500, 2 << 20
SIZE = (7,) * 5
PARAMS, STEP_NUMBERS = 300, 200_000
PUT, GET, PUT_OTHER, GET_OTHER = b"q\xf0", b"h\xf0", b"q\xf1", b"h\xf1"
"""Opcodes for two places of the memo."""
POP, STACK_GLOBAL = b"0", b"\x93"


def misaligned_storage(folder: Path) -> list[str]:
    moment, many = tensor(floats(), [256], [1]), []
    for number in range(TENSORS):
        shared = storage("FloatStorage", "shared", STORAGE_FLOATS)
        many.append(tensor(shared, [4], [1], number))
    state = dict_of({0: dict_of({"step": value(1), "exp_avg": moment, "exp_avg_sq": moment})})
    content = {"state": state, "param_groups": value([{"params": [0]}]), "many": list_of(*many)}
    contents = bytes(range(256)) * (STORAGE_FLOATS // 64)
    for padding in range(1, 16):
        records = {"0": bytes(1024), "padding": bytes(padding), "shared": contents}
        data = saved(dict_of(content), records)
        if data.index(contents[:4096]) % 16:
            break
    path = folder / "states.pt"
    path.write_bytes(data)
    return checkpoint("inspect", path)


def states_that_share_a_storage(folder: Path) -> list[str]:
    shared = torch.ones(STORAGE_FLOATS)
    states = {n: {"step": 1, "exp_avg": shared, "exp_avg_sq": shared} for n in range(3000)}
    content = {"state": states, "param_groups": [{"params": [*range(3000)]}]}
    torch.save(content, folder / "states.pt")
    return checkpoint("verify", folder / "states.pt")


def chunks_in_five_dimensions(folder: Path) -> list[str]:
    tag, corners = whole(folder / "t1"), list(itertools.product(*map(range, SIZE)))
    chunks = list_of(*(chunk(corner, (1,) * 5) for corner in corners))
    places = [place("state.p.exp_avg", corner) for corner in corners]
    (tag / ".metadata").write_bytes(metadata(size=SIZE, chunks=chunks, places=places))
    return checkpoint("verify", tag)


def long_names() -> bytes:
    name = value("a" * 100_000) + PUT
    return EMPTY_LIST + MARK + name + (GET + GET + STACK_GLOBAL) * 20_000 + b"e"


def long_arguments(module: str, name: str, numbers: int, count: int) -> bytes:
    """Return calls of a function with many numbers."""
    args = MARK + b"K\1" * numbers + TUPLE
    if name == "Size":  # which has one argument
        args = tuple_of(args)
    before = named(module, name) + PUT + args + PUT_OTHER
    return EMPTY_LIST + MARK + before + (GET + GET_OTHER + REDUCE) * count + b"e"


def long_keys() -> bytes:
    pid = storage("FloatStorage", "a" * 4_000_000, 1).removesuffix(PERSISTENT_ID)
    again = GET + PERSISTENT_ID + POP
    return EMPTY_LIST + MARK + pid + PUT + POP + again * 100_000 + b"e"


def pickled(content: bytes):
    def plant(folder: Path) -> list[str]:
        (folder / "states.pt").write_bytes(with_entry("more", content))
        return checkpoint("verify", folder / "states.pt")

    return plant


def steps_in_one_place(folder: Path) -> list[str]:
    """Return the command on parameters whose steps are one large value, at one place of a file."""
    tag, size = whole(folder / "t1"), torch.Size((4, 64))
    step = saved(MARK + b"K\1" * STEP_NUMBERS + TUPLE + POP + value(7))
    (tag / "step.distcp").write_bytes(step)
    (tag / "__0_0.distcp").write_bytes(CHUNK * PARAMS * len(ADAM.moment_names))
    chunks = [ChunkStorageMetadata(torch.Size((0, 0)), size)]
    moment = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
    entries, places = {}, {}
    for number, which in itertools.product(range(PARAMS), ADAM.moment_names):
        key = f"state.p{number}.{which}"
        entries[key] = moment
        where = _StorageInfo("__0_0.distcp", LENGTH * len(places), LENGTH)
        places[MetadataIndex(key, (0, 0))] = where
    for number in range(PARAMS):
        key = f"state.p{number}.step"
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo("step.distcp", 0, len(step))
    (tag / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places), 4))
    return checkpoint("verify", tag)


def sparse_metadata(num_bytes: int):
    def plant(folder: Path) -> list[str]:
        os.truncate(whole(folder / "t1") / ".metadata", num_bytes)
        return checkpoint("verify", folder / "t1")

    return plant


def sparse_pickle(num_bytes: int):
    """Return what makes a zip whose record data.pkl is so long, and holds zeros."""

    def plant(folder: Path) -> list[str]:
        record = zipfile.ZipInfo("archive/data.pkl")
        record.file_size = record.compress_size = num_bytes
        record.CRC = record.header_offset = 0
        with open(folder / "states.pt", "wb") as file, zipfile.ZipFile(file, "w") as archive:
            file.write(record.FileHeader())
            archive.filelist.append(record)
            archive.start_dir = file.tell() + num_bytes
            archive.writestr("archive/version", b"3\n")
        return checkpoint("verify", folder / "states.pt")

    return plant


ATTACKS = (
    Attack("1,500 tensors in a misaligned storage", misaligned_storage, (0, 1, 2), seconds=20),
    Attack("3,000 states in one storage", states_that_share_a_storage, (1,), ("share the bytes",)),
    Attack("16,807 chunks in five dimensions", chunks_in_five_dimensions, (0, 1)),
    Attack("20,000 long names", pickled(long_names()), (1,), ("too long",)),
    *(
        Attack(
            f"{numbers[1]:,} calls of {name}", pickled(long_arguments(module, name, *numbers)), (1,)
        )
        for module, name, *numbers in (
            ("torch", "Size", 100_000, 20_000),
            ("torch._utils", "_rebuild_parameter", 1_000_000, 40_000),
        )
    ),
    Attack("100,000 long keys", pickled(long_keys()), (0, 1)),
    Attack(
        "300 steps in one place",
        steps_in_one_place,
        (1,),
        ("values that share",),
        seconds=20,
    ),
    *(
        Attack(f"{what} of {gib} GiB of zeros", plant(gib << 30), (1,), (says,))
        for what, plant in ((".metadata", sparse_metadata), ("data.pkl", sparse_pickle))
        for gib, says in ((2, "got a pickle of"), (64, "cannot be mapped"))
    ),
)

if __name__ == "__main__":
    main(ATTACKS)
