# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank: on its GPU, in host memory and on NVMe.

Derived from the sources of DeepSpeed 0.19.8 and PyTorch's FSDP2; tests/plan compares it with the
tensors of engines.  It excludes activations, the memory of CUDA and the frameworks themselves, and
the overhead of allocators.
"""

from dataclasses import dataclass

from zero8.plan.model import Model
from zero8.plan.setup import Setup
from zero8.plan.share import Share, share_of

GPU, HOST, NVME = "GPU", "host", "NVMe"
HOME = {"none": GPU, "cpu": HOST, "nvme": NVME}
"""The place of the optimizer's states."""


@dataclass(frozen=True)
class Row:
    """Bytes of one rank.

    Attributes:
        place: `GPU`, `HOST` or `NVME`.
        what: a description.
        fp32_bytes: with an fp32 Adam.
        zero8_bytes: with zero8.
    """

    place: str
    what: str
    fp32_bytes: int
    zero8_bytes: int


def rows_of(model: Model, setup: Setup) -> list[Row]:
    """Return the nonempty rows of one rank."""
    share = share_of(model, setup)
    if setup.engine == "fsdp2":
        rows = _fsdp2(setup, share)
    elif setup.stage == 3:
        rows = _stage3(model, setup, share)
    else:
        rows = _stages_0_to_2(model, setup, share)
    home = HOME[setup.offload]
    rows.append(Row(home, "moments", share.fp32_bytes, share.zero8_bytes))
    correction_bytes = setup.correction_bytes * share.numel
    rows.append(Row(home, "corrections of bf16 weights", 0, correction_bytes))
    return [row for row in rows if row.fp32_bytes or row.zero8_bytes]


def total(rows: list[Row], place: str) -> tuple[int, int]:
    """Return the bytes of a rank in a place, with an fp32 Adam and with zero8."""
    here = [row for row in rows if row.place == place]
    return sum(row.fp32_bytes for row in here), sum(row.zero8_bytes for row in here)


def _same(place: str, what: str, num_bytes: int) -> Row:
    return Row(place, what, num_bytes, num_bytes)


def _stages_0_to_2(model: Model, setup: Setup, share: Share) -> list[Row]:
    weight, master = setup.weight_bytes, setup.master_bytes
    home, offloaded = HOME[setup.offload], setup.offload != "none"
    padded = share.numel * (1 if setup.stage == 0 else setup.world_size)
    rows = [_same(GPU, "weights", weight * padded)]
    if setup.stage < 2:
        rows.append(_same(GPU, "gradients", weight * padded))
    elif not offloaded:
        rows.append(_same(GPU, "gradients", weight * share.numel))
    rows += _buckets(setup, default_overlap=False)
    if setup.stage or setup.dtype != "fp32":
        rows.append(_same(home, "master weights", master * share.numel))
        step_grads = master * share.numel, setup.zero8_grad_bytes * share.numel
        rows.append(Row(home, "gradients of the step", *step_grads))
    if offloaded:
        rows += _buffers_of_offload(model, setup, share)
    return rows


def _buffers_of_offload(model: Model, setup: Setup, share: Share) -> list[Row]:
    weight, largest = setup.weight_bytes, model.largest_numel
    on_their_way = weight * share.numel
    # zero8 sends master weights of the model's own dtype from where they are.
    is_needed = setup.master_bytes != weight
    rows = [
        Row(HOST, "weights on their way", on_their_way, on_their_way if is_needed else 0),
        _same(HOST, "largest gradient", weight * largest),
        _same(GPU, "largest gradient", weight * largest),
    ]
    if setup.accumulation_steps > 1 and setup.master_bytes == 4:
        rows.append(_same(HOST, "accumulated gradients", weight * share.touched_numel))
    return rows


def _stage3(model: Model, setup: Setup, share: Share) -> list[Row]:
    weight, master = setup.weight_bytes, setup.master_bytes
    home, numel = HOME[setup.offload], share.numel
    # A single rank gathers nothing unless its weights are offloaded.
    is_gathered = setup.world_size > 1 or setup.offload_params
    gathered = min(setup.max_live_numel, model.numel) if is_gathered else 0
    sub_group = min(setup.sub_group_numel, numel)
    masters = master * numel
    num_grads = sub_group if setup.offload == "none" else numel
    # In host memory zero8 keeps once what has one dtype, but sums of gradients.
    is_in_host = setup.offload == "cpu"
    has_one_weight = is_in_host and setup.offload_params and master == weight
    has_one_gradient = is_in_host and setup.accumulation_steps == 1
    own_grads = 0 if has_one_gradient else setup.zero8_grad_bytes * num_grads
    rows = [
        _same(HOST if setup.offload_params else GPU, "weights", weight * numel),
        _same(GPU, "gathered weights, at most", weight * gathered),
        _same(GPU if setup.offload == "none" else HOST, "gradients", weight * numel),
        *_buckets(setup, default_overlap=True),
        Row(home, "master weights", masters, 0 if has_one_weight else masters),
        Row(home, "gradients of the step", master * num_grads, own_grads),
    ]
    if setup.offload == "nvme":
        buffers = master * sub_group * setup.buffer_count
        rows.append(_same(HOST, "buffers of swapping", buffers))
        rows.append(_state_buffers(share, sub_group, setup.pipelined))
    return rows


def _state_buffers(share: Share, sub_group: int, pipelined: bool) -> Row:
    # An fp32 Adam's moments use DeepSpeed's buffers; zero8 has its own, one or three.
    count = 3 if pipelined else 1
    num_bytes = count * share.zero8_bytes * sub_group // max(1, share.numel)
    return Row(HOST, "buffers of 8-bit states", 0, num_bytes)


def _buckets(setup: Setup, default_overlap: bool) -> list[Row]:
    if setup.stage == 0:
        return []
    overlap = default_overlap if setup.overlap_comm is None else setup.overlap_comm
    # Stage 3 has one bucket, even if it overlaps.
    count = 2 if overlap and setup.stage < 3 else 1
    num_bytes = count * setup.weight_bytes * setup.reduce_bucket_numel
    return [_same(GPU, "buckets of gradients", num_bytes)]


def _fsdp2(setup: Setup, share: Share) -> list[Row]:
    """Gradients are shards of the parameters' dtype; gathered weights are not counted."""
    home = HOME[setup.offload]
    gradient_bytes = setup.master_bytes * share.numel
    return [_same(home, "weights", share.weight_bytes), _same(home, "gradients", gradient_bytes)]
