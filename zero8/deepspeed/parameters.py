# SPDX-License-Identifier: Apache-2.0
"""Compares the parameters that a checkpoint has states of with those that an engine trains.

ZeRO reads weights and states by position: with other parameters, or in another order, they would
become those of others.  A universal checkpoint is read by name, and its frozen weights not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from zero8.deepspeed.layout import loads_states
from zero8.deepspeed.seam import replaced

Shapes = Mapping[str, tuple[int, ...]]
"""Of the parameters of a group, by name, in their order."""


@contextmanager
def compared(engine, options: dict) -> Iterator[None]:
    """Have the engine's load in the block raise ValueError, and change nothing, if they differ."""
    read = engine.checkpoint_engine.load

    def loaded(path, *args, **kwargs):
        content = read(path, *args, **kwargs)
        if isinstance(content, dict) and content.get("param_shapes") and engine.zero_optimization():
            if loads_states(engine, options):
                _check(engine, content)
            elif not engine.has_moe_layers:
                # All weights are in "module". DeepSpeed expects each frozen one here, too, which
                # may not have been frozen then.
                content["frozen_param_fragments"] = None
        return content

    with replaced(engine.checkpoint_engine, "load", loaded):
        yield


def _check(engine, content: dict) -> None:
    is_universal = engine.load_universal_checkpoint()
    sizes = content["mp_world_size"], content["dp_world_size"]
    if sizes[0] != engine.mp_world_size or is_universal and engine.mp_world_size > 1:
        return  # a file has parts of the parameters
    if engine.pipeline_parallelism:
        return  # all stages read the file of one
    if is_universal and (engine.has_moe_layers or content.get("universal_checkpoint_info")):
        return  # DeepSpeed cuts and pads them to other shapes
    if not is_universal and sizes[1] != engine.seq_dp_world_size:
        return  # DeepSpeed refuses it
    got, expected = _shapes(content["param_shapes"]), _shapes(engine._get_zero_param_shapes())
    if is_universal:
        # What the model no longer has is not needed.
        known = set(engine.param_names.values())
        got = [{name: shape for name, shape in group.items() if name in known} for group in got]
        fits = _named(got) == _named(expected)
    else:
        fits = _are_in_order(got, expected)
    if not fits:
        raise ValueError(f"load_checkpoint: {_difference(_named(got), _named(expected))}")


def _shapes(groups: Sequence[Mapping[str, Any]]) -> list[Shapes]:
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _named(groups: Sequence[Shapes]) -> Shapes:
    return {name: shape for group in groups for name, shape in group.items()}


def _are_in_order(got: Sequence[Shapes], expected: Sequence[Shapes]) -> bool:
    """Return whether all shapes are the same, and no name is at another place."""
    if [list(group.values()) for group in got] != [list(group.values()) for group in expected]:
        return False
    theirs, ours = list(_named(got)), list(_named(expected))
    common = set(theirs) & set(ours)
    return all(a == b for a, b in zip(theirs, ours, strict=True) if {a, b} & common)


def _difference(got: Shapes, expected: Shapes) -> str:
    changed = [
        f"{name} of {got[name]}, expected {expected[name]}"
        for name in expected
        if got.get(name, expected[name]) != expected[name]
    ]
    parts = {
        "without states of": [name for name in expected if name not in got],
        "with states of what is not trained here:": [name for name in got if name not in expected],
        "with": changed,
    }
    told = [f"{what} {_shown(names)}" for what, names in parts.items() if names]
    if told:
        return (
            f"got a checkpoint {', and '.join(told)}. To load the weights and start with new "
            "states, use load_checkpoint(..., load_optimizer_states=False), and "
            "load_module_strict=False if the model itself has other parameters"
        )
    return (
        "the checkpoint's parameters are in another order, or in other groups (in ZeRO-3 also by "
        "sub_group_size), and ZeRO would read those of others. Give the optimizer its parameters "
        "as the run did that saved it, or make a universal checkpoint of it, which is read by "
        "name: zero8 checkpoint convert DIR OUT --to zero"
    )


def _shown(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
