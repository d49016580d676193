# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that make `universal` and `convert --to zero` leave their folders.

A universal checkpoint has a folder for each parameter, called as the parameter is, so a parameter
called ../../x has one elsewhere.  `universal` works in a hidden folder beside its target, which
somebody can have put there before, as a link or with one in the place of its lock.  The file
`latest` can name a tag behind a link, beside which the target would be.  DeepSpeed's converter
reads files of experts by a number that the file itself gives, which can be a path.
"""

from collections import OrderedDict
from pathlib import Path

import torch
from attack import OUTSIDE, Attack, checkpoint, made, main, outside
from crafted_files import call, saved, value

EVIL = f"{'../' * 4}{OUTSIDE}/evil"
NAMES = [EVIL, "/tmp/evil", ".."]
MODEL = "mp_rank_00_model_states.pt"
EXPERT = f"_expert_0_{MODEL}"
NO_NAME, NO_LIST = "which cannot name a folder", "that is not a list"


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


def in_the_module(folder: Path) -> list[str]:
    from universal_files import change

    outside(folder)
    line = universal(folder)
    added = {EVIL: torch.ones(1)}
    change(folder / "tags" / "saved" / MODEL, lambda held: held["module"].update(added))
    return line


def in_a_tuple(key: str):
    """Return what renames a parameter in all groups of a key, and makes a tuple of their list."""

    def make_tuple(held: dict) -> None:
        states = held.get("optimizer_state_dict", held)
        for names in states.get(key, ()):
            if "first" in names:
                names[EVIL] = names.pop("first")
        if key in states:
            states[key] = tuple(states[key])

    def plant(folder: Path) -> list[str]:
        from universal_files import change

        outside(folder)
        line = universal(folder)
        for path in (folder / "tags" / "saved").glob("*.pt"):
            change(path, make_tuple)
        return line

    return plant


def tag_behind_link(folder: Path) -> list[str]:
    from universal_files import write

    write(folder / OUTSIDE)
    (folder / OUTSIDE / "latest_universal").write_text("precious")
    (made(folder / "tags") / "in").symlink_to(folder / OUTSIDE)
    (folder / "tags" / "latest").write_text("in/saved")
    return checkpoint("universal", folder / "tags", "--workers", 1)


def file_of_experts(folder: Path) -> list[str]:
    """Return the command on a checkpoint whose experts are in another folder's file that runs code.

    A "parameter" makes the folder by which the path leads there.
    """
    from universal_files import change

    layer = dict.fromkeys(("num_experts", "num_local_experts", "ep_size", "top_k", "version"), 1)
    layer |= {"module_path": "m", "expert_key_prefix": "m.experts", "ep_rank": 0}
    layer["moe_layer_id"] = "a/../../../other/evil"
    weights = [f"m.experts.{name}" for name in ("w1", "w2", "w3")]

    def lead(held: dict) -> None:
        held["ds_autoep_layers"] = [layer]
        held["ds_config"]["use_data_before_expert_parallelism"] = False
        held["param_shapes"][0].update((name, torch.Size([1, 1])) for name in weights)
        held["module"]["../../checked/layer_a"] = torch.ones(1)

    runs = saved(call("os", "system", value(f"touch {outside(folder).parent}/ran")))
    line = universal(folder)
    change(folder / "tags" / "saved" / MODEL, lead)
    torch.save({f"{weights[0]}.0": torch.ones(1)}, folder / "tags" / "saved" / f"layer_0{EXPERT}")
    (made(folder / "tags" / "other") / f"evil{EXPERT}").write_bytes(runs)
    return line


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
        Attack(f"{what} {name}", plant(name), (1,), (NO_NAME,))
        for what, plant in (
            ("universal of a parameter", parameter_of_zero),
            ("convert of a parameter", parameter_to_convert),
        )
        for name in NAMES
    ),
    Attack("universal of a key of the module", in_the_module, (1,), (NO_NAME,)),
    *(
        Attack(f"parameter in a tuple of {key}", in_a_tuple(key), (1,), (key, NO_LIST))
        for key in ("param_shapes", "param_slice_mappings")
    ),
    Attack("tag behind a link", tag_behind_link, (1,), ("in/saved",)),
    Attack("file of experts", file_of_experts, (1,), ("ds_autoep_layers", "--trust")),
    Attack("link in place of the hidden folder", linked_workplace, (1,), ("symbolic link",)),
    Attack("link in place of its lock", linked_lock, (1,), ("symbolic link", "lock")),
)

if __name__ == "__main__":
    main(ATTACKS)
