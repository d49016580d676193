# SPDX-License-Identifier: Apache-2.0
"""Damages checkpoints, each as a number says, and says what became of loading them.

    python tests/support/mutations.py COUNT --first NUMBER

What is damaged in turn: plain states and those of ZeRO partitions, which an optimizer loads and
steps on; and checkpoints of every kind, which the readers of `zero8.checkpoint` read and decode.
"""

import argparse
import copy
import io
import pickletools
import random
import struct
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
from fragments import fragments_in
from moment_samples import NUMEL, PIECES, buffers, moment
from places import GOLDEN
from small_optimizers import bytes_of, named_params, param, run

import zero8
from zero8.checkpoint.read.open import open_checkpoint
from zero8.deepspeed import moment_tensor
from zero8.deepspeed.flat_state import FlatPartition
from zero8.deepspeed.moment_tensor import BUFFERS, HEADER, MomentTensor
from zero8.state.table import PieceTable

SHAPES = {"wide": (3, 300), "narrow": (20, 30), "bias": (9,)}
LOADED, REFUSED, REFUSED_BY_TORCH = "loaded", "refused", "refused by torch"
"""Outcomes that are as promised; all others are defects."""


# --- Optimizers ----------------------------------------------------------------------------------


def plain_optimizer():
    """Return parameters and an optimizer that has not stepped."""
    named = named_params(SHAPES)
    return [*named.values()], zero8.Adam8bitBlockwise(named.items(), lr=1e-2, min_8bit_size=100)


def zero_optimizer():
    """Return a flat partition and an optimizer that takes it for one of ZeRO's, without ZeRO."""
    _, optimizer = plain_optimizer()
    flat = param(NUMEL)
    optimizer.param_groups[0]["params"] = [flat]
    (kind,) = (kind for kind in optimizer.kinds if isinstance(kind, FlatPartition))
    kind.table = lambda p, numel=None: PieceTable(PIECES, NUMEL)
    return [flat], optimizer


@cache
def saved_state(make) -> dict:
    params, optimizer = make()
    run(optimizer, params, 3)
    return copy.deepcopy(optimizer.state_dict())


def load_and_step(make, chance: random.Random) -> str:
    """Load a state dict that is damaged and take steps; return what happened."""
    state_dict = copy.deepcopy(saved_state(make))
    damage_state_dict(state_dict, chance)
    params, optimizer = make()
    run(optimizer, params, 1)
    before = bytes_of(optimizer.state_dict())  # all that a refused load must not change
    try:
        optimizer.load_state_dict(state_dict)
    except Exception as error:  # any but a refusal is raised again
        is_torchs = "/torch/optim/" in traceback.extract_tb(error.__traceback__)[-1].filename
        if not (is_torchs or isinstance(error, ValueError)):
            raise
        if bytes_of(optimizer.state_dict()) != before:
            return "changed by a refused load"
        return REFUSED if isinstance(error, ValueError) else REFUSED_BY_TORCH
    run(optimizer, params, 3)
    return LOADED if all(p.isfinite().all() for p in params) else "weights are not finite"


# --- Damages of bytes ----------------------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2, 7, 255, 256, 300, 65535, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with a flipped bit, another number, or something missing or twice."""
    data = bytearray(data)
    at, count = chance.randrange(len(data)), chance.choice((1, 8, 512))
    match chance.randrange(5):
        case 0:
            data[at] ^= 1 << chance.randrange(8)
        case 1:
            data[at : at + 8] = struct.pack("<q", chance.choice(NUMBERS))
        case 2:
            del data[at : at + count]
        case 3:
            data[at:at] = data[at : at + count]
        case 4:
            del data[at:]
    return bytes(data)


def damaged_pickle(data: bytes, chance: random.Random) -> bytes:
    """Return a pickle one of whose opcodes is another, or has another argument."""
    places = list(pickletools.genops(data))
    number = chance.randrange(len(places) - 1)
    (op, arg, begin), (_, _, end) = places[number : number + 2]
    if isinstance(arg, int) and op.name in ("BININT", "BININT1", "BININT2", "LONG1"):
        value = chance.choice((*NUMBERS, arg + 1, arg - 1, -arg))
        new = b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
    elif isinstance(arg, str) and chance.random() < 0.5:
        other = chance.choice(["", "exp_avg", "format", "step", "shape", arg + "x"]).encode()
        new = b"X" + struct.pack("<I", len(other)) + other
    else:
        new = chance.choice(pickletools.opcodes).code.encode("latin-1")
    return data[:begin] + new + data[end:]


