# SPDX-License-Identifier: Apache-2.0
"""Damages checkpoints, each as a number says, and says what became of loading them.

A case is a function of its number alone.  What is damaged in turn: plain states and those of ZeRO
partitions, which an optimizer loads and steps on; and checkpoints of every kind, which the readers
of `zero8.checkpoint` read and decode.  `crafted_files` has what chance does not find.
"""

import copy
import io
import json
import pickletools
import random
import resource
import struct
import tempfile
import time
import traceback
import zipfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from fragments import fragments_in
from moment_samples import MOMENTS, NUMEL, PIECES, buffers, moment
from places import GOLDEN

import zero8
from zero8.checkpoint.read.open import open_checkpoint
from zero8.deepspeed import moment_tensor, swap_file
from zero8.deepspeed.flat_state import FlatPartition
from zero8.deepspeed.moment_tensor import BUFFERS, HEADER, MomentTensor
from zero8.state.table import PieceTable

SHAPES = {"wide": (3, 300), "narrow": (20, 30), "bias": (9,)}
PACKAGE = Path(zero8.__file__).parent
SETTINGS = {"lr": 1e-2, "min_8bit_size": 100}
MAX_SECONDS, MAX_MIB = 2.0, 200
GOOD = ("refused", "loaded", "refused by torch")
"""Outcomes that are as promised; all others are defects."""


class Wrong(Exception):
    """What must not happen, by its name."""


# --- Optimizers ----------------------------------------------------------------------------------


def plain_optimizer():
    """Return parameters and an optimizer that has not stepped."""
    generator = torch.Generator().manual_seed(1)
    named = [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator)))
        for name, shape in SHAPES.items()
    ]
    return [p for _, p in named], zero8.Adam8bitBlockwise(named, **SETTINGS)


def zero_optimizer():
    """Return a flat partition and an optimizer that takes it for one of ZeRO's, without ZeRO."""
    _, optimizer = plain_optimizer()
    flat = torch.nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    optimizer.param_groups[0]["params"] = [flat]
    (kind,) = (kind for kind in optimizer.kinds if isinstance(kind, FlatPartition))
    kind.table = lambda p, numel=None: PieceTable(PIECES, NUMEL)
    return [flat], optimizer


def take_steps(params, optimizer, count):
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@cache
def saved_state(make) -> dict:
    """Return the state dict of an optimizer after three steps."""
    params, optimizer = make()
    take_steps(params, optimizer, 3)
    return copy.deepcopy(optimizer.state_dict())


def digest(optimizer) -> int:
    """Return a checksum of all that a refused load must not change."""
    total = zlib.crc32(repr([sorted(g) for g in optimizer.param_groups]).encode())
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        total = zlib.crc32(repr(settings).encode(), total)
    for state in optimizer.state.values():
        for key, value in state.items():
            tensors = buffers(value) if isinstance(value, MomentTensor) else [value]
            for one in tensors:
                data = (
                    one.numpy().tobytes() if isinstance(one, torch.Tensor) else repr(one).encode()
                )
                total = zlib.crc32(key.encode() + data, total)
    return total


def load_and_step(make, state_dict) -> str:
    """Load a state dict and take steps; return what happened."""
    params, optimizer = make()
    take_steps(params, optimizer, 1)
    before = digest(optimizer)
    try:
        optimizer.load_state_dict(state_dict)
    except ValueError as error:
        if digest(optimizer) != before:
            raise Wrong("changed by a refused load") from error
        return "refused"
    except Exception as error:
        inner = traceback.extract_tb(error.__traceback__)[-1].filename
        if "/torch/optim/" not in inner or digest(optimizer) != before:
            raise
        return "refused by torch"
    try:
        take_steps(params, optimizer, 3)
    except Exception as error:
        raise Wrong(f"step raises {type(error).__name__}: {str(error)[:200]}") from error
    if not all(p.isfinite().all() for p in params):
        raise Wrong("weights are not finite")
    return "loaded"


# --- Damages of bytes ----------------------------------------------------------------------------


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four things wrong."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        data = chance.choice(BYTE_DAMAGES)(bytearray(data), chance)
    return bytes(data)


def flipped(data, chance):
    for _ in range(chance.choice((1, 1, 3, 16))):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def overwritten(data, chance):
    at = chance.randrange(len(data) + 1)
    count = chance.choice((1, 2, 4, 8, 64))
    data[at : at + count] = chance.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * count
    return data


def cut(data, chance):
    return data[: chance.randrange(len(data) + 1)]


def without_a_part(data, chance):
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 8, 512))]
    return data


def with_a_part_twice(data, chance):
    begin, at = chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)
    data[at:at] = data[begin : begin + chance.choice((1, 8, 512))]
    return data


