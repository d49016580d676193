# SPDX-License-Identifier: Apache-2.0
"""Small files that ask for much memory or time.

A file of 8 MB has 1,500 tensors in one storage, which begins in the zip at an address that is no
multiple of 16: a copy for each takes 12 GB.  A tensor of 7 x 7 x 7 x 7 x 7 elements is cut into
chunks of one element: a comparison of each with all its neighbours along one dimension takes
minutes.  3,000 states of 8 MB share one storage: looking at all of them takes minutes.
"""

import itertools
from pathlib import Path

import torch
from attack import Attack, checkpoint, main, whole
from crafted_cases import chunk, floats, metadata, place
from crafted_files import dict_of, list_of, saved, storage, tensor, value

TENSORS, STORAGE_FLOATS = 1500, 2 << 20
SIZE = (7,) * 5


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


ATTACKS = (
    Attack("1,500 tensors in a misaligned storage", misaligned_storage, (0, 1, 2), seconds=20),
    Attack("3,000 states in one storage", states_that_share_a_storage, (1,), ("share the bytes",)),
    Attack("16,807 chunks in five dimensions", chunks_in_five_dimensions, (0, 1)),
)

if __name__ == "__main__":
    main(ATTACKS)
