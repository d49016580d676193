# SPDX-License-Identifier: Apache-2.0
"""The memory of each rank, on its GPU, in host memory and on NVMe, and whether a run fits.

Derived from the sources of DeepSpeed 0.19.8 and PyTorch's FSDP2; tests/plan compares it with the
tensors of engines.  It excludes activations, the memory of CUDA and the frameworks themselves, and
the overhead of allocators, but of that for page-locked memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zero8.environment.host_memory import UNROUNDED, UNROUNDED_MIB, rounding_bytes
from zero8.plan.model import Model
from zero8.plan.setup import GPU, HOME, HOST, Setup, counted
from zero8.plan.share import Share, share_of

ROUNDING = "page-locked memory, rounded up"


@dataclass(frozen=True)
class Row:
    """Bytes of one rank in a place, with an fp32 Adam and with zero8."""

    place: str
    what: str
    fp32_bytes: int
    zero8_bytes: int


def rows_of(model: Model, setup: Setup) -> list[Row]:
    """Return the nonempty rows of one rank, the last of them what rounding adds to all others."""
    rows: dict[tuple[str, str], list[int]] = {}
    for column, one in enumerate(setup.twins):
        for place, what, num_bytes in _held(model, one):
            rows.setdefault((place, what), [0, 0])[column] += num_bytes
    return [Row(*key, *both) for key, both in rows.items() if any(both)]


class _Tensors(NamedTuple):
    """Tensors of one rank; torch rounds those up that are page-locked in host memory."""

    place: str
    what: str
    numels: Sequence[int]
    each_bytes: int
    is_locked: bool = False


def _held(model: Model, setup: Setup) -> Iterator[tuple[str, str, int]]:
    """Yield the place, name and bytes of all that a rank holds, also of what is empty."""
    share, home, rounding = share_of(model, setup), HOME[setup.offload], 0
    by_engine = _stage3 if setup.stage == 3 else _stages_0_to_2
    held = _fsdp2 if setup.engine == "fsdp2" else by_engine
    for place, what, numels, each_bytes, is_locked in held(model, setup, share):
        sizes = [each_bytes * numel for numel in numels]
        yield place, what, sum(sizes)
        if is_locked and place == HOST:
            rounding += rounding_bytes(sizes, setup.max_round_mib)
    yield home, "moments", share.moments_bytes
    yield home, "corrections of bf16 weights", setup.correction_bytes * share.numel
    yield HOST, ROUNDING, rounding


def _fsdp2(_: Model, setup: Setup, share: Share) -> Iterator[_Tensors]:
    """Gradients are shards of the parameters' dtype; gathered weights are not counted."""
    home, locks = HOME[setup.offload], setup.page_locks
    yield _Tensors(home, "weights", share.weights_bytes, 1, locks)
    yield _Tensors(home, "gradients", share.numels, setup.master_bytes, locks)


def _stages_0_to_2(model: Model, setup: Setup, share: Share) -> Iterator[_Tensors]:
    weight, master, locks = setup.weight_bytes, setup.master_bytes, setup.page_locks
    is_offloaded = setup.offload != "none"
    padded = share.numel * (1 if setup.stage == 0 else setup.world_size)
    yield _Tensors(GPU, "weights", [padded], weight)
    if setup.stage < 2 or not is_offloaded:
        yield _Tensors(GPU, "gradients", [padded if setup.stage < 2 else share.numel], weight)
    if setup.stage:
        buckets = [setup.reduce_bucket_numel] * (2 if setup.overlap_comm else 1)
        yield _Tensors(GPU, "buckets of gradients", buckets, weight)
    if setup.stage or setup.dtype != "fp32":
        yield _Tensors(HOME[setup.offload], "master weights", share.numels, master, locks)
        yield _step_gradients(setup, share.numels)
    if not is_offloaded:
        return
    # zero8 sends master weights of the model's own dtype from where they are.
    sent = [] if setup.is_8bit and master == weight else share.numels
    yield _Tensors(HOST, "weights on their way", sent, weight, locks)
    for place in (HOST, GPU):
        yield _Tensors(place, "largest gradient", [model.largest_numel], weight, locks)
    if setup.accumulation_steps > 1 and master == 4:
        yield _Tensors(HOST, "accumulated gradients", share.touched, weight, locks)


