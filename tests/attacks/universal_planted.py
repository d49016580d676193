# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that make `universal` and `convert --to zero` write outside of their target.

A universal checkpoint has a folder for each parameter, called as the parameter is, so a parameter
called ../../x has one elsewhere.  `universal` works in a hidden folder beside its target, which
somebody can have put there before, as a link or with one in the place of its lock.
"""

from collections import OrderedDict
from pathlib import Path

import torch
from attack import OUTSIDE, Attack, checkpoint, main, outside

NAMES = [f"{'../' * 6}{OUTSIDE}/evil", "/tmp/evil", ".."]


def universal(folder: Path) -> list[str]:
    """Return the command on a new checkpoint of ZeRO-2, for which DeepSpeed is imported."""
    from universal_files import write

    write(folder / "tags")
    return checkpoint("universal", folder / "tags", "--workers", 1)


def parameter_of_zero(name: str):
    def plant(folder: Path) -> list[str]:
        from universal_files import change

        def renamed(found: OrderedDict) -> None:
            found[name] = found.pop("first")

        outside(folder)
        line = universal(folder)
        for path in sorted((folder / "tags" / "saved").glob("*.pt")):
            change(path, lambda held: [renamed(shapes) for shapes in _places(held)])
        return line

    return plant


def _places(held: dict) -> list[OrderedDict]:
    """Return what of a file of DeepSpeed's names parameters as keys."""
    states = held.get("optimizer_state_dict", {})
    found = held.get("param_shapes", []) + states.get("param_slice_mappings", [])
    return [names for names in found if "first" in names]


def parameter_to_convert(name: str):
    def plant(folder: Path) -> list[str]:
        outside(folder)
        moments = {which: torch.ones(4, 64) for which in ("exp_avg", "exp_avg_sq")}
        group = {"params": [0], "param_names": [name]}
        optimizer = {"state": {0: {"step": 1, **moments}}, "param_groups": [group]}
        content = {"model": {name: torch.ones(4, 64)}, "optimizer": optimizer}
        torch.save(content, folder / "plain.pt")
        return checkpoint("convert", folder / "plain.pt", folder / "made", "--to", "zero")

    return plant


def linked_workplace(folder: Path) -> list[str]:
    precious, line = outside(folder), universal(folder)
    (folder / "tags" / ".saved_universal.unfinished").symlink_to(precious.parent)
    return line


def linked_lock(folder: Path) -> list[str]:
    precious, line = outside(folder), universal(folder)
    (folder / "tags" / ".saved_universal.unfinished").mkdir()
    (folder / "tags" / ".saved_universal.unfinished" / "lock").symlink_to(precious)
    return line


ATTACKS = (
    *(
        Attack(f"{what} {name}", plant(name), (1,), ("which is no name of a folder",))
        for what, plant in (
            ("universal of a parameter", parameter_of_zero),
            ("convert of a parameter", parameter_to_convert),
        )
        for name in NAMES
    ),
    Attack("link in place of the hidden folder", linked_workplace, (1,), ("symbolic link",)),
    Attack("link in place of its lock", linked_lock, (1,), ("symbolic link", "lock")),
)

if __name__ == "__main__":
    main(ATTACKS)
