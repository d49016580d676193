# SPDX-License-Identifier: Apache-2.0
"""Files made to harm whoever reads them; a function reads them all, and says how it went."""

import json
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch
import xxhash
from crafted_files import (
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    STOP,
    built,
    call,
    dict_of,
    list_of,
    named,
    saved,
    state_dict,
    storage,
    tensor,
    tuple_of,
    value,
)
from fragments import fragments_in
from places import GOLDEN

from zero8.checkpoint.read.open import open_checkpoint
from zero8.deepspeed.moment_tensor import BUFFERS, HEADER
from zero8.deepspeed.swap_file import hash_of

DCP = "torch.distributed.checkpoint"
RECORD = {"0": bytes(1024)}
HUGE = 2**40


# --- Files of torch.save -------------------------------------------------------------------------


def floats(numel=256, key="0"):
    return storage("FloatStorage", key, numel)


def with_moments(make) -> bytes:
    """Return a file with a state of Adam whose moments `make` returns."""
    entries = {"step": value(1), "exp_avg": make, "exp_avg_sq": make}
    return saved(state_dict(dict_of(entries)), RECORD)


def with_entry(key: str, content: bytes) -> bytes:
    """Return a file with a good state of Adam but for one entry."""
    good = tensor(floats(), [256], [1])
    entries = {"step": value(1), "exp_avg": good, "exp_avg_sq": good, key: content}
    return saved(state_dict(dict_of(entries)), RECORD)


def with_codes(key: str, content: bytes) -> bytes:
    """Return a file with a state of ours, but for one entry."""
    longs = storage("LongStorage", "1", 7)
    header = struct.pack("<7q", 1, 1, 0x0404, 256, 1, 4, 256)
    codes = tensor(storage("ByteStorage", "0", 1024), [4, 256], [256, 1])
    scales = tensor(storage("FloatStorage", "2", 4), [4, 1], [1, 1])
    ranges = tensor(storage("FloatStorage", "4", 8), [4, 1, 2], [2, 2, 1])
    entries = {
        "step": value(1),
        "history": value(1.0),
        "format": tensor(longs, [7], [1]),
        "exp_avg_q8": codes,
        "exp_avg_sq_q8": codes,
        "exp_avg_scale": scales,
        "exp_avg_sq_scale": ranges,
        key: content,
    }
    records = {"0": bytes(1024), "1": header, "2": bytes(16), "3": bytes(2**20), "4": bytes(32)}
    return saved(state_dict(dict_of(entries)), records)


def laughs() -> bytes:
    """Return lists in lists: 2^100 items, in 300 bytes."""
    content = value("ha") + b"q\0"
    for number in range(1, 30):
        content += b"0" + EMPTY_LIST + MARK + (b"h" + bytes([number - 1])) * 10 + b"e"
        content += b"q" + bytes([number])
    return content


FITTING = {"shape": [4, 64], "numel": 256}
"""Of a piece: as many elements as there are in the file."""


def moment(**changes) -> bytes:
    """Return a file of a ZeRO rank, in whose description something is something else."""
    made = made_moment(**changes)
    return zero_file(dict_of({"exp_avg": made, "exp_avg_sq": made_moment(), "step": value(1)}))


def made_moment(scales=(0,), **changes) -> bytes:
    """Return a pickled moment, in whose description something is something else."""
    piece = {
        "name": "p",
        "identity": 1,
        "shape": [4, 256],
        "first": 0,
        "start": 0,
        "numel": 1024,
        "block_size": 0,
    }
    pieces = changes.pop("pieces", None)
    described = {"version": 1, "algorithm": "adam", "codec": 4, "which": "exp_avg", "numel": 1024}
    for key in piece:
        if key in changes:
            piece[key] = changes.pop(key)
    described |= {"written": False, "hash": xxhash.xxh3_64_intdigest(bytes(1024))}
    content = {key: value(x) for key, x in described.items()} | changes
    items = {key: x if isinstance(x, bytes) else value(x) for key, x in piece.items()}
    content["pieces"] = list_of(dict_of(items)) if pieces is None else pieces
    codes = tensor(storage("ByteStorage", "1", 0), [0], [1])
    scales = tensor(storage("FloatStorage", "2", 0), list(scales), [1] * len(scales))
    return pickled(dict_of(content), codes, scales, tensor(floats(), [256], [1]))


def pickled(header: bytes, *buffers: bytes) -> bytes:
    """Return a dict that is read as a moment."""
    return dict_of(dict(zip((HEADER, *BUFFERS), (header, *buffers), strict=True)))


