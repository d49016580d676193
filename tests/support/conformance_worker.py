# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own tests ask of an optimizer's states, as small checks that run on two ranks.

The checks know nothing of 8-bit states.  Where a value cannot survive 8 bits, they write values
that do: blocks of one number, a square for second moments.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero_worker import MOMENTS, Bag, base_optimizer, config, make_engine, take_step

LAYOUTS = {
    "zero1": dict(stage=1, offload=None),
    "zero2": dict(stage=2, offload=None),
    "zero2 offload": dict(stage=2),
    "zero2 offload bf16": dict(stage=2, dtype={}),
    "zero3": dict(stage=3, offload=None),
    "zero3 offload": dict(stage=3),
    "bf16 optimizer": dict(stage=1, offload=None, dtype={}),
}
FLAT = ("zero1", "zero2 offload", "bf16 optimizer")  # stages 1 and 2: views into flat partitions
ALL = (*FLAT, "zero3 offload")
STAGE3 = ("zero3", "zero3 offload")

TIMEOUT_S = 120
GROUPS = (("embed", "single"), ("wide", "bias", "thin", "frozen"), ("long", "conv", "unused"))
# Parameters that lie on both ranks come first: where a read fails, it fails on both then.
READ = ("conv", "embed", "wide", "long", "thin", "bias")
ON_BOTH_RANKS = ("embed", "bias", "conv")  # one of each group


@dataclass
class Lab:
    """One layout: makes engines, and keeps one that has stepped for all checks."""

    layout: str
    folder: Path
    kept: object = None

    def config(self, **changes) -> dict:
        made = config(**LAYOUTS[self.layout])
        if self.layout == "bf16 optimizer":
            made["data_types"] = {"grad_accum_dtype": "fp32"}
        return made | changes

    def engine(self, steps=0, groups=False, **changes):
        """Return a new engine over a `Bag`, after some steps."""
        bag = Bag()
        if groups:
            members = [[getattr(bag, name) for name in names] for names in GROUPS]
            groups = [{"params": p, "lr": 1e-2 / (i + 1)} for i, p in enumerate(members)]
        engine = make_engine(self.config(**changes), bag, groups or None)
        for step in range(steps):
            take_step(engine, step)
        return engine

    def stepped(self):
        """Return the engine that checks share; it has taken steps."""
        if self.kept is None:
            self.kept = self.engine(steps=2)
        return self.kept

    def path(self, name) -> str:
        """Return a folder of the layout's own."""
        return str(self.folder / f"{self.layout} {name}".replace(" ", "_"))


@dataclass(frozen=True)
class Behaviour:
    """One thing that DeepSpeed's tests check: a line that says it, where, and the check."""

    line: str
    layouts: tuple[str, ...]
    check: Callable[[Lab], None]


BEHAVIOURS: dict[str, Behaviour] = {}


def behaviour(line: str, *layouts: str):
    """Enter a check into the table."""

    def enter(check):
        BEHAVIOURS[check.__name__] = Behaviour(line, layouts, check)
        return check

    return enter


def params(engine, names=READ):
    return [(name, getattr(engine.module, name)) for name in names]


def snapshot(engine):
    """Return what training goes on from: masters, moments (decoded), steps, learning rates."""
    base = base_optimizer(engine)
    states = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for state in base.state.values()
        if state
    ]
    return SimpleNamespace(
        masters={n: safe_get_full_fp32_param(p).clone() for n, p in params(engine)},
        moments=[state[which] for state in states for which in MOMENTS],
        steps=[int(state["step"]) for state in states],
        rates=[group["lr"] for group in base.param_groups],
    )


def assert_same(a, b, but=()):
    assert a.steps == b.steps or "steps" in but, (a.steps, b.steps)
    assert a.rates == b.rates, (a.rates, b.rates)
    for name in a.masters:
        assert torch.equal(a.masters[name], b.masters[name]), f"master of {name}"
    assert len(a.moments) == len(b.moments) > 0, "number of moments"
    for x, y in zip(a.moments, b.moments, strict=True):
        assert torch.equal(x, y), "moments"


def assert_all_ranks_have(tensor):
    """Check that rank 0 has the same."""
    theirs = tensor.detach().clone()
    torch.distributed.broadcast(theirs, src=0)
    assert torch.equal(theirs, tensor), "ranks have different values"


def constant(param, value):
    return torch.full(getattr(param, "ds_shape", param.shape), value)


def everywhere(error):
    """Return the errors of both ranks as one text, None if there are none."""
    errors = [None, None]
    torch.distributed.all_gather_object(errors, error)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text) or None


# --- Tensor fragments (DeepSpeed's test_zero_tensor_fragment.py) ---------------------------------


