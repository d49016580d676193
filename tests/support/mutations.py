# SPDX-License-Identifier: Apache-2.0
"""Damages checkpoints, each as a number says, and says what became of loading them.

What is damaged in turn: plain states and those of ZeRO partitions, which an optimizer loads and
steps on; and checkpoints of every kind, which the readers of `zero8.checkpoint` read and decode.
"""

import copy
import io
import json
import pickletools
import random
import resource
import shutil
import struct
import tempfile
import time
import traceback
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from fragments import fragments_in
from moment_samples import MOMENTS, NUMEL, PIECES, buffers, copies, moment
from nests import difference
from places import GOLDEN

import zero8
from zero8.checkpoint.read.open import open_checkpoint
from zero8.deepspeed import moment_tensor, swap_file
from zero8.deepspeed.flat_state import FlatPartition
from zero8.deepspeed.moment_tensor import BUFFERS, HEADER, MomentTensor
from zero8.state.table import PieceTable

SHAPES = {"wide": (3, 300), "narrow": (20, 30), "bias": (9,)}
MAX_SECONDS, MAX_MIB = 2.0, 200
GOOD = ("refused", "loaded", "refused by torch")
"""Outcomes that are as promised; all others are defects."""


class Wrong(Exception):
    """What must not happen, by its name."""


# --- Optimizers ----------------------------------------------------------------------------------


def plain_optimizer():
    """Return parameters and an optimizer that has not stepped."""
    torch.manual_seed(1)
    named = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in SHAPES.items()]
    return [p for _, p in named], zero8.Adam8bitBlockwise(named, lr=1e-2, min_8bit_size=100)


def zero_optimizer():
    """Return a flat partition and an optimizer that takes it for one of ZeRO's, without ZeRO."""
    _, optimizer = plain_optimizer()
    flat = torch.nn.Parameter(torch.randn(NUMEL))
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
    params, optimizer = make()
    take_steps(params, optimizer, 3)
    return copy.deepcopy(optimizer.state_dict())