def _stage3(model: Model, setup: Setup, share: Share) -> Iterator[_Tensors]:
    weight, master, numel = setup.weight_bytes, setup.master_bytes, share.numel
    is_offloaded = setup.offload != "none"
    # A single rank gathers nothing unless its weights are offloaded.
    is_gathered = setup.world_size > 1 or setup.offload_params
    gathered = [min(setup.max_live_numel, model.numel)] if is_gathered else []
    sub_group = min(setup.sub_group_numel, numel)
    # DeepSpeed page-locks these whatever its config says.
    yield _Tensors(HOST if setup.offload_params else GPU, "weights", [numel], weight, True)
    yield _Tensors(GPU, "gathered weights, at most", gathered, weight)
    yield _Tensors(HOST if is_offloaded else GPU, "gradients", [numel], weight, setup.page_locks)
    # One bucket, even if it overlaps.
    yield _Tensors(GPU, "buckets of gradients", [setup.reduce_bucket_numel], weight)
    # Beside weights and gradients in host memory zero8 keeps no others, but sums of gradients.
    keeps_once = setup.is_8bit and is_offloaded
    has_one_weight = keeps_once and setup.offload_params and master == weight
    masters = 0 if has_one_weight else master
    yield _Tensors(HOME[setup.offload], "master weights", [numel], masters)
    if keeps_once and setup.accumulation_steps == 1:
        stepped = []
    elif is_offloaded:
        stepped = _sub_groups(share.numels, setup.sub_group_numel)
    else:
        stepped = [sub_group]
    yield _step_gradients(setup, stepped)
    if setup.offload == "nvme":
        # zero8 has three slots for the master weights and states of a sub-group.
        in_slots = masters * numel + share.moments_bytes
        slots = min(3 * sub_group, numel) * in_slots // max(1, numel)
        buffers = slots if setup.is_8bit else master * sub_group * setup.buffer_count
        yield _Tensors(HOST, "buffers of swapping", [buffers], 1)


def _step_gradients(setup: Setup, numels: Sequence[int]) -> _Tensors:
    """Return the gradients that the step reads; narrow ones are allocated exactly."""
    is_locked = setup.page_locks and setup.grad_bytes == setup.master_bytes
    place = HOME[setup.offload]
    return _Tensors(place, "gradients of the step", numels, setup.grad_bytes, is_locked)


def _sub_groups(numels: Sequence[int], sub_group_numel: int) -> list[int]:
    """Return the elements of the groups that ZeRO 3 makes of parameters."""
    groups = [0]
    for numel in numels:
        if groups[-1] >= sub_group_numel:
            groups.append(0)
        groups[-1] += numel
    return groups


# --- Whether a run fits --------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of each host and of each GPU: what a run needs, or what there is; None if unknown."""

    host_bytes: int | None = None
    gpu_bytes: int | None = None

    def fits(self, there: "Memory") -> bool:
        """Return whether this need is within what there is."""
        pairs = (self.host_bytes, there.host_bytes), (self.gpu_bytes, there.gpu_bytes)
        return all(limit is None or need <= limit for need, limit in pairs)


def needs(model: Model, setup: Setup) -> Memory:
    """Return the needs with one optimizer."""
    bytes_in: Counter[str] = Counter()
    for place, _, num_bytes in _held(model, setup):
        bytes_in[place] += num_bytes
    return Memory(setup.ranks_here * bytes_in[HOST], bytes_in[GPU])


def cases_of(model: Model, setup: Setup, there: Memory) -> list[tuple[str, Memory]]:
    """Return the needs of both optimizers; if zero8's is too much, also after changes that help."""
    cases = [(one.optimizer, needs(model, one)) for one in setup.twins]
    zero8, need = cases[1]
    if need.fits(there):
        return cases
    for what, attributes in _changes(setup):
        try:
            changed = needs(model, replace(setup, **attributes))
        except ValueError:  # incompatible settings
            continue
        if changed.host_bytes < need.host_bytes or changed.gpu_bytes < need.gpu_bytes:
            cases.append((f"{zero8}, {what}", changed))
    for count in (setup.world_size * 2**power for power in range(1, 11)):
        need = needs(model, replace(setup, world_size=count))
        if need.fits(there):
            hosts = counted(-(-count // setup.ranks_per_host), "host")
            return [*cases, (f"{zero8}, {count} ranks on {hosts} (--world-size {count})", need)]
    return cases


def _changes(setup: Setup) -> Iterator[tuple[str, dict]]:
    """Yield descriptions of changes, and for each the attributes of `Setup` to set."""
    yield f"page-locked memory not rounded up ({UNROUNDED})", {"max_round_mib": UNROUNDED_MIB}
    stage = setup.stage or 2
    offload = {"offload": "cpu", "stage": stage}
    yield f"states in host memory (--offload cpu --stage {stage})", offload
    if setup.dtype != "fp32":
        for what, dtype in (("24-bit", "24-bit-masters"), ("bfloat16", "bf16-masters")):
            yield f"{what} master weights (--dtype {dtype})", {"dtype": dtype}
    yield "ZeRO stage 3 (--stage 3)", {"stage": 3}
    yield "states on NVMe (--stage 3 --offload nvme)", {"stage": 3, "offload": "nvme"}
    fsdp2 = {"engine": "fsdp2", "offload_params": False}
    yield "FSDP2, without the weights that layers gather (--engine fsdp2)", fsdp2
    params = {"stage": 3, "offload_params": True}
    yield 'weights in host memory (stage 3 with "offload_param" in --ds-config)', params
