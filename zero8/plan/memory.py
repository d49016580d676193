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

from zero8.environment.pinned_rounding import REMEDY_MIB, rounding_bytes, variable_of
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


def total(rows: list[Row], place: str) -> tuple[int, int]:
    """Return the bytes of a rank in a place, with an fp32 Adam and with zero8."""
    here = [row for row in rows if row.place == place]
    return sum(row.fp32_bytes for row in here), sum(row.zero8_bytes for row in here)


class _Tensors(NamedTuple):
    """Tensors of one rank; torch rounds those up that are page-locked in host memory."""

    place: str
    what: str
    sizes_bytes: Sequence[int]
    is_locked: bool = False


def _held(model: Model, setup: Setup) -> Iterator[tuple[str, str, int]]:
    """Yield the place, name and bytes of all that a rank holds, also of what is empty."""
    share, home = share_of(model, setup), HOME[setup.offload]
    if setup.engine == "fsdp2":
        tensors = [*_fsdp2(setup, share)]
    elif setup.stage == 3:
        tensors = [*_stage3(model, setup, share)]
    else:
        tensors = [*_stages_0_to_2(model, setup, share)]
    locked = (one.sizes_bytes for one in tensors if one.place == HOST and one.is_locked)
    for one in tensors:
        yield one.place, one.what, sum(one.sizes_bytes)
    yield home, "moments", share.moments_bytes
    yield home, "corrections of bf16 weights", setup.correction_bytes * share.numel
    yield HOST, ROUNDING, sum(rounding_bytes(sizes, setup.max_round_mib) for sizes in locked)


def _of_bytes(numels: Sequence[int], each_bytes: int) -> list[int]:
    return [each_bytes * numel for numel in numels]


def _fsdp2(setup: Setup, share: Share) -> Iterator[_Tensors]:
    """Gradients are shards of the parameters' dtype; gathered weights are not counted."""
    home, gradients = HOME[setup.offload], _of_bytes(share.numels, setup.master_bytes)
    yield _Tensors(home, "weights", share.weights_bytes, setup.page_locks)
    yield _Tensors(home, "gradients", gradients, setup.page_locks)


def _stages_0_to_2(model: Model, setup: Setup, share: Share) -> Iterator[_Tensors]:
    weight, master, numel = setup.weight_bytes, setup.master_bytes, share.numel
    offloaded, locks = setup.offload != "none", setup.page_locks
    padded = numel * (1 if setup.stage == 0 else setup.world_size)
    yield _Tensors(GPU, "weights", [weight * padded])
    if setup.stage < 2:
        yield _Tensors(GPU, "gradients", [weight * padded])
    elif not offloaded:
        yield _Tensors(GPU, "gradients", [weight * numel])
    if setup.stage:
        yield _buckets(setup, 2 if setup.overlap_comm else 1)
    if setup.stage or setup.dtype != "fp32":
        masters = _of_bytes(share.numels, master)
        yield _Tensors(HOME[setup.offload], "master weights", masters, locks)
        yield _step_gradients(setup, share.numels)
    if not offloaded:
        return
    # zero8 sends master weights of the model's own dtype from where they are.
    sent = [] if setup.is_8bit and master == weight else _of_bytes(share.numels, weight)
    yield _Tensors(HOST, "weights on their way", sent, locks)
    yield _Tensors(HOST, "largest gradient", [weight * model.largest_numel], locks)
    yield _Tensors(GPU, "largest gradient", [weight * model.largest_numel])
    if setup.accumulation_steps > 1 and master == 4:
        sums = _of_bytes(share.touched, weight)
        yield _Tensors(HOST, "accumulated gradients", sums, locks)


def _stage3(model: Model, setup: Setup, share: Share) -> Iterator[_Tensors]:
    weight, master, numel = setup.weight_bytes, setup.master_bytes, share.numel
    home, is_offloaded = HOME[setup.offload], setup.offload != "none"
    # A single rank gathers nothing unless its weights are offloaded.
    is_gathered = setup.world_size > 1 or setup.offload_params
    gathered = min(setup.max_live_numel, model.numel) if is_gathered else 0
    sub_group = min(setup.sub_group_numel, numel)
    weights_on = HOST if setup.offload_params else GPU
    # DeepSpeed page-locks these whatever its config says.
    yield _Tensors(weights_on, "weights", [weight * numel], is_locked=True)
    yield _Tensors(GPU, "gathered weights, at most", [weight * gathered])
    yield _Tensors(HOST if is_offloaded else GPU, "gradients", [weight * numel], setup.page_locks)
    yield _buckets(setup, 1)  # even if it overlaps
    # Beside weights and gradients in host memory zero8 keeps no others, but sums of gradients.
    keeps_once = setup.is_8bit and is_offloaded
    has_one_weight = keeps_once and setup.offload_params and master == weight
    masters = 0 if has_one_weight else master * numel
    yield _Tensors(home, "master weights", [masters])
    if keeps_once and setup.accumulation_steps == 1:
        stepped = []
    elif is_offloaded:
        stepped = _sub_groups(share.numels, setup.sub_group_numel)
    else:
        stepped = [sub_group]
    yield _step_gradients(setup, stepped)
    if setup.offload == "nvme":
        # zero8 has three slots for the master weights and states of a sub-group.
        slots = min(3 * sub_group, numel) * (masters + share.moments_bytes) // max(1, numel)
        buffers = slots if setup.is_8bit else master * sub_group * setup.buffer_count
        yield _Tensors(HOST, "buffers of swapping", [buffers])


def _step_gradients(setup: Setup, numels: Sequence[int]) -> _Tensors:
    """Return the gradients that the step reads; narrow ones are allocated exactly."""
    sizes = _of_bytes(numels, setup.grad_bytes)
    is_locked = setup.page_locks and setup.grad_bytes == setup.master_bytes
    return _Tensors(HOME[setup.offload], "gradients of the step", sizes, is_locked)


def _sub_groups(numels: Sequence[int], sub_group_numel: int) -> list[int]:
    """Return the elements of the groups that ZeRO 3 makes of parameters."""
    groups = [0]
    for numel in numels:
        if groups[-1] >= sub_group_numel:
            groups.append(0)
        groups[-1] += numel
    return groups


def _buckets(setup: Setup, count: int) -> _Tensors:
    num_bytes = count * setup.weight_bytes * setup.reduce_bucket_numel
    return _Tensors(GPU, "buckets of gradients", [num_bytes])


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
    rounded = f"page-locked memory not rounded up ({variable_of(REMEDY_MIB)})"
    yield rounded, {"max_round_mib": REMEDY_MIB}
    stage = setup.stage or 2
    offload = {"offload": "cpu", "stage": stage}
    yield f"states in host memory (--offload cpu --stage {stage})", offload
    if setup.dtype != "fp32":
        yield "24-bit master weights (--dtype 24-bit-masters)", {"dtype": "24-bit-masters"}
        yield "bfloat16 master weights (--dtype bf16-masters)", {"dtype": "bf16-masters"}
    yield "ZeRO stage 3 (--stage 3)", {"stage": 3}
    yield "states on NVMe (--stage 3 --offload nvme)", {"stage": 3, "offload": "nvme"}
    fsdp2 = {"engine": "fsdp2", "offload_params": False}
    yield "FSDP2, without the weights that layers gather (--engine fsdp2)", fsdp2
    params = {"stage": 3, "offload_params": True}
    yield 'weights in host memory (stage 3 with "offload_param" in --ds-config)', params