def contents_of(optimizer) -> list:
    """Return copies of all that a refused load must not change."""
    settings = [{k: repr(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    states = [
        copies(v) if isinstance(v, MomentTensor) else copy.deepcopy(v)
        for state in optimizer.state.values()
        for v in state.values()
    ]
    return [settings, states]


def load_and_step(make, state_dict) -> str:
    """Load a state dict and take steps; return what happened."""
    params, optimizer = make()
    take_steps(params, optimizer, 1)
    before = contents_of(optimizer)
    try:
        optimizer.load_state_dict(state_dict)
    except Exception as error:
        is_torchs = "/torch/optim/" in traceback.extract_tb(error.__traceback__)[-1].filename
        if not (is_torchs or isinstance(error, ValueError)):
            raise
        if difference(contents_of(optimizer), before):
            raise Wrong("changed by a refused load") from error
        return "refused" if isinstance(error, ValueError) else "refused by torch"
    try:
        take_steps(params, optimizer, 3)
    except Exception as error:
        raise Wrong(f"step raises {type(error).__name__}: {str(error)[:200]}") from error
    if not all(p.isfinite().all() for p in params):
        raise Wrong("weights are not finite")
    return "loaded"


# --- Damages of bytes ----------------------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2, 7, 255, 256, 300, 65535, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four things wrong."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, count = chance.randrange(len(data) + 1), chance.choice((1, 8, 512))
        kind = chance.randrange(6)
        if kind < 2 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            data[at : at + 8] = struct.pack("<q", chance.choice(NUMBERS))
        elif kind == 3:
            del data[at : at + count]
        elif kind == 4:
            begin = chance.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + count]
        elif kind == 5:
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
    name = pickle if chance.random() < 0.6 else chance.choice(list(records))
    change = damaged_pickle if name == pickle and chance.random() < 0.7 else damaged
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for one, content in records.items():
            archive.writestr(one, change(content, chance) if one == name else content)
    return file.getvalue()


def damaged_swap(data: bytes, chance: random.Random) -> bytes:
    """Return a file of a state on NVMe that is damaged, and whose hashes are right."""
    saved = torch.load(io.BytesIO(data), weights_only=True)
    moment = saved[chance.choice(MOMENTS)]
    if chance.random() < 0.5:
        name = chance.choice(BUFFERS)
        moment[name] = other_tensor(moment[name], chance)
    else:
        target = chance.choice([saved, moment[HEADER], *moment[HEADER]["pieces"]])
        keys = ("step", "history") if target is saved else list(target)
        target[chance.choice(keys)] = chance.choice([*NUMBERS, 1.5, float("nan"), 2**70, "x", None])
    hashed_again(moment)
    saved[swap_file.HASH] = swap_file.hash_of(saved)
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


# --- Damages of values ---------------------------------------------------------------------------

EXTREMES = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 3e38, -3e38, 1e-45, 1e20, -0.0)
DTYPES = ("float64", "bfloat16", "int8", "int64", "bool", "complex64", "float8_e4m3fn")


def any_value(chance):
    laughs = ["ha"] * 10  # a list that is short, and endless as text
    for _ in range(40):
        laughs = [laughs] * 10
    values = [None, True, *NUMBERS, 1.5, *EXTREMES, 2**70, 10**5000, "x", "9" * 5000, b"x", [], {}]
    values += [(), [1], {"a": 1}, laughs, object(), 1j, torch.zeros(0), torch.ones(3), range(3)]
    values += [torch.tensor([1e30]), torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()]
    return chance.choice(values)


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


def hashed_again(saved: dict) -> dict:
    """Give a pickled moment the hash of its bytes, if it has any: else nobody looks at values."""
    with suppress(Exception):
        saved[HEADER]["hash"] = moment_tensor._hash_of(saved[key] for key in BUFFERS)
    return saved


def other_moment(x, chance):
    """Return a moment that is like another, but for something; one of ZeRO's files, it may be."""
    saved = {HEADER: moment_tensor.moment_description(x.store)}
    saved |= {name: t.clone() for name, t in zip(BUFFERS, buffers(x), strict=True)}
    target = chance.choice([saved, saved[HEADER], *saved[HEADER]["pieces"]])
    key = chance.choice([*BUFFERS] if target is saved else [*target])
    target[key] = other_tensor(target[key], chance) if target is saved else any_value(chance)
    others = [x[: chance.randrange(NUMEL)], x.dense(), moment("dynamic"), hashed_again(saved)]
    return chance.choice(others)


def damage_state_dict(saved: dict, chance: random.Random) -> None:
    states, group = saved["state"], saved["param_groups"][0]
    kind = chance.random()
    if kind < 0.1:
        key = chance.choice(list(group))
        value = any_value(chance)
        is_huge = isinstance(value, int | float) and value > 100  # legal, and absurd
        group[key] = group["params"][:-1] if key == "params" else 0.5 if is_huge else value
    elif kind < 0.2:
        states[chance.choice([*states, 99, "x"])] = any_value(chance)
    else:
        entries = chance.choice(list(states.values()))
        key = chance.choice([*entries, "exp_avg", "param_correction"])
        value = entries.get(key)
        if kind < 0.3:
            entries.pop(key, None)
        elif kind < 0.4:
            entries[key] = chance.choice(list(states.values())).get(key)
        elif isinstance(value, MomentTensor):
            entries[key] = other_moment(value, chance)
        elif isinstance(value, torch.Tensor):
            entries[key] = other_tensor(value, chance)
        else:
            entries[key] = any_value(chance)


# --- The subjects --------------------------------------------------------------------------------


def optimizer_dict(make):
    def case(chance, folder):
        saved = copy.deepcopy(saved_state(make))
        damage_state_dict(saved, chance)
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
                if not store.read(0, store.table.numel).isfinite().all():
                    raise Wrong("decodes to what is not finite")
        source.groups()
    except (ValueError, OSError) as error:
        if not any(text in str(error) for text in (str(path), "the checkpoint is damaged")):
            raise Wrong(f"no file in the message: {error}") from error
        return "refused"
    return "loaded"


@cache
def contents(name: str) -> dict[str, bytes]:
    """Return the files of a golden checkpoint, {"": bytes} of a single one."""
    path = GOLDEN / name
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    return {"" if f == path else str(f.relative_to(path)): f.read_bytes() for f in files}


def reader(name: str, victims: str = ""):
    def case(chance, folder):
        files, kind = dict(contents(name)), chance.random()
        victim = chance.choice([key for key in files if victims in key])
        change = damaged
        if victim.endswith(".swp") and kind < 0.8:
            change = damaged_swap
        elif victim == ".metadata" and kind < 0.6:
            change = damaged_pickle
        elif files[victim][:2] == b"PK" and "distcp" not in victim and kind < 0.7:
            change = damaged_zip
        files[victim] = change(files[victim], chance)
        path = Path(folder, "checkpoint")
        for key, content in files.items():
            target = path / key if key else path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
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


def outcome(number: int, is_raised: bool = False) -> tuple[str, str]:
    """Return subject and outcome of a case, or let what goes wrong through."""
    subject = list(SUBJECTS)[number % len(SUBJECTS)]
    begin, mib = time.process_time(), _peak_mib()
    folder = tempfile.mkdtemp(prefix="zero8-mutations-")
    try:
        result = SUBJECTS[subject](random.Random(number), folder)
    except Exception as error:
        if is_raised:
            raise
        result = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    if (seconds := time.process_time() - begin) > MAX_SECONDS:
        result = f"took {seconds:.1f} s: {result}"
    if (taken := _peak_mib() - mib) > MAX_MIB:
        result = f"took {taken} MiB: {result}"
    return subject, result[:300]


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def work(numbers: range) -> None:
    """Print a line of JSON before and after each case: its number, and what became of it."""
    torch.set_num_threads(1)
    for make in (plain_optimizer, zero_optimizer):  # loads the op, which is nobody's case
        load_and_step(make, saved_state(make))
    for number in numbers:
        print(json.dumps([number]), flush=True)
        print(json.dumps([number, *outcome(number)]), flush=True)