def with_first_moment(**moments: bytes) -> bytes:
    """Return a file of a ZeRO rank with a first moment, and others, that are well formed."""
    return zero_file(dict_of({"exp_avg": made_moment(**FITTING), "step": value(1), **moments}))


def second_moment(**changes) -> bytes:
    return made_moment(**{"scales": (0, 2), "which": value("exp_avg_sq"), **FITTING, **changes})


def zero_file(state: bytes) -> bytes:
    states = dict_of({"state": dict_of({0: state}), "param_groups": value([{}])})
    weights = list_of(tensor(floats(), [256], [1]))
    inner = {"base_optimizer_state": states, "single_partition_of_fp32_groups": weights}
    records = {"0": bytes(1024), "1": b"", "2": b""}
    return saved(dict_of({"optimizer_state_dict": dict_of(inner)}), records)


def claiming(num_bytes: int) -> bytes:
    """Return a zip whose last entry says that it is longer than the file."""
    data = saved(value({}))
    at = data.rfind(b"PK\1\2")
    sizes = struct.pack("<II", num_bytes, num_bytes)
    return data[: at + 20] + sizes + data[at + 28 :]


def number_of(bits: int) -> bytes:
    count = bits // 8
    return b"\x8b" + struct.pack("<i", count) + bytes(count - 1) + b"\x01"


ORDERED = call("collections", "OrderedDict")
META = (named("torch", "float32"), value((HUGE,)), value((1,)), value(False))
QUANTIZED = tuple_of(named("torch", "per_tensor_affine"), value(0.1), value(0))
SPARSE = named("torch", "sparse_coo"), tuple_of(value(0), value(0), value((HUGE, HUGE)))
VIEW = (value(0), value((4,)), value((1,)), value(False))
PLAIN = {
    "os.system": lambda: saved(call("os", "system", value("touch ran"))),
    "eval": lambda: saved(call("builtins", "eval", value("open('ran', 'w')"))),
    "a module of this process": lambda: saved(call("side_effect", "run")),
    "a class by NEWOBJ": lambda: saved(named("side_effect", "Runs") + EMPTY_TUPLE + NEWOBJ),
    "getattr": lambda: saved(call("builtins", "getattr", named("os", "path"), value("os"))),
    "an attribute of a class": lambda: saved(
        named("collections", "OrderedDict")
        + tuple_of(value({}), value({"changed": 1}))
        + BUILD
    ),
    "an attribute of a function": lambda: saved(
        named("torch._utils", "_rebuild_tensor_v2")
        + tuple_of(value({}), value({"changed": 1}))
        + BUILD
    ),
    "set_ by BUILD": lambda: saved(
        tensor(floats(), [4], [1])
        + tuple_of(floats(), value(0), value((2**30,)), value((1,)))
        + BUILD,
        RECORD,
    ),
    "a size beyond": lambda: with_moments(tensor(floats(), [2**28], [1])),
    "a stride beyond": lambda: with_moments(tensor(floats(), [2, 2], [2**30, 1])),
    "an offset beyond": lambda: with_moments(tensor(floats(), [4], [1], 253)),
    "a negative offset": lambda: with_moments(tensor(floats(), [4], [1], -1)),
    "a storage that is not there": lambda: with_moments(tensor(floats(4, "9"), [4], [1])),
    "meta": lambda: with_moments(call("torch._utils", "_rebuild_meta_tensor_no_storage", *META)),
    "quantized": lambda: with_moments(
        call("torch._utils", "_rebuild_qtensor", floats(), *VIEW[:3], QUANTIZED, VIEW[3], ORDERED)
    ),
    "sparse": lambda: with_moments(call("torch._utils", "_rebuild_sparse_tensor", *SPARSE)),
    "a subclass of Tensor": lambda: with_moments(
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            named("side_effect", "run"),
            named("side_effect", "Runs"),
            EMPTY_TUPLE,
            EMPTY_DICT,
        )
    ),
    "nested lists": lambda: saved(state_dict(dict_of({"step": b"]" * 200_000 + b"a" * 199_999}))),
    "a list in itself": lambda: with_entry("step", b"]q\0h\0a"),
    "a dict in itself": lambda: saved(b"}q\0" + value("state") + b"h\0s"),
    "laughs for a step": lambda: with_entry("step", laughs()),
    "laughs for a moment": lambda: with_entry("exp_avg", laughs()),
    "laughs for all": lambda: saved(laughs()),
    "a step of 10^5 digits": lambda: with_entry("step", number_of(330_000)),
    "a step of NaN": lambda: with_entry("step", value(float("nan"))),
    "a step of -1": lambda: with_entry("step", value(-1)),
    "no step": lambda: with_entry("step", value(None)),
    "a moment of text": lambda: with_entry("exp_avg", value("x")),
    "moments of other lengths": lambda: with_entry("exp_avg", tensor(floats(), [255], [1])),
    "format of many sizes": lambda: with_codes(
        "format", tensor(storage("LongStorage", "3", 2**17), [2**17], [1])
    ),
    "format of floats": lambda: with_codes("format", tensor(floats(), [7], [1])),
    "codes of floats": lambda: with_codes("exp_avg_q8", tensor(floats(), [4, 64], [64, 1])),
    "a correction of another length": lambda: with_codes(
        "param_correction", tensor(storage("CharStorage", "0", 8), [8], [1])
    ),
    "history of laughs": lambda: with_codes("history", laughs()),
    "history of NaN": lambda: with_codes("history", value(float("nan"))),
    "states in a list": lambda: saved(value({"state": [1], "param_groups": []})),
    "a state that is no dict": lambda: saved(value({"state": {0: 1}, "param_groups": []})),
    "groups without params": lambda: saved(
        value({"state": {0: {"step": 1}}, "param_groups": [{}]})
    ),
    "no data.pkl": lambda: b"dada.pkl".join(saved(value({})).rsplit(b"data.pkl", 1)),
    "an entry beyond": lambda: claiming(2**31),
    "a zip of nothing": lambda: b"PK\5\6" + bytes(18),
    "empty": lambda: b"",
    "a bare pickle": lambda: b"\x80\x02" + call("os", "system", value("touch ran")) + STOP,
}  # fmt: skip
ZERO = {
    "a version of laughs": lambda: moment(version=laughs()),
    "version 4": lambda: moment(version=value(4)),
    "a name of nested tuples": lambda: moment(name=b"N" + b"\x85" * 100_000),
    "a shape of laughs": lambda: moment(shape=laughs()),
    "a shape of 10^5 sizes": lambda: moment(shape=[2**48] * 10**5),
    "2^48 elements": lambda: moment(shape=[2**24, 2**24], **{"numel": 2**48}),
    "pieces that are numbers": lambda: moment(pieces=value([1, 2])),
    "a hash of -1": lambda: moment(**FITTING, hash=value(-1)),
    "another hash": lambda: moment(**FITTING, hash=value(1)),
    "one moment alone": with_first_moment,
    "one moment twice": lambda: with_first_moment(exp_avg_sq=made_moment(**FITTING)),
    "moments of other elements": lambda: with_first_moment(
        exp_avg_sq=second_moment(shape=[8, 64], first=64)
    ),
    "moments of two codecs": lambda: with_first_moment(
        exp_avg_sq=second_moment(codec=value(1), scales=(0,))
    ),
    "codes that are a number": lambda: zero_file(dict_of({"exp_avg": pickled(*[value(1)] * 4)})),
    "a state of a tensor": lambda: zero_file(tensor(floats(), [256], [1])),
    "a state of laughs": lambda: zero_file(laughs()),
    "none of ZeRO's": lambda: saved(value({"x": 1})),
}


