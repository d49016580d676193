# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank, on its GPU, in host memory and on NVMe, and whether a run fits.

Derived from the sources of DeepSpeed 0.19.8 and PyTorch's FSDP2; tests/plan compares it with the
tensors of engines.  It excludes activations, the memory of CUDA and the frameworks themselves, and
the overhead of allocators, but of that for page-locked memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zero8.environment.pinned_rounding import REMEDY_MIB, rounding_bytes, variable_of
from zero8.plan.model import Model
from zero8.plan.setup import GPU, HOME, HOST, Setup, counted
from zero8.plan.share import Share, share_of

ROUNDING = "page-locked memory, rounded up"


@dataclass(frozen=True)
class Row:
    """Bytes of one rank in a place, with an fp32 Adam and with zero8, and what rounding adds."""

    place: str
    what: str
    fp32_bytes: int
    zero8_bytes: int
    fp32_rounding_bytes: int = 0
    zero8_rounding_bytes: int = 0


def rows_of(model: Model, setup: Setup) -> list[Row]:
    """Return the nonempty rows of one rank, the last of them what rounding adds to all others."""
    share, home = share_of(model, setup), HOME[setup.offload]
    if setup.engine == "fsdp2":
        rows = [*_fsdp2(setup, share)]
    elif setup.stage == 3:
        rows = [*_stage3(model, setup, share)]
    else:
        rows = [*_stages_0_to_2(model, setup, share)]
    fp32_added = sum(row.fp32_rounding_bytes for row in rows)
    zero8_added = sum(row.zero8_rounding_bytes for row in rows)
    rows += [
        Row(home, "moments", share.fp32_bytes, share.zero8_bytes),
        Row(home, "corrections of bf16 weights", 0, setup.correction_bytes * share.numel),
        Row(HOST, ROUNDING, fp32_added, zero8_added),
    ]
    return [row for row in rows if row.fp32_bytes or row.zero8_bytes]


def rounding_of(model: Model, setup: Setup) -> int:
    """Return what rounding adds to a rank's page-locked memory with zero8."""
    return sum(row.zero8_bytes for row in rows_of(model, setup) if row.what == ROUNDING)


def total(rows: list[Row], place: str) -> tuple[int, int]:
    """Return the bytes of a rank in a place, with an fp32 Adam and with zero8."""
    here = [row for row in rows if row.place == place]
    return sum(row.fp32_bytes for row in here), sum(row.zero8_bytes for row in here)


def _same(place: str, what: str, num_bytes: int) -> Row:
    return Row(place, what, num_bytes, num_bytes)


def _tensors(
    setup: Setup, place: str, what: str, fp32: Sequence[int], zero8: Sequence[int] | None = None
) -> Row:
    """Return the row of tensors of these bytes, which frameworks page-lock in host memory."""
    both = (fp32, fp32 if zero8 is None else zero8)
    is_locked = place == HOST and setup.page_locks
    added = (rounding_bytes(sizes, setup.max_round_mib) if is_locked else 0 for sizes in both)
    return Row(place, what, *map(sum, both), *added)


def _of_bytes(numels: Sequence[int], each_bytes: int) -> list[int]:
    return [each_bytes * numel for numel in numels]


def _fsdp2(setup: Setup, share: Share) -> Iterator[Row]:
    """Gradients are shards of the parameters' dtype; gathered weights are not counted."""
    home = HOME[setup.offload]
    yield _tensors(setup, home, "weights", share.weights_bytes)
    yield _tensors(setup, home, "gradients", _of_bytes(share.numels, setup.master_bytes))


def _stages_0_to_2(model: Model, setup: Setup, share: Share) -> Iterator[Row]:
    weight, master, numel = setup.weight_bytes, setup.master_bytes, share.numel
    home, offloaded = HOME[setup.offload], setup.offload != "none"
    padded = numel * (1 if setup.stage == 0 else setup.world_size)
    yield _same(GPU, "weights", weight * padded)
    if setup.stage < 2:
        yield _same(GPU, "gradients", weight * padded)
    elif not offloaded:
        yield _same(GPU, "gradients", weight * numel)
    if setup.stage:
        yield _buckets(setup, 2 if setup.overlap_comm else 1)
    if setup.stage or setup.dtype != "fp32":
        wide = _of_bytes(share.numels, master)
        yield _tensors(setup, home, "master weights", wide)
        yield _step_gradients(setup, home, wide, setup.zero8_grad_bytes * numel)
    if not offloaded:
        return
    # zero8 sends master weights of the model's own dtype from where they are.
    sent = _of_bytes(share.numels, weight)
    yield _tensors(setup, HOST, "weights on their way", sent, sent if master != weight else ())
    yield _tensors(setup, HOST, "largest gradient", [weight * model.largest_numel])
    yield _same(GPU, "largest gradient", weight * model.largest_numel)
    if setup.accumulation_steps > 1 and master == 4:
        yield _tensors(setup, HOST, "accumulated gradients", _of_bytes(share.touched, weight))


