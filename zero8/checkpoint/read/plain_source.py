# SPDX-License-Identifier: Apache-2.0
"""A file of `torch.save` that is, or contains, one state dict of an optimizer.

The optimizer is one of zero8, an fp32 one of the same algorithm, or an 8-bit AdamW of
bitsandbytes or torchao.
"""

from functools import partial
from pathlib import Path

from zero8.checkpoint.read.foreign import from_foreign, is_foreign
from zero8.checkpoint.read.fragment import Fragment, fragment_of
from zero8.checkpoint.read.safe_load import damage_in, load
from zero8.checkpoint.read.source import Source
from zero8.checkpoint.read.torchao_weights import is_weight, values_of


def read_plain(path: Path) -> Source:
    """Return the checkpoint in a file; its path may be a link, as the caller gives it."""
    whole = load(path)
    whole = whole if isinstance(whole, dict) else {}
    found = [one for one in (whole, *whole.values()) if _is_of_optimizer(one)]
    if len(found) != 1:
        raise ValueError(
            f"{path}: got {len(found)} state dicts of optimizers (dicts with the keys "
            '"state" and "param_groups"), expected one'
        )
    (optimizer,) = found
    if any(map(is_foreign, optimizer["state"].values())):
        optimizer = from_foreign(optimizer)
    names = {}
    for group in optimizer["param_groups"]:
        names |= dict(zip(group["params"], group.get("param_names") or [], strict=False))

    def named(key: int | str) -> str:
        return str(names.get(key, key))

    states = {named(key): state for key, state in optimizer["state"].items() if state}
    model = whole.get("model")
    model = model if isinstance(model, dict) else {}
    weights = {
        name: partial(values_of, name, saved) for name, saved in model.items() if is_weight(saved)
    }

    def fragments(name: str) -> list[Fragment]:
        with damage_in(path):
            read = weights.get(name)
            return [fragment_of(path, name, states[name], read() if read else None)]

    def groups() -> list[dict]:
        return [
            {**group, "params": [named(key) for key in group["params"]]}
            for group in optimizer["param_groups"]
        ]

    return Source("plain", path, [path.resolve()], list(states), fragments, groups, weights, 1)


def _is_of_optimizer(found: object) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("state"), dict)
        and isinstance(found.get("param_groups"), list)
    )
