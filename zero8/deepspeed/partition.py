# SPDX-License-Identifier: Apache-2.0
"""Computes which ranges of which parameters a flat ZeRO partition holds.

ZeRO hands the optimizer one flat tensor per parameter group (stages 1 and 2, BF16_Optimizer) or
per sub-group (stage 3), and describes it in attributes of the parameters: `_hp_mapping` and
`_dp_group`, or `_z3_optimizer`.  The ZeRO optimizer sets them when it is constructed, after ours,
so the first step makes the table.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, distributed

from zero8.environment.ranks import Group
from zero8.state.table import Piece, PieceTable

MakePiece = Callable[[Tensor, int, int, int], Piece]
"""(parameter, start in the shard, numel, first element in the parameter) -> Piece."""


def table_of(flat: Tensor, params: Sequence[Tensor], make: MakePiece) -> PieceTable | None:
    """Return the segment table of a flat partition of parameters, None if it is not ZeRO's."""
    if any(hasattr(p, "_z3_optimizer") for p in params):
        pieces = _stage3_pieces(flat, params, make)
    elif any(hasattr(p, "_hp_mapping") for p in params):
        pieces = _stage12_pieces(flat, params, make)
    else:
        return None
    return PieceTable(tuple(sorted(pieces, key=lambda piece: piece.start)), flat.numel())


def group_of(flat: Tensor, params: Sequence[Tensor]) -> Group:
    """Return the ranks that hold the other parts of what a flat partition was cut from."""
    sharded = next((p for p in params if hasattr(p, "_z3_optimizer")), None)
    if sharded is not None:
        return _if_shared(sharded.ds_process_group)
    storage = flat.untyped_storage().data_ptr()
    groups = [getattr(p, "_dp_group", None) for p in _touching(params, storage) or params]
    return _if_shared(next((one for one in groups if one is not None), None))


def _stage12_pieces(flat: Tensor, params: Sequence[Tensor], make: MakePiece) -> list[Piece]:
    """Return the pieces of a group's partition, from the parameters' offsets in the flat buffer.

    `_hp_mapping` only says which parameters touch the partition; DeepSpeed computes its offsets in
    the wrong order under `round_robin_gradients`.
    """
    touching = _touching(params, flat.untyped_storage().data_ptr())
    if not touching:
        return []  # this rank's partition is all padding
    group_storage = touching[0].untyped_storage().data_ptr()
    partition_start = distributed.get_rank(touching[0]._dp_group) * flat.numel()
    pieces = []
    for p in params:
        if p.numel() == 0 or p.untyped_storage().data_ptr() != group_storage:
            continue
        offset = p.storage_offset() - partition_start
        begin, end = max(offset, 0), min(offset + p.numel(), flat.numel())
        if begin < end:
            pieces.append(make(p, begin, end - begin, begin - offset))
    return pieces


def _stage3_pieces(flat: Tensor, params: Sequence[Tensor], make: MakePiece) -> list[Piece]:
    """Return the pieces of a sub-group's partition; each parameter is cut into world-size parts."""
    pieces = []
    for p in params:
        zero = getattr(p, "_z3_optimizer", None)
        if zero is None or zero.get_param_id(p) not in zero.grad_position:
            continue
        sub_group, start, _ = zero.grad_position[zero.get_param_id(p)]
        if zero.fp32_partitioned_groups_flat[sub_group] is not flat:
            continue
        first = distributed.get_rank(p.ds_process_group) * p.partition_numel()
        numel = min(p.partition_numel(), p.ds_numel - first)
        if numel > 0:
            pieces.append(make(p, start, numel, first))
    return pieces


def _touching(params: Sequence[Tensor], storage: int) -> list[Tensor]:
    """Return the parameters of which a partition of ZeRO 1 or 2 has elements."""
    return [
        p
        for p in params
        if getattr(p, "_hp_mapping", None) is not None
        and p._hp_mapping.hp_fragment is not None
        and p._hp_mapping.hp_fragment.untyped_storage().data_ptr() == storage
    ]


def _if_shared(process_group: Group) -> Group:
    """Return a process group, None if it has one rank only."""
    if process_group is None or distributed.get_world_size(process_group) == 1:
        return None
    return process_group