# --- Folders of torch.distributed.checkpoint -----------------------------------------------------


def chunk(offsets, sizes):
    content = {"offsets": value(tuple(offsets)), "sizes": value(tuple(sizes))}
    return built(f"{DCP}.metadata", "ChunkStorageMetadata", dict_of(content))


def place(key, offset=(0, 0), file="__0_0.distcp", begin=0, length=None, **others):
    index = {"fqn": value(key), "offset": value(offset), "index": value(0)}
    length = LENGTH if length is None else length
    info = {"relative_path": file, "offset": begin, "length": length, **others}
    info = {name: x if isinstance(x, bytes) else value(x) for name, x in info.items()}
    return (
        built(f"{DCP}.metadata", "MetadataIndex", dict_of(index)),
        built(f"{DCP}.filesystem", "_StorageInfo", dict_of(info)),
    )


def metadata(
    size=(4, 64), chunks=None, places=None, key="state.p.exp_avg", dtype="float32"
) -> bytes:
    properties = named(f"{DCP}.metadata", "TensorProperties") + EMPTY_TUPLE + NEWOBJ
    layout = call("torch.serialization", "_get_layout", value("torch.strided"))
    memory = call(f"{DCP}.metadata", "_MEM_FORMAT_ENCODING", value(0))
    no = value(False)
    properties += tuple_of(named("torch", dtype), layout, no, memory, no) + BUILD
    chunks = list_of(chunk((0, 0), (4, 64))) if chunks is None else chunks
    entry = {"properties": properties, "size": value(tuple(size)), "chunks": chunks}
    whole = {"properties": properties, "size": value((4, 64))}
    whole["chunks"] = list_of(chunk((0, 0), (4, 64)))
    tensors = {"state.p.exp_avg_sq": whole, key: entry}
    content = {
        name: built(f"{DCP}.metadata", "TensorStorageMetadata", dict_of(one))
        for name, one in tensors.items()
    }
    step = named(f"{DCP}.metadata", "BytesStorageMetadata") + EMPTY_TUPLE + NEWOBJ
    content["state.p.step"] = step
    places = [place("state.p.exp_avg")] if places is None else places
    places += [place("state.p.exp_avg_sq")]
    places += [place("state.p.step", None, "step.distcp", length=len(STEP))]
    where = EMPTY_DICT + MARK + b"".join(a + b for a, b in places) + b"u"
    whole = {"state_dict_metadata": dict_of(content), "storage_data": where}
    return b"\x80\x04" + built(f"{DCP}.metadata", "Metadata", dict_of(whole)) + STOP