def exchanged(data, chance):
    count = chance.choice((1, 8, 64, 512))
    a, b = (chance.randrange(max(1, len(data) - count)) for _ in range(2))
    data[a : a + count], data[b : b + count] = data[b : b + count], data[a : a + count]
    return data


def with_a_number(data, chance):
    value = chance.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**60, 2**63 - 1, 2**64 - 1))
    at = chance.randrange(len(data) + 1)
    data[at : at + 8] = struct.pack("<Q", value)
    return data


BYTE_DAMAGES = (
    flipped,
    flipped,
    overwritten,
    cut,
    without_a_part,
    with_a_part_twice,
    exchanged,
    with_a_number,
)
OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]
NUMBERS = [0, 1, 2, 3, 7, 255, 256, 299, 300, 901, 65535, 2**31 - 1, 2**31, 2**40, 2**62, 2**63]


def damaged_pickle(data: bytes, chance: random.Random) -> bytes:
    """Return a pickle some of whose opcodes are others, or have other arguments."""
    places = [(op, arg, at) for op, arg, at in pickletools.genops(data)]
    data, ends = bytearray(data), [at for _, _, at in places[1:]] + [len(data)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        number = chance.randrange(len(places))
        op, arg, at = places[number]
        if isinstance(arg, int) and op.name in ("BININT", "BININT1", "BININT2", "LONG1"):
            value = chance.choice((*NUMBERS, -1, arg + 1, arg - 1, arg * 2, -arg))
            new = b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        elif isinstance(arg, str) and chance.random() < 0.5:
            other = chance.choice(["", "x", "exp_avg", "format", "step", "shape", arg + "x"])
            new = b"X" + struct.pack("<I", len(other)) + other.encode()
        elif op.name == "BINFLOAT":
            value = chance.choice([float("nan"), float("inf"), -1.0, 1e300, 0.0])
            new = b"G" + struct.pack(">d", value)
        else:
            new = chance.choice(OPCODES + [b"N", b"}", b"]", b")", b"0", b"h\x01"])
        begin, end = at, ends[number]
        if begin < end <= len(data) and len(places) == len(ends):
            data[begin:end] = new
            break
        data[at : at + 1] = new[:1]
    return bytes(data)


def damaged_zip(data: bytes, chance: random.Random) -> bytes:
    """Return a file of torch.save, of which one record is damaged and all checksums are right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    number = next(n for n, (name, _) in enumerate(records) if name.endswith("data.pkl"))
    if chance.random() < 0.4:
        number = chance.randrange(len(records))
    name, content = records[number]
    is_pickle = name.endswith("data.pkl") and chance.random() < 0.7
    records[number] = name, (damaged_pickle if is_pickle else damaged)(content, chance)
    if chance.random() < 0.05:
        del records[chance.randrange(len(records))]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records:
            archive.writestr(name, content)
    return file.getvalue()


def damaged_swap(data: bytes, chance: random.Random) -> bytes:
    """Return a file of a state on NVMe that is damaged, and whose hashes are right."""
    saved = torch.load(io.BytesIO(data), weights_only=True)
    moment = saved[chance.choice(("exp_avg", "exp_avg_sq"))]
    numbers = [-1, 0, 1, 64, 1.5, float("nan"), float("inf"), 2**62, 2**70, "x", None]
    kind, name = chance.random(), chance.choice(BUFFERS)
    if kind < 0.5 and moment[name].numel():
        flat = moment[name].view(-1)
        extremes = EXTREMES if flat.dtype.is_floating_point else (0, 1, 127, 128, 255)
        flat[chance.randrange(len(flat))] = chance.choice(extremes)
        if chance.random() < 0.3:
            moment[name] = flat[:-1].clone()
    elif kind < 0.8:
        target = chance.choice([moment[HEADER], *moment[HEADER]["pieces"]])
        target[chance.choice(list(target))] = chance.choice(numbers)
    else:
        saved[chance.choice(("step", "history"))] = chance.choice(numbers)
    moment[HEADER]["hash"] = moment_tensor._hash_of([moment[one] for one in BUFFERS])
    saved[swap_file.HASH] = swap_file.hash_of(saved)
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


# --- Damages of values ---------------------------------------------------------------------------


def laughs():
    """Return a list that is short, and endless as text."""
    found = ["ha"] * 10
    for _ in range(40):
        found = [found] * 10
    return found


def any_value(chance):
    values = [None, True, -1, 0, 1, 1.5, float("nan"), float("inf"), -0.0, 2**70, 10**5000, "x"]
    values += ["9" * 5000, b"", b"x", [], {}, (), [1], {"a": 1}, laughs(), object(), 3.4e38, 1j]
    values += [torch.zeros(0), torch.ones(3), torch.tensor(1), torch.tensor([1e30]), range(3)]
    values += [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse(), torch.ones(3) * 1j]
    return chance.choice(values)


EXTREMES = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 3e38, -3e38, 1e-45, 1e20, -0.0)
DTYPES = [getattr(torch, name) for name in ("float64", "bfloat16", "int8", "int64", "bool")]
DTYPES += [torch.float16, torch.uint8, torch.int32, torch.complex64, torch.float8_e4m3fn]


def other_tensor(t, chance):
    """Return a tensor that is like another, but for something."""
    if t.is_meta or t.layout != torch.strided or t.ndim == 0:
        return t
    t = t.clone(memory_format=torch.contiguous_format)
    flat, size = t.view(-1), max(1, t.numel())
    numbers = [2**62, -1, 0, 1, 2, 3, 64, 255, 256, 4096, 2**31, chance.randrange(300)]
    extremes = EXTREMES if t.dtype.is_floating_point else numbers
    for _ in range(chance.choice((1, 1, 5)) if t.numel() else 0):
        value = chance.choice(extremes)
        if not t.dtype.is_floating_point and t.dtype != torch.int64:
            value %= 2 ** (8 * t.itemsize - 1)
        flat[chance.randrange(size)] = value
    changes = [lambda: t, lambda: t, lambda: t, lambda: t]
    changes += [lambda: t.to(chance.choice(DTYPES)), lambda: flat[:-1], lambda: flat]
    changes += [lambda: t.T if t.ndim == 2 else flat.view(-1, 1), lambda: t[None], lambda: t[:1]]
    changes += [
        lambda: flat[:1].expand(size if t.numel() else 0),
        lambda: torch.cat([flat, flat]),
        lambda: t.to("meta"),
    ]
    changes += [lambda: t.view(torch.uint8), lambda: t.to_sparse(), lambda: torch.zeros_like(t)]
    changes += [lambda: t.double() * 1e300, lambda: t[..., ::2], lambda: torch.full_like(t, 255)]
    return chance.choice(changes)()


def damage_entries(entries: dict, others: list[dict], chance: random.Random) -> None:
    """Damage one to three entries of a state, in place."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        key = chance.choice([*entries, "exp_avg", "param_correction"])
        value, kind = entries.get(key), chance.random()
        if kind < 0.15:
            entries.pop(key, None)
        elif kind < 0.3:
            entries[key] = any_value(chance)
        elif kind < 0.4:
            entries[key] = chance.choice(others).get(key)
        elif isinstance(value, MomentTensor):
            entries[key] = other_moment(value, chance)
        elif isinstance(value, torch.Tensor):
            entries[key] = other_tensor(value, chance)
        else:
            entries[key] = any_value(chance)


def other_moment(x, chance):
    """Return a moment that is like another, but for something."""
    if any(t.is_meta or t.layout != torch.strided for t in buffers(x)):
        return x  # damaged already
    description = moment_tensor.moment_description(x.store)
    tensors = [t.clone() for t in buffers(x)]
    kind = chance.random()
    if kind < 0.3:
        number = chance.randrange(3)
        tensors[number] = other_tensor(tensors[number], chance)
    elif kind < 0.6:
        target = chance.choice([description, *description["pieces"]])
        key = chance.choice(list(target))
        number = target[key] if type(target[key]) is int else 0
        target[key] = chance.choice([any_value(chance), number + 1, number - 1, -number, 0, 64])
    elif kind < 0.7:
        chance.shuffle(description["pieces"])
    elif kind < 0.8:
        return x[: chance.randrange(NUMEL)]
    elif kind < 0.9:
        return other_tensor(x.dense(), chance)
    else:
        return moment(chance.choice(("log", "dynamic")), chance.choice(MOMENTS))
    saved = {HEADER: description, **dict(zip(BUFFERS, tensors, strict=True))}
    return hashed_again(saved)


def damage_groups(saved: dict, chance: random.Random) -> None:
    """Damage the settings of a group, in place; what is legal and absurd is left out."""
    group = saved["param_groups"][0]
    key = chance.choice([*group, "params"])
    kind = chance.random()
    if kind < 0.2:
        group.pop(key)
    elif kind < 0.3:
        saved["param_groups"].append(dict(group))
    elif key == "params":
        group["params"] = chance.choice([[], group["params"][:-1], group["params"] * 2, [5, 6, 7]])
    else:
        value = any_value(chance)
        is_huge = isinstance(value, int | float) and not isinstance(value, bool) and value > 100
        group[key] = 0.5 if is_huge else value


# --- The subjects --------------------------------------------------------------------------------


def hashed_again(saved: dict) -> dict:
    """Give a pickled moment the hash of its bytes, if it has any: else nobody looks at values."""
    with suppress(Exception):
        saved[HEADER]["hash"] = moment_tensor._hash_of(saved[key] for key in BUFFERS)
    return saved


def optimizer_dict(make):
    def case(chance, folder):
        saved = copy.deepcopy(saved_state(make))
        states = saved["state"]
        if chance.random() < 0.15:
            damage_groups(saved, chance)
        elif chance.random() < 0.1:
            key = chance.choice(list(states))
            states[chance.choice([key, 99, "x"])] = any_value(chance)
        else:
            damage_entries(chance.choice(list(states.values())), list(states.values()), chance)
        return load_and_step(make, saved)

    return case


def decoded(path: Path) -> str:
    """Read a checkpoint; return what happened."""
    try:
        source = open_checkpoint(path)
        source.facts()
        for fragment in fragments_in(source):
            for store in fragment.stores:
                store.check_values()
                values = store.read(0, store.table.numel)
                if not values.isfinite().all():
                    raise Wrong("decodes to what is not finite")
        source.groups()
    except (ValueError, OSError) as error:
        if str(path) not in str(error) and "of the checkpoint is damaged" not in str(error):
            if "the checkpoint is damaged, or its run had diverged" not in str(error):
                raise Wrong(f"no file in the message: {error}") from error
        return "refused"
    return "loaded"


@cache
def contents(name: str) -> dict[str, bytes]:
    """Return the files of a golden checkpoint, {"": bytes} of a single one."""
    path = GOLDEN / name
    if path.is_file():
        return {"": path.read_bytes()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def reader(name: str, victims: str = ""):
    def case(chance, folder):
        files = dict(contents(name))
        victim = chance.choice([key for key in files if victims in key])
        data = files[victim]
        if victim.endswith(".swp") and chance.random() < 0.8:
            change = damaged_swap
        elif victim == ".metadata" and chance.random() < 0.6:
            change = damaged_pickle
        elif data[:2] == b"PK" and "distcp" not in victim and chance.random() < 0.7:
            change = damaged_zip
        else:
            change = damaged
        files[victim] = change(data, chance)
        if chance.random() < 0.03:
            del files[victim]
        path = Path(tempfile.mkdtemp(dir=folder)) / "checkpoint"
        for key, content in files.items():
            target = path / key if key else path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        if not path.exists():
            return "refused"
        return decoded(path)

    return case


SUBJECTS = {
    "plain dict": optimizer_dict(plain_optimizer),
    "ZeRO dict": optimizer_dict(zero_optimizer),
    "read plain": reader("plain_checkpoint.pt"),
    "read ZeRO-2": reader("zero2_checkpoint"),
    "read ZeRO-3": reader("zero3_checkpoint"),
    "read NVMe": reader("zero3_checkpoint", ".swp"),
    "read DCP": reader("dcp_checkpoint"),
}


def outcome(number: int, folder: str) -> tuple[str, str]:
    """Return subject and outcome of a case."""
    names = list(SUBJECTS)
    subject = names[number % len(names)]
    mib = _peak_mib()
    begin = time.process_time()
    try:
        result = SUBJECTS[subject](random.Random(number), folder)
    except Wrong as wrong:
        result = str(wrong)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
    if time.process_time() - begin > MAX_SECONDS:
        result = f"took {time.process_time() - begin:.1f} s: {result}"
    if _peak_mib() - mib > MAX_MIB:
        result = f"took {_peak_mib() - mib} MiB: {result}"
    return subject, result[:300]


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def work(numbers: range) -> None:
    """Print a line before and after each case: its number, and what became of it as JSON."""
    torch.set_num_threads(1)
    for optimizer in (plain_optimizer, zero_optimizer):  # loads the op, which is nobody's case
        load_and_step(optimizer, saved_state(optimizer))
    with tempfile.TemporaryDirectory(prefix="zero8-mutations-") as folder:
        for number in numbers:
            print(number, flush=True)
            print(json.dumps(outcome(number, folder)), flush=True)
            for path in Path(folder).iterdir():
                _remove(path)


def _remove(path: Path) -> None:
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.rmdir() if inner.is_dir() else inner.unlink()
    path.rmdir()


def show(number: int) -> None:
    """Run a case, and let what goes wrong through."""
    names = list(SUBJECTS)
    with tempfile.TemporaryDirectory(prefix="zero8-mutations-") as folder:
        print(SUBJECTS[names[number % len(names)]](random.Random(number), folder))
