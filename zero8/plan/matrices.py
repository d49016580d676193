# SPDX-License-Identifier: Apache-2.0
"""What Muon adds to a step: the bytes of matrices that ranks exchange, and products of matrices.

zero8 exchanges the updates of matrices that are cut between ranks (`zero8.ranks.owners`), here in
bfloat16, as accelerators and new processors compute.  DeepSpeed 0.19's Muon with its optimizer in
host memory gathers the gradient and the moment of every matrix on every rank, and every rank
orthogonalizes all of them.  `test_bytes_that_muon_and_deepspeeds_send_are_those_of_the_plan` counts
both.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from zero8.algorithms.muon import matrices_of, multiplications, ranges_by_matrix
from zero8.plan.groups import matrices_in, muons_params
from zero8.plan.model import Model, Param
from zero8.plan.setup import Setup
from zero8.plan.share import first_part, flat_numel, pieces_of
from zero8.ranks.owners import Key, owned_by

UPDATE_BYTES = 2
DEEPSPEED_BUFFER_BYTES = 64 << 20
"""Of the matrices that DeepSpeed gathers at once, and of what it gathers them in."""


def sent_by_deepspeed(model: Model, setup: Setup) -> int:
    """Return the bytes that a rank sends with DeepSpeed's Muon besides weights and gradients.

    0 where it does not gather in this way: without offload, and under FSDP2.
    """
    if setup.engine != "deepspeed" or setup.offload == "none":
        return 0
    others = setup.world_size - 1
    if setup.stage == 3:
        numel = sum(map(math.prod, matrices_in(model, setup)))
        return 2 * setup.weight_bytes * others * numel // setup.world_size
    # All ranks send as much as the one that has most of a batch, in chunks that are filled up.
    pair_bytes = 2 * setup.master_bytes
    most = DEEPSPEED_BUFFER_BYTES // ((setup.world_size + 1) * pair_bytes)
    sent = 0
    for held in _batches_of_deepspeed(model, setup, DEEPSPEED_BUFFER_BYTES // pair_bytes):
        chunk = min(max(held), most)
        sent += -(-max(held) // chunk) * chunk
    return pair_bytes * others * sent


def _batches_of_deepspeed(model: Model, setup: Setup, max_numel: int) -> Iterator[list[int]]:
    """Yield the elements of each rank for each batch of matrices that are gathered at once."""
    params = muons_params(model, setup)
    held, last, numel = [0] * setup.world_size, -1, 0
    for place, rank, _, here in pieces_of(params, flat_numel(params, setup.world_size)):
        if place != last:
            whole = math.prod(params[place][1])
            if numel and numel + whole > max_numel:
                yield held
                held, numel = [0] * setup.world_size, 0
            last, numel = place, numel + whole
        held[rank] += here
    if numel:
        yield held


def sent_by_zero8(model: Model, setup: Setup) -> int:
    """Return the bytes that a rank sends with zero8's Muon besides weights and gradients.

    They are those of the rank that sends most.
    """
    if setup.stage == 0 and setup.engine == "deepspeed":
        return 0
    params = muons_params(model, setup)
    cut = {key: of for key, of in _holders(params, setup).items() if len(of) > 1}
    costs = {key: float(multiplications(matrices_of(params[key[0]][1])[1:])) for key in cut}
    sent = [0] * setup.world_size
    for owner, keys in enumerate(owned_by(costs, cut, setup.world_size)):
        for rank, numel in (pair for key in keys for pair in cut[key].items()):
            if rank != owner:
                sent[rank] += numel  # of the update
                sent[owner] += numel  # of what it became
    return UPDATE_BYTES * max(sent)


def _holders(params: Sequence[Param], setup: Setup) -> dict[Key, dict[int, int]]:
    """Return the elements of each rank of each matrix, by the parameter's place and its number."""
    holders: dict[Key, dict[int, int]] = defaultdict(dict)
    for place, rank, begin, count in _pieces(params, setup):
        for number, _, numel in ranges_by_matrix(params[place][1], begin, count):
            holders[place, number][rank] = numel
    return holders


def _pieces(params: Sequence[Param], setup: Setup) -> Iterator[tuple[int, int, int, int]]:
    """Yield (place of the parameter, rank, its first element there, numel) of all ranks' pieces."""
    if setup.engine != "fsdp2" and setup.stage != 3:
        yield from pieces_of(params, flat_numel(params, setup.world_size))
        return
    for place, one in enumerate(params):
        for _, rank, first, numel in pieces_of([one], first_part(one[1], setup)):
            yield place, rank, first, numel


def multiplied(model: Model, setup: Setup, ns_steps: int = 5) -> tuple[float, float]:
    """Return the floating-point operations of a rank in a step, in DeepSpeed and in zero8.

    zero8's are those of all ranks over their number.
    """
    each = 2.0 * ns_steps * sum(map(multiplications, matrices_in(model, setup)))
    is_shared = setup.engine == "fsdp2" or setup.stage > 0
    return each, each / setup.world_size if is_shared else each
