# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ZeRO with pickles that run code, for `zero8 checkpoint universal`.

DeepSpeed's converter unpickles every file, so zero8 must look at all of them first, and at the same
pickle that torch will load: torch decides by a file's first four bytes whether it is a zip, where
Python's zipfile looks at its end, and torch's reader looks up records without regard to case.
"""

import io
import sys
import types
import zipfile
from pathlib import Path

import torch
from attack import Attack, checkpoint, main, outside
from crafted_files import STOP, call, value

RANKS = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
MODEL = "mp_rank_00_model_states.pt"


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
)

if __name__ == "__main__":
    main(ATTACKS)
