# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that run code, or make `convert --to zero` leave its folder.

A universal checkpoint has a folder for each parameter, called as the parameter is, so a parameter
called ../../x has one elsewhere.  A pickle can stand before the zip, or in a record DATA.PKL beside
data.pkl: torch decides by a file's first four bytes whether it is a zip, and looks up records
without regard to case.
"""

import io
import shutil
import zipfile
from pathlib import Path

import torch
from attack import OUTSIDE, Attack, checkpoint, made, main, outside
from crafted_files import STOP, call, value
from places import GOLDEN

TAG = "step3"
RANK, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


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


def in_its_place(data: bytes, pickle: bytes) -> bytes:
    return rezipped(data, {"data.pkl": pickle})


def before_the_zip(data: bytes, pickle: bytes) -> bytes:
    return pickle + data


def in_other_letters(data: bytes, pickle: bytes) -> bytes:
    return rezipped(data, {"DATA.PKL": pickle})


def in_file(name: str, spoil):
    """Return what copies a checkpoint of ZeRO-2 on two ranks and spoils one of its files."""

    def plant(folder: Path) -> list[str]:
        shutil.copytree(GOLDEN / "zero2_checkpoint", folder / "tags")
        path = folder / "tags" / TAG / name
        path.write_bytes(spoil(path.read_bytes(), running(folder)))
        return checkpoint("convert", folder / "tags", folder / "made", "--to", "zero")

    return plant


def parameter_called(name: str):
    def plant(folder: Path) -> list[str]:
        outside(folder)
        moments = {which: torch.ones(4, 64) for which in ("exp_avg", "exp_avg_sq")}
        group = {"params": [0], "param_names": [name]}
        optimizer = {"state": {0: {"step": 1, **moments}}, "param_groups": [group]}
        content = {"model": {name: torch.ones(4, 64)}, "optimizer": optimizer}
        torch.save(content, folder / "plain.pt")
        return checkpoint("convert", folder / "plain.pt", folder / "made", "--to", "zero")

    return plant


def tag_behind_link(folder: Path) -> list[str]:
    shutil.copytree(GOLDEN / "zero2_checkpoint", folder / OUTSIDE)
    (made(folder / "tags") / "in").symlink_to(folder / OUTSIDE)
    (folder / "tags" / "latest").write_text(f"in/{TAG}")
    return checkpoint("convert", folder / "tags", folder / "made", "--to", "zero")


ATTACKS = (
    *(
        Attack(f"os.system in {name}, {spoil.__name__}", in_file(name, spoil), statuses, says)
        for name in (RANK, MODEL)
        for spoil, statuses, says in (
            (in_its_place, (1,), (name, "os.system")),
            (before_the_zip, (1,), (name,)),
            (in_other_letters, (0, 1), ()),
        )
    ),
    *(
        Attack(f"parameter {name}", parameter_called(name), (1,), ("which cannot name a folder",))
        for name in (f"{'../' * 4}{OUTSIDE}/evil", "/tmp/evil", "..")
    ),
    Attack("tag behind a link", tag_behind_link, (1,), (f"in/{TAG}",)),
)

if __name__ == "__main__":
    main(ATTACKS)