def _stage3(model: Model, setup: Setup, share: Share) -> Iterator[Row]:
    weight, master, numel = setup.weight_bytes, setup.master_bytes, share.numel
    home, is_in_host = HOME[setup.offload], setup.offload == "cpu"
    # A single rank gathers nothing unless its weights are offloaded.
    is_gathered = setup.world_size > 1 or setup.offload_params
    gathered = min(setup.max_live_numel, model.numel) if is_gathered else 0
    sub_group = min(setup.sub_group_numel, numel)
    num_grads = sub_group if setup.offload == "none" else numel
    # Beside weights and gradients in host memory zero8 keeps no others, but sums of gradients.
    is_offloaded = setup.offload != "none"
    has_one_weight = is_offloaded and setup.offload_params and master == weight
    has_one_gradient = is_offloaded and setup.accumulation_steps == 1
    own_masters = 0 if has_one_weight else master * numel
    own_grads = 0 if has_one_gradient else setup.zero8_grad_bytes * num_grads
    # Which DeepSpeed page-locks whatever its config says.
    locks = replace(setup, page_locks=True)
    yield _tensors(locks, HOST if setup.offload_params else GPU, "weights", [weight * numel])
    yield _same(GPU, "gathered weights, at most", weight * gathered)
    grads_on = GPU if setup.offload == "none" else HOST
    yield _tensors(setup, grads_on, "gradients", [weight * numel])
    yield _buckets(setup, 1)  # even if it overlaps
    yield Row(home, "master weights", master * numel, own_masters)
    if is_in_host:
        wide = _of_bytes(_sub_groups(share.numels, setup.sub_group_numel), master)
        yield _step_gradients(setup, home, wide, own_grads)
    else:
        yield Row(home, "gradients of the step", master * num_grads, own_grads)
    if setup.offload == "nvme":
        # zero8 has two slots for the master weights and states of a sub-group.
        slots = 2 * (own_masters + share.zero8_bytes) * sub_group // max(1, numel)
        yield Row(HOST, "buffers of swapping", master * sub_group * setup.buffer_count, slots)


def _step_gradients(setup: Setup, place: str, wide: Sequence[int], own_bytes: int) -> Row:
    """Return the row of the gradients that the step reads; narrow ones are allocated exactly."""
    if own_bytes == sum(wide):
        return _tensors(setup, place, "gradients of the step", wide)
    row = _tensors(setup, place, "gradients of the step", wide, ())
    return replace(row, zero8_bytes=own_bytes)


def _sub_groups(numels: Sequence[int], sub_group_numel: int) -> list[int]:
    """Return the elements of the groups that ZeRO 3 makes of parameters."""
    groups = [0]
    for numel in numels:
        if groups[-1] >= sub_group_numel:
            groups.append(0)
        groups[-1] += numel
    return groups


def _buckets(setup: Setup, count: int) -> Row:
    num_bytes = count * setup.weight_bytes * setup.reduce_bucket_numel
    return _same(GPU, "buckets of gradients", num_bytes)


# --- Whether a run fits --------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of each host and of each GPU: what a run needs, or what there is; None if unknown."""

    host_bytes: int | None
    gpu_bytes: int | None

    def fits(self, there: "Memory") -> bool:
        """Return whether this need is within what there is."""
        pairs = (self.host_bytes, there.host_bytes), (self.gpu_bytes, there.gpu_bytes)
        return all(limit is None or need <= limit for need, limit in pairs)


def needs(model: Model, setup: Setup) -> tuple[Memory, Memory]:
    """Return the needs with an fp32 Adam and with zero8."""
    rows, ranks = rows_of(model, setup), setup.ranks_here
    pairs = zip(total(rows, HOST), total(rows, GPU), strict=True)
    fp32, zero8 = (Memory(ranks * host, gpu) for host, gpu in pairs)
    return fp32, zero8


def cases_of(model: Model, setup: Setup, there: Memory) -> list[tuple[str, Memory]]:
    """Return the needs of both optimizers, and of zero8 after each change if it is too much."""
    fp32, zero8 = setup.optimizers
    cases = list(zip((fp32, zero8), needs(model, setup), strict=True))
    if cases[1][1].fits(there):
        return cases
    for what, attributes in _changes(model, setup):
        try:
            changed = replace(setup, **attributes)
        except ValueError:  # incompatible settings
            continue
        cases.append((f"{zero8}, {what}", needs(model, changed)[1]))
    for count in (setup.world_size * 2**power for power in range(1, 11)):
        need = needs(model, replace(setup, world_size=count))[1]
        if need.fits(there):
            hosts = counted(-(-count // setup.ranks_per_host), "host")
            return [*cases, (f"{zero8}, {count} ranks on {hosts} (--world-size {count})", need)]
    return cases


def _changes(model: Model, setup: Setup) -> Iterator[tuple[str, dict]]:
    """Yield descriptions of changes, and for each the attributes of `Setup` to set."""
    if setup.max_round_mib is None and rounding_of(model, setup):
        rounded = f"page-locked memory not rounded up ({variable_of(REMEDY_MIB)})"
        yield rounded, {"max_round_mib": REMEDY_MIB}
    if setup.offload == "none":
        stage = setup.stage or 2
        offload = {"offload": "cpu", "stage": stage}
        yield f"states in host memory (--offload cpu --stage {stage})", offload
    if setup.master_bytes == 4 and setup.dtype != "fp32":
        yield "24-bit master weights (--dtype 24-bit-masters)", {"dtype": "24-bit-masters"}
        yield "bfloat16 master weights (--dtype bf16-masters)", {"dtype": "bf16-masters"}
    if setup.engine != "deepspeed":
        return
    if setup.stage < 3:
        yield "ZeRO stage 3 (--stage 3)", {"stage": 3}
    if setup.offload != "nvme":
        nvme = {"stage": 3, "offload": "nvme"}
        yield "states on NVMe (--stage 3 --offload nvme)", nvme
        fsdp2 = {"engine": "fsdp2", "offload_params": False}
        yield "FSDP2, without the weights that layers gather (--engine fsdp2)", fsdp2
    if not setup.offload_params:
        params = {"stage": 3, "offload_params": True}
        yield 'weights in host memory (stage 3 with "offload_param" in --ds-config)', params