def damaged_zip(data: bytes, chance: random.Random) -> bytes:
    """Return a file of torch.save, of which one record is damaged and all checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    pickle = next(name for name in records if name.endswith("data.pkl"))
    name = pickle if chance.random() < 0.6 else chance.choice([n for n in records if records[n]])
    change = damaged_pickle if name == pickle else damaged
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for one, content in (records | {name: change(records[name], chance)}).items():
            archive.writestr(one, content)
    return file.getvalue()


# --- Damages of values ---------------------------------------------------------------------------

EXTREMES = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 3e38, -3e38, 1e-45, 1e20, -0.0)
VALUES = [None, True, *NUMBERS, 1.5, *EXTREMES, 2**70, "x", b"x", [], {}, (), [1], {"a": 1}]
VALUES += [object(), 1j, torch.zeros(0), torch.ones(3), torch.tensor([1e30])]
VALUES += [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()]
DTYPES = ("float64", "bfloat16", "int8", "int64", "bool", "complex64", "float8_e4m3fn")


def other_tensor(t, chance):
    """Return a tensor that is like another, but for something."""
    if t.is_meta or t.layout != torch.strided or not t.numel():
        return torch.ones(3)
    t = t.clone(memory_format=torch.contiguous_format)
    flat = t.view(-1)
    value = chance.choice(EXTREMES if t.dtype.is_floating_point else NUMBERS)
    if not t.dtype.is_floating_point and t.dtype != torch.int64:
        value %= 2 ** (8 * t.itemsize - 1)
    flat[chance.randrange(len(flat))] = value
    makes = [lambda: t] * 5 + [
        lambda: t.to(getattr(torch, chance.choice(DTYPES))),
        lambda: flat[:-1],
        lambda: torch.cat([flat, flat]),
        lambda: flat[:1].expand(len(flat)),
        lambda: t[None],
        lambda: t[..., ::2],
        lambda: t.to("meta"),
        lambda: t.to_sparse(),
    ]
    return chance.choice(makes)()


def other_moment(x, chance):
    """Return a moment that is like another, but for something; one of ZeRO's files, it may be."""
    saved = {HEADER: moment_tensor.moment_description(x.store)}
    saved |= {name: t.clone() for name, t in zip(BUFFERS, buffers(x), strict=True)}
    target = chance.choice([saved, saved[HEADER], *saved[HEADER]["pieces"]])
    key = chance.choice([*BUFFERS] if target is saved else [*target])
    target[key] = other_tensor(target[key], chance) if target is saved else chance.choice(VALUES)
    with suppress(Exception):  # with a hash that is right: else nobody looks at values
        saved[HEADER]["hash"] = moment_tensor._hash_of(saved[key] for key in BUFFERS)
    return chance.choice([x[: chance.randrange(NUMEL)], x.dense(), moment("dynamic"), saved])


def damage_state_dict(saved: dict, chance: random.Random) -> None:
    states, group = saved["state"], saved["param_groups"][0]
    entries = chance.choice(list(states.values()))
    key = chance.choice([*entries, "exp_avg", "param_correction"])
    value, other = entries.get(key), chance.choice(VALUES)
    match chance.randrange(10):
        case 0:
            setting = chance.choice(list(group))
            is_huge = isinstance(other, int | float) and other > 100  # legal, and absurd
            group[setting] = group["params"][:-1] if setting == "params" or is_huge else other
        case 1:
            states[chance.choice([*states, 99, "x"])] = other
        case 2:
            entries.pop(key, None)
        case 3:
            entries[key] = chance.choice(list(states.values())).get(key)
        case _ if isinstance(value, MomentTensor):
            entries[key] = other_moment(value, chance)
        case _ if isinstance(value, torch.Tensor):
            entries[key] = other_tensor(value, chance)
        case _:
            entries[key] = other


# --- The subjects --------------------------------------------------------------------------------


def read(name: str, chance: random.Random) -> str:
    """Read and decode a golden checkpoint, one of whose files is damaged; return what happened."""
    with tempfile.TemporaryDirectory(prefix="zero8-mutations-") as folder:
        path = Path(folder, "checkpoint")
        for file, content in damaged_files(name, chance).items():
            (path / file).parent.mkdir(parents=True, exist_ok=True)
            (path / file).write_bytes(content)
        try:
            source = open_checkpoint(path)
            for fragment in fragments_in(source):
                for store in fragment.stores:
                    store.check_values()
                    if not store.read(0, store.table.numel).isfinite().all():
                        return "decodes to what is not finite"
            source.groups()
        except (ValueError, OSError) as error:
            is_named = any(x in str(error) for x in (str(path), "the checkpoint is damaged"))
            return REFUSED if is_named else f"no file in the message: {error}"
        return LOADED


def damaged_files(name: str, chance: random.Random) -> dict[str, bytes]:
    """Return the files of a golden checkpoint by path, "" of a single one."""
    root = GOLDEN / name
    paths = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    files = {str(p.relative_to(root)) if p != root else "": p.read_bytes() for p in paths}
    victim = chance.choice(list(files))
    change = damaged
    if victim == ".metadata" and chance.random() < 0.6:
        change = damaged_pickle
    elif files[victim][:2] == b"PK" and "distcp" not in victim and chance.random() < 0.7:
        change = damaged_zip
    return files | {victim: change(files[victim], chance)}


SUBJECTS = {
    "plain dict": partial(load_and_step, plain_optimizer),
    "ZeRO dict": partial(load_and_step, zero_optimizer),
    "read plain": partial(read, "plain_checkpoint.pt"),
    "read ZeRO-2": partial(read, "zero2_checkpoint"),
    "read ZeRO-3 and NVMe": partial(read, "zero3_checkpoint"),
    "read DCP": partial(read, "dcp_checkpoint"),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    counts, wrong = Counter(), 0
    for number in range(given.first, given.first + given.count):
        subject = list(SUBJECTS)[number % len(SUBJECTS)]
        print(f"case {number}: {subject}", end=": ", flush=True)  # a process may die
        try:
            outcome = SUBJECTS[subject](random.Random(number))
        except Exception:  # is the case's outcome; the next ones run
            outcome = traceback.format_exc()
        print(outcome)
        counts[subject, outcome] += 1
        wrong += outcome not in (LOADED, REFUSED, REFUSED_BY_TORCH)
    # Loads that never succeed would prove nothing, nor would ones that always do.
    missing = [(s, what) for s in SUBJECTS for what in (LOADED, REFUSED) if not counts[s, what]]
    print(f"{given.count} cases, {wrong} wrong; none of {missing}", file=sys.stderr)
    return wrong or len(missing)


if __name__ == "__main__":
    sys.exit(main() > 0)