@behaviour("safe_get_full_optimizer_state gives all ranks the moments, in every step anew", *ALL)
def full_state_get(lab):
    engine = lab.stepped()
    read = []
    for step in (10, 11):
        take_step(engine, step)
        read.append(
            [safe_get_full_optimizer_state(p, w) for _, p in params(engine) for w in MOMENTS]
        )
    for first, second in zip(*read, strict=True):
        assert first.dtype == torch.float32
        assert first.abs().max() > 0
        assert not torch.equal(first, second)
        assert_all_ranks_have(second)


@behaviour("safe_set_full_optimizer_state writes moments and leaves other parameters'", *ALL)
def full_state_set(lab):
    engine = lab.engine(steps=1)
    others = [p for _, p in params(engine, ("embed", "long"))]
    before = [safe_get_full_optimizer_state(p, w) for p in others for w in MOMENTS]
    for _, p in params(engine, ("wide", "conv", "thin")):
        for which, value in zip(MOMENTS, (-0.3, 0.0625), strict=True):
            safe_set_full_optimizer_state(p, constant(p, value), which)
            assert torch.equal(safe_get_full_optimizer_state(p, which), constant(p, value)), which
    after = [safe_get_full_optimizer_state(p, w) for p in others for w in MOMENTS]
    assert all(map(torch.equal, before, after))


@behaviour("a step after safe_set_full_optimizer_state goes where the new moments say", *ALL)
def full_state_steps(lab):
    engine = lab.engine(steps=1)
    (_, p), *_ = params(engine, ("wide",))
    for which, value in zip(MOMENTS, (-100.0, 10000.0), strict=True):
        safe_set_full_optimizer_state(p, constant(p, value), which)
    before = safe_get_full_fp32_param(p).clone()
    take_step(engine, 1)
    # Step 2 of betas .9, .999: 90/.19 / sqrt(9990/.001999) = .212 of lr 1e-2, less the decay.
    moved = safe_get_full_fp32_param(p) - before * (1 - 1e-4)
    assert (moved - 0.212e-2).abs().max() < 0.212e-2 * 0.05


@behaviour("local moments are read and written on their rank", *STAGE3)
def local_state(lab):
    engine = lab.engine(steps=1)
    rank = torch.distributed.get_rank()
    for _, p in params(engine, ("wide", "conv")):
        for which in MOMENTS:
            full = safe_get_full_optimizer_state(p, which).flatten()
            half = full.view(2, -1)[rank]
            assert torch.equal(safe_get_local_optimizer_state(p, which).clone(), half)
            safe_set_local_optimizer_state(p, torch.full_like(half, 0.25 + 2 * rank), which)
            expected = torch.tensor([0.25, 2.25]).repeat_interleave(half.numel())
            full = safe_get_full_optimizer_state(p, which)
            assert torch.equal(full.flatten(), expected)


@behaviour("moments of every parameter group can be read after the first step", *ALL)
def groups_state_get(lab):
    engine = lab.engine(steps=1, groups=True)
    for _, p in params(engine, ON_BOTH_RANKS):
        for which in MOMENTS:
            assert_all_ranks_have(safe_get_full_optimizer_state(p, which))


@behaviour("moments of a parameter that gets no gradient are zero, a frozen one has none", *ALL)
def no_gradient(lab):
    engine = lab.stepped()
    for which in MOMENTS:
        assert safe_get_full_optimizer_state(engine.module.unused, which).abs().max() == 0
        assert safe_get_full_optimizer_state(engine.module.frozen, which) is None
    assert safe_get_full_fp32_param(engine.module.frozen) is None


# --- ZeRO checkpoints (test_zero_optimizer.py) ---------------------------------------------------


