# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ZeRO with pickles that run code or take for ever, for `universal`.

DeepSpeed's converter unpickles every file, so zero8 must look at all of them first, and at the same
pickle that torch will load: torch decides by a file's first four bytes whether it is a zip, where
Python's zipfile looks at its end, and torch's reader looks up records without regard to case.

Where data become objects again, other attacks begin: the hash or the text of lists in lists in
lists takes for ever, and so can a regular expression; an attribute can take a method's place.
"""

import io
import sys
import types
import zipfile
from pathlib import Path

import torch
from attack import Attack, checkpoint, main, outside
from crafted_files import MARK, STOP, built, call, list_of, tuple_of, value

RANKS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
MODEL = "mp_rank_00_model_states.pt"
DEPTH = 60
CATASTROPHIC = "(([a-z])+.)+[A-Z]([a-z])+$"
"""A regular expression whose search takes a time of 2^letters."""


def running(folder: Path) -> bytes:
    """Return a pickle that makes a file in the folder that must not change."""
    return b"\x80\x02" + call("os", "system", value(f"touch {outside(folder).parent}/ran")) + STOP


def rezipped(data: bytes, records: dict[str, bytes]) -> bytes:
    """Return a file of torch.save with records replaced, or added after the others."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in (found | records).items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


def spoiled(folder: Path, path: Path) -> bytes:
    """Return the file whose pickle runs code."""
    return rezipped(path.read_bytes(), {"data.pkl": running(folder)})


def polyglot(folder: Path, path: Path) -> bytes:
    return running(folder) + path.read_bytes()


def other_case(folder: Path, path: Path) -> bytes:
    """Return the file with a second pickle, DATA.PKL, and as many others as make torch find it."""
    data = path.read_bytes()
    for count in range(16):
        others = {f"other{number}": b"" for number in range(count)}
        harmless = rezipped(data, {**others, "DATA.PKL": b"\x80\x02" + value("found") + STOP})
        if torch.load(io.BytesIO(harmless), weights_only=False) == "found":
            break
    return rezipped(data, {**others, "DATA.PKL": running(folder)})


def of_unknown_class(folder: Path, path: Path) -> bytes:
    """Return the file with an object of a class that no installed module has."""
    module = types.ModuleType("not_installed")
    module.Client = type("Client", (), {"__module__": module.__name__})
    sys.modules[module.__name__] = module
    held = torch.load(path, weights_only=False)
    data = io.BytesIO()
    torch.save({**held, "client_state": module.Client()}, data)
    del sys.modules[module.__name__]
    return data.getvalue()


def doubled(of_two) -> bytes:
    """Return tuples or lists in each other, each of which holds the next one twice."""
    nested = value(1)
    for number in map(bytes, zip(range(DEPTH), strict=True)):
        nested = of_two(nested + b"q" + number, b"h" + number)
    return nested


def set_of_tuples() -> bytes:
    return b"\x8f" + MARK + doubled(tuple_of) + b"\x90"  # EMPTY_SET and ADDITEMS


def stage_of_lists() -> bytes:
    return call("deepspeed.runtime.zero.config", "ZeroStageEnum", doubled(list_of))


def with_method() -> bytes:
    return built("argparse", "Namespace", value({"__reduce_ex__": 1}))


def with_entry(content: bytes):
    """Return what adds an entry to a file's dict, which ends its pickle."""

    def spoil(_: Path, path: Path) -> bytes:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            data = archive.read(name).removesuffix(STOP)
        entry = value("more") + content + b"s"
        return rezipped(path.read_bytes(), {"data.pkl": data + entry + STOP})

    return spoil


def with_pattern(_: Path, path: Path) -> bytes:
    """Return the file with a regular expression, in which parameters have names of 60 letters."""
    from universal_files import change

    def rename(held: dict) -> None:
        states = held.get("optimizer_state_dict", {})
        for names in held.get("param_shapes", []) + states.get("param_slice_mappings", []):
            for name in [*names]:
                names[name * 10] = names.pop(name)

    for one in path.parent.glob("*.pt"):
        change(one, rename)
    patterns = {"tp_replicated_parameter_patterns": [CATASTROPHIC]}
    change(path, lambda held: held.update(universal_checkpoint_info=patterns))
    return path.read_bytes()


def in_file(name: str, spoil):
    """Return what makes a checkpoint of ZeRO-2 on two ranks and spoils one of its files."""

    def plant(folder: Path) -> list[str]:
        # Imports DeepSpeed, which takes seconds.
        from universal_files import write

        outside(folder)
        path = write(folder / "tags") / name
        path.write_bytes(spoil(folder, path))
        return checkpoint("universal", folder / "tags", "--workers", 1)

    return plant


ATTACKS = (
    *(
        Attack(f"os.system in {name}", in_file(name, spoiled), (1,), (name, ".system"))
        for name in (*RANKS, MODEL)
    ),
    *(
        Attack(f"{what} in {name}", in_file(name, spoil), (1,), (name,))
        for what, spoil in (
            ("legacy pickle before the zip", polyglot),
            ("DATA.PKL beside data.pkl", other_case),
        )
        for name in (RANKS[1], MODEL)
    ),
    *(
        Attack(f"unknown class in {name}", in_file(name, of_unknown_class), (1,), ("--trust",))
        for name in (RANKS[1], MODEL)
    ),
    Attack(
        "tuples in tuples in a set", in_file(MODEL, with_entry(set_of_tuples())), (1,), (MODEL,)
    ),
    Attack(
        "lists in lists as a stage", in_file(MODEL, with_entry(stage_of_lists())), (1,), (MODEL,)
    ),
    Attack(
        "attribute that is a method",
        in_file(MODEL, with_entry(with_method())),
        (1,),
        (MODEL, "attributes that a Namespace does not have"),
    ),
    Attack("catastrophic pattern", in_file(MODEL, with_pattern), (1,), (MODEL, "--trust")),
)

if __name__ == "__main__":
    main(ATTACKS)
