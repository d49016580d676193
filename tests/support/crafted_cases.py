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

from zero8.checkpoint.read.open import open_checkpoint

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


"""Of a piece: as many elements as there are in the file."""


PLAIN = {
    "os.system": lambda: saved(call("os", "system", value("touch ran"))),
    "a module of this process": lambda: saved(call("side_effect", "run")),
    "a class by NEWOBJ": lambda: saved(named("side_effect", "Runs") + EMPTY_TUPLE + NEWOBJ),
    "an attribute of a class": lambda: saved(
        named("collections", "OrderedDict")
        + tuple_of(value({}), value({"changed": 1}))
        + BUILD
    ),
    "a dict in itself": lambda: saved(b"}q\0" + value("state") + b"h\0s"),
    "laughs for a step": lambda: with_entry("step", laughs()),
    "a step of NaN": lambda: with_entry("step", value(float("nan"))),
    "a step of -1": lambda: with_entry("step", value(-1)),
    "moments of other lengths": lambda: with_entry("exp_avg", tensor(floats(), [255], [1])),
    "format of floats": lambda: with_codes("format", tensor(floats(), [7], [1])),
    "codes of floats": lambda: with_codes("exp_avg_q8", tensor(floats(), [4, 64], [64, 1])),
    "a correction of another length": lambda: with_codes(
        "param_correction", tensor(storage("CharStorage", "0", 8), [8], [1])
    ),
    "history of NaN": lambda: with_codes("history", value(float("nan"))),
    "history of 71 bits": lambda: with_codes("history", value(2**70)),
    "states in a list": lambda: saved(value({"state": [1], "param_groups": []})),
    "groups without params": lambda: saved(
        value({"state": {0: {"step": 1}}, "param_groups": [{}]})
    ),
    "empty": lambda: b"",
    "a bare pickle": lambda: b"\x80\x02" + call("os", "system", value("touch ran")) + STOP,
}  # fmt: skip


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
    "a file of a number": lambda: metadata(places=[place("state.p.exp_avg", file=3)]),
    "a file that is not there": lambda: metadata(places=[place("state.p.exp_avg", file="x")]),
    "a pipe for a file": lambda: metadata(places=[place("state.p.exp_avg", file="pipe")]),
    "a negative offset": lambda: metadata(places=[place("state.p.exp_avg", begin=-1)]),
    "a length beyond": lambda: metadata(places=[place("state.p.exp_avg", length=2**36)]),
    "compressed": lambda: metadata(
        places=[place("state.p.exp_avg", transform_descriptors=["zstd"])]
    ),
    "no place": lambda: metadata(places=[]),
    "another shape": lambda: metadata(size=(64, 4), chunks=list_of(chunk((0, 0), (64, 4)))),
    "chunks that overlap": lambda: metadata(
        size=(6, 64), chunks=list_of(chunk((0, 0), (4, 64)), chunk((3, 0), (2, 64)))
    ),
    "chunks that are not all": lambda: metadata(size=(5, 64)),
    "one column of 2^40 rows": lambda: metadata(
        size=(HUGE, 2),
        chunks=list_of(chunk((0, 0), (HUGE, 1)), chunk((0, 1), (HUGE, 1))),
        places=[place("state.p.exp_avg"), place("state.p.exp_avg", (0, 1))],
    ),
    "a key of 10^6 characters": lambda: metadata(key="state." * 170_000),
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


FOLDERS_OF_ZERO = {
    "latest not there": latest(b"global_step3"),
    "tags for ever": tags_for_ever,
    "nothing": Path.mkdir,
    "a pipe of states": states(os.mkfifo),
    "a link to a device": states(lambda path: path.symlink_to("/dev/zero")),
}  # fmt: skip


# --- The process that reads ----------------------------------------------------------------------


def file_of_rank(path: Path, data: bytes) -> None:
    path.mkdir()
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(data)


WRITTEN = {
    "plain": (PLAIN, Path.write_bytes),
    "ZeRO": ({"none of ZeRO's": lambda: saved(value({"x": 1}))}, file_of_rank),
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