@behaviour("load_optimizer_states=False restores weights and leaves moments", *FLAT)
def checkpoint_weights(lab):
    saved = lab.engine(steps=2)
    saved.save_checkpoint(lab.path("weights"))
    loaded = lab.engine()
    loaded.load_checkpoint(lab.path("weights"), load_optimizer_states=False)
    assert snapshot(loaded).moments == []
    for (name, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        ours, theirs = safe_get_full_fp32_param(p), safe_get_full_fp32_param(q)
        assert torch.equal(ours.to(p.dtype), theirs.to(q.dtype)), name


@behaviour("load_module_only restores the module's weights only", "zero2 offload")
def checkpoint_module(lab):
    saved = lab.engine(steps=2)
    saved.save_checkpoint(lab.path("module"))
    loaded = lab.engine()
    loaded.load_checkpoint(lab.path("module"), load_module_only=True)
    for (name, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        assert torch.equal(p, q), name
    assert snapshot(loaded).moments == []


@behaviour("a client's state is saved, and returned by the load", "zero2 offload", "zero3 offload")
def checkpoint_client_state(lab):
    engine = lab.stepped()
    engine.save_checkpoint(lab.path("client"), client_state={"note": 17})
    _, client_state = engine.load_checkpoint(lab.path("client"))
    assert client_state["note"] == 17


@behaviour("a checkpoint from before the first step loads, and training goes on", *ALL)
def checkpoint_early(lab):
    saved, loaded = lab.engine(), lab.engine(steps=1)
    saved.save_checkpoint(lab.path("early"))
    loaded.load_checkpoint(lab.path("early"))
    for engine in (saved, loaded):
        take_step(engine, 0)
    assert_same(snapshot(saved), snapshot(loaded))


@behaviour("moments can be read from a loaded engine before it steps", *ALL)
def loaded_state_get(lab):
    saved, loaded = lab.engine(steps=2), lab.engine()
    saved.save_checkpoint(lab.path("get"))
    loaded.load_checkpoint(lab.path("get"))
    for (_, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        for which in MOMENTS:
            ours, theirs = (safe_get_full_optimizer_state(x, which) for x in (p, q))
            assert torch.equal(ours, theirs)


@behaviour("moments can be read and set when an engine that had stepped has loaded", *ALL)
def reloaded_state_set(lab):
    engine = lab.engine(steps=2)
    engine.save_checkpoint(lab.path("set"))
    p = engine.module.conv
    before = safe_get_full_optimizer_state(p, "exp_avg")
    take_step(engine, 7)
    engine.load_checkpoint(lab.path("set"))
    assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), before)
    safe_set_full_optimizer_state(p, constant(p, -0.3), "exp_avg")
    assert sum((m == -0.3).sum().item() for m in snapshot(engine).moments) > 1000


@behaviour("entries and keys of other code are saved and loaded, and reports omit them", *ALL)
def other_entries(lab):
    engine, loaded = lab.engine(steps=1), lab.engine()
    base, other = base_optimizer(engine), base_optimizer(loaded)
    for flat, state in base.state.items():
        state |= {"slow": flat.detach() + 1, "every": 5}
    base.state["round"] = {"of": 3}
    engine.save_checkpoint(lab.path("other"))
    loaded.load_checkpoint(lab.path("other"))
    assert other.state.pop("round") == base.state.pop("round") == {"of": 3}
    for ours, theirs in zip(base.state.values(), other.state.values(), strict=True):
        assert torch.equal(ours["slow"], theirs["slow"]) and theirs["every"] == 5
    for one, its in ((base, engine), (other, loaded)):
        one.state["round"] = True
        take_step(its, 1)
        assert one.memory_report().rows
        del one.state["round"]
    assert_same(snapshot(engine), snapshot(loaded))


@behaviour(
    "zero_to_fp32 gives the masters of all groups, without DeepSpeed",
    "zero1",
    "zero2 offload",
    "zero3 offload",
)
def to_fp32(lab):
    engine = lab.engine(steps=2, groups=True)
    engine.save_checkpoint(lab.path("fp32"))
    torch.distributed.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(lab.path("fp32"))
    for name, p in params(engine):
        assert torch.equal(weights[name], safe_get_full_fp32_param(p)), name


# --- Offload states (test_offload_states.py) -----------------------------------------------------


def moved_and_back(lab, *kinds, pin_memory=False, groups=False):
    """Train on after moving states away and back; return whether nothing came of it."""
    moved, stayed = (lab.engine(steps=2, groups=groups) for _ in range(2))
    include = [OffloadStateTypeEnum(kind) for kind in kinds] or None
    moved.offload_states(include=include, pin_memory=pin_memory)
    moved.reload_states()
    for engine in (moved, stayed):
        take_step(engine, 2)
    assert_same(snapshot(moved), snapshot(stayed))
    return moved


@behaviour("moments of all groups can be read and set after reload_states", "zero1", "zero2")
def offloaded_state_set(lab):
    engine = moved_and_back(lab, groups=True)
    for name, p in params(engine, ON_BOTH_RANKS):
        safe_set_full_optimizer_state(p, constant(p, 0.0625), "exp_avg_sq")
        assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg_sq"), constant(p, 0.0625)), (
            name
        )
    assert sum((m == 0.0625).sum().item() for m in snapshot(engine).moments) > 5000


@behaviour("offload_states of a host-offloaded optimizer leaves it alone", "zero2 offload")
def offload_offloaded(lab):
    moved_and_back(lab)


# --- Running them --------------------------------------------------------------------------------


def run_cases(cases, folder):
    """Run (layout, behaviour) cases; return for each None, or the error's text."""
    # A rank that waits for one that has failed must not wait for long.
    deepspeed.init_distributed(timeout=timedelta(seconds=TIMEOUT_S), verbose=False)
    results, labs = {}, {}
    for layout, name in cases:
        print(f"=== {layout}: {name}", flush=True)
        lab = labs.setdefault(layout, Lab(layout, Path(folder)))
        try:
            BEHAVIOURS[name].check(lab)
            error = None
        except Exception as caught:  # a failure is a result, and the next case must still run
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"
        results[layout, name] = everywhere(error)
    return results
