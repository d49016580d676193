# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: how its parameters are divided among calls; kept between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zero8.op.cuda import kernel_on
from zero8.op.kernel import CpuKernel
from zero8.optimizer import muon_step as muon
from zero8.optimizer import widened
from zero8.optimizer.batch import Batch, overlap
from zero8.optimizer.call import Call, How, in_float32, in_one
from zero8.optimizer.entry import Entry
from zero8.spec.algorithm import Algorithm


@dataclass(eq=False)
class Plan:
    """What is kept of a step over certain parameters."""

    entries: list[Entry]
    keys: object  # of all of their states, as the stepper reads them
    seen: np.ndarray  # their values, gradients and contents, like `Entry.seen`
    is_plain: bool  # whether all entries are
    addresses: bytes  # of the parameters, which did or did not share memory there
    calls: list[Call]  # in order
    is_on_gpus: bool


def planned(batch: Batch, entries: list[Entry], keys: object) -> Plan:
    """Return the plan for a batch; see `calls_of`."""
    seen = [one.seen for one in entries]
    together = [rows[at] for at in (slice(0, 1), slice(1, 2), slice(2, None)) for rows in seen]
    addresses = batch.addresses()[0]
    calls = calls_of(batch, entries, overlap(addresses, batch.values))
    return Plan(
        entries=entries,
        keys=keys,
        seen=np.concatenate(together),
        is_plain=all(one.is_plain for one in entries),
        addresses=addresses.tobytes(),
        calls=calls,
        is_on_gpus=any(not isinstance(call.kernel, CpuKernel) for call in calls),
    )


def calls_of(batch: Batch, entries: Sequence[Entry], shares_memory: bool) -> list[Call]:
    """Return the calls of a step.

    The contiguous parameters of one device and algorithm step together, unless some share memory;
    INT8 weights apart where no kernel takes them.  A parameter that is in the batch twice, as tied
    weights may be, steps once.  Blocks are defined in the logical order of the elements: a
    parameter in another layout, such as channels_last, steps on a copy, by itself.
    """
    together: dict[tuple[int, Algorithm, bool, int], list[int]] = {}
    known: set[Entry] = set()
    for place, (value, entry) in enumerate(zip(batch.values, entries, strict=True)):
        if entry in known:
            continue
        known.add(entry)
        is_widened = value.dtype == torch.int8 and widened.is_widened(value.device)
        itself = place if shares_memory or not entry.seen["contiguous"][0] else -1
        key = int(entry.seen["kind"][0]) >> 32, entry.algorithm, is_widened, itself
        together.setdefault(key, []).append(place)
    return [
        _call(batch, [entries[place] for place in places], places, _how(algorithm, is_widened))
        for (_, algorithm, is_widened, _), places in together.items()
    ]


def _how(algorithm: Algorithm, is_widened: bool) -> How:
    if is_widened:
        return in_float32
    return muon.of_matrices if algorithm.is_of_matrices else in_one


def _call(batch: Batch, entries: list[Entry], places: list[int], how: How) -> Call:
    kept = np.concatenate([one.kept for one in entries])
    kept["owner"] = np.repeat(np.arange(len(entries)), [len(one.records) for one in entries])
    algorithm, device = entries[0].algorithm, batch.values[places[0]].device
    return Call(
        algorithm=algorithm,
        entries=entries,
        places=places,
        is_all=len(places) == len(batch.params),
        is_in_order=all(one.seen["contiguous"][:2].all() for one in entries),
        device=device,
        kernel=kernel_on(device),
        how=how,
        records=np.concatenate([one.records for one in entries]),
        kept=kept,
    )