STEP = saved(value(7))


CHUNK = saved(tensor(floats(), [4, 64], [64, 1]), RECORD)
LENGTH = len(CHUNK)
DCP_FOLDERS = {
    "os.system": lambda: b"\x80\x04" + call("os", "system", value("touch ran")) + STOP,
    "a module of this process": lambda: b"\x80\x04" + call("side_effect", "run") + STOP,
    "an attribute of a class of torch's": lambda: (
        b"\x80\x04"
        + named(f"{DCP}.metadata", "Metadata")
        + tuple_of(value({}), value({"changed": 1}))
        + BUILD
        + STOP
    ),
    "a file above": lambda: metadata(places=[place("state.p.exp_avg", file="../x.distcp")]),
    "the folder above": lambda: metadata(places=[place("state.p.exp_avg", file="..")]),
    "a file of a number": lambda: metadata(places=[place("state.p.exp_avg", file=3)]),
    "a file that is not there": lambda: metadata(places=[place("state.p.exp_avg", file="x")]),
    "a folder for a file": lambda: metadata(places=[place("state.p.exp_avg", file="folder")]),
    "a pipe for a file": lambda: metadata(places=[place("state.p.exp_avg", file="pipe")]),
    "a negative offset": lambda: metadata(places=[place("state.p.exp_avg", begin=-1)]),
    "a length beyond": lambda: metadata(places=[place("state.p.exp_avg", length=2**36)]),
    "an offset beyond": lambda: metadata(places=[place("state.p.exp_avg", begin=2**61)]),
    "compressed": lambda: metadata(
        places=[place("state.p.exp_avg", transform_descriptors=["zstd"])]
    ),
    "no place": lambda: metadata(places=[]),
    "another dtype": lambda: metadata(dtype="float64"),
    "another shape": lambda: metadata(size=(64, 4), chunks=list_of(chunk((0, 0), (64, 4)))),
    "chunks that overlap": lambda: metadata(
        size=(6, 64), chunks=list_of(chunk((0, 0), (4, 64)), chunk((3, 0), (2, 64)))
    ),
    "chunks that are not all": lambda: metadata(size=(5, 64)),
    "a chunk outside": lambda: metadata(chunks=list_of(chunk((1, 0), (4, 64)))),
    "a chunk of other dimensions": lambda: metadata(chunks=list_of(chunk((0,), (256,)))),
    "one column of 2^40 rows": lambda: metadata(
        size=(HUGE, 2),
        chunks=list_of(chunk((0, 0), (HUGE, 1)), chunk((0, 1), (HUGE, 1))),
        places=[place("state.p.exp_avg"), place("state.p.exp_avg", (0, 1))],
    ),
    "negative sizes": lambda: metadata(size=(-4, -64), chunks=list_of(chunk((0, 0), (-4, -64)))),
    "sizes of laughs": lambda: metadata(chunks=laughs()),
    "a key of 10^6 characters": lambda: metadata(key="state." * 170_000),
    "keys of anything": lambda: metadata(key=3),
    "empty": lambda: b"",
    "another object": lambda: b"\x80\x04" + value({}) + STOP,
}  # fmt: skip


def dcp_folder(path: Path, data: bytes) -> None:
    path.mkdir()
    (path / ".metadata").write_bytes(data)
    (path / "__0_0.distcp").write_bytes(CHUNK)
    (path / "step.distcp").write_bytes(STEP)
    (path / "folder").mkdir()
    os.mkfifo(path / "pipe")


# --- Other folders -------------------------------------------------------------------------------


