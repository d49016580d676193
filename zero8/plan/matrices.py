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
from collections.abc import Iterator

from zero8.algorithms.muon import multiplications
from zero8.plan.groups import matrices_in, muons_params
from zero8.plan.model import Model
from zero8.plan.setup import Setup
from zero8.plan.share import flat_numel, pieces_of
from zero8.ranks.owners import owned_by

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

    Of ZeRO 1 and 2 they are those of the rank that sends most; in ZeRO 3 and FSDP2, which cut every
    matrix between all ranks, ranks send about the same.
    """
    if setup.stage == 0 and setup.engine == "deepspeed":
        return 0
    if setup.engine == "fsdp2" or setup.stage == 3:
        # To the owner and back, but not the owner's own part.
        sent = 2 * sum(map(math.prod, matrices_in(model, setup)))
        return UPDATE_BYTES * sent * (setup.world_size - 1) // setup.world_size**2
    return UPDATE_BYTES * _sent_over_boundaries(model, setup)


def _sent_over_boundaries(model: Model, setup: Setup) -> int:
    """Return the most elements that a rank sends if ranks share one buffer of all matrices."""
    params = muons_params(model, setup)
    parts: dict[int, dict[int, int]] = defaultdict(dict)
    for place, rank, _, numel in pieces_of(params, flat_numel(params, setup.world_size)):
        parts[place][rank] = numel
    cut = {place: of_ranks for place, of_ranks in parts.items() if len(of_ranks) > 1}
    costs = {place: float(multiplications(params[place][1])) for place in cut}
    sent = [0] * setup.world_size
    for owner, places in enumerate(owned_by(costs, setup.world_size)):
        for rank, numel in (pair for place in places for pair in cut[place].items()):
            if rank != owner:
                sent[rank] += numel  # of the update
                sent[owner] += numel  # of what it became
    return max(sent)


def multiplied(model: Model, setup: Setup, ns_steps: int = 5) -> tuple[float, float]:
    """Return the floating-point operations of a rank in a step, in DeepSpeed and in zero8.

    zero8's are those of all ranks over their number.
    """
    each = 2.0 * ns_steps * sum(map(multiplications, matrices_in(model, setup)))
    is_shared = setup.engine == "fsdp2" or setup.stage > 0
    return each, each / setup.world_size if is_shared else each