def latest(content: bytes):
    def make(path: Path) -> None:
        (path / "tag").mkdir(parents=True)
        (path / "latest").write_bytes(content)

    return make


def long_latest(path: Path) -> None:
    latest(b"")(path)
    os.truncate(path / "latest", 2**30)


def tags_for_ever(path: Path) -> None:
    path.mkdir()
    (path / "latest").write_text("tag")
    (path / "tag").symlink_to(".")


def states(make):
    """Return what makes something else in the place of the file of a rank."""

    def in_folder(path: Path) -> None:
        path.mkdir()
        make(path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")

    return in_folder


def swap(**changes):
    """Return what makes a folder with a swap file of two empty moments, but for these changes."""

    def make(path: Path) -> None:
        saved = {"step": 1, "history": 1.0, "exp_avg": {}, "exp_avg_sq": {}} | changes
        for which in saved.keys() & {"exp_avg", "exp_avg_sq"}:
            header = {**EMPTY_MOMENT, "which": which, "hash": 0, **saved[which]}
            buffers = torch.empty(0, dtype=torch.uint8), torch.empty(0, 2), torch.empty(0)
            saved[which] = {HEADER: header, **dict(zip(BUFFERS, buffers, strict=True))}
        folder = path / "offloaded_tensors" / "rank0"
        folder.mkdir(parents=True)
        torch.save(saved | {"hash": hash_of(saved)}, folder / "zero8-1.tensor.swp")
        good = GOLDEN / "zero3_checkpoint" / "step3"
        name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        (path / name).write_bytes((good / name).read_bytes())

    return make


EMPTY_MOMENT = {"version": 1, "algorithm": "adam", "codec": 4, "numel": 0, "pieces": []}
HUGE = {"numel": 2**48, "pieces": [
    {"name": "p", "identity": 1, "shape": [2**24, 2**24], "first": 0, "start": 0,
     "numel": 2**48, "block_size": 256}]}  # fmt: skip


FOLDERS_OF_ZERO = {
    "latest of itself": latest(b"."),
    "latest not there": latest(b"global_step3"),
    "latest of a folder without anything": latest(b"tag"),
    "latest of 1 GiB": long_latest,
    "tags for ever": tags_for_ever,
    "nothing": Path.mkdir,
    "a pipe of states": states(os.mkfifo),
    "a folder of states": states(Path.mkdir),
    "a link to a device": states(lambda path: path.symlink_to("/dev/zero")),
    "a link to nowhere": states(lambda path: path.symlink_to("/nowhere")),
    "swap: a step of -1": swap(step=-1),
    "swap: a history of NaN": swap(history=float("nan")),
    "swap: one moment is a number": swap(exp_avg_sq={"numel": "two"}),
    "swap: 2^48 elements": swap(exp_avg=HUGE, exp_avg_sq=HUGE),
}  # fmt: skip


# --- The process that reads ----------------------------------------------------------------------


def file_of_rank(path: Path, data: bytes) -> None:
    path.mkdir()
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(data)


WRITTEN = {
    "plain": (PLAIN, Path.write_bytes),
    "ZeRO": (ZERO, file_of_rank),
    "DCP": (DCP_FOLDERS, dcp_folder),
}
CASES = {
    f"{kind}: {name}": lambda path, make=make, write=write: write(path, make())
    for kind, (table, write) in WRITTEN.items()
    for name, make in table.items()
} | {f"folder: {name}": make for name, make in FOLDERS_OF_ZERO.items()}


def read(path: Path) -> None:
    source = open_checkpoint(path)
    source.facts()
    for fragment in fragments_in(source):
        for store in fragment.stores:
            store.check_values()
    source.groups()


def result_of(path: Path) -> dict:
    begin = time.process_time()
    try:
        read(path)
        error = "nothing"
        message = ""
    except Exception as caught:
        error = "ok" if isinstance(caught, ValueError | OSError) else type(caught).__name__
        message = str(caught)
    seconds = time.process_time() - begin
    return {"error": error, "message": message[:2000], "s": seconds}


def work() -> None:
    """Read all cases; print the result of each, as JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("side_effect.py").write_text("open('imported', 'w')\ndef run(*_): open('ran', 'w')\n")
        sys.path.insert(0, folder)
        for number, (case, make) in enumerate(CASES.items()):
            path = Path(folder, f"case{number}")
            make(path)
            result = result_of(path)
            result["names it"] = str(path) in result["message"]
            result["effects"] = [name for name in ("imported", "ran") if Path(name).exists()]
            print(json.dumps([case, result]), flush=True)
