# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own tests ask of an optimizer's states, asked of ours, on two ranks.

Nothing here knows of 8-bit states.  Where a value cannot survive 8 bits, what is written does:
blocks of one number, a square for second moments.
"""

from collections.abc import Callable

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from nests import assert_same
from params import each
from ranks import on_ranks
from zero_worker import (
    MOMENTS,
    Bag,
    base_optimizer,
    config,
    held,
    make_engine,
    moments_of,
    take_step,
)

LAYOUTS = {
    "zero1": config(stage=1, offload=None),
    "zero2": config(stage=2, offload=None),
    "zero2 offload": config(stage=2),
    "zero3": config(stage=3, offload=None),
    "zero3 offload": config(stage=3),
    "bf16 optimizer": config(stage=1, offload=None, dtype={})
    | {"data_types": {"grad_accum_dtype": "fp32"}},
}
FLAT = ("zero1", "zero2 offload", "bf16 optimizer")  # stages 1 and 2: views into flat partitions
ALL = (*FLAT, "zero3 offload")
STAGE3 = ("zero3", "zero3 offload")
QUICK = ("zero2 offload", "zero3 offload")

GROUPS = (("embed", "single"), ("wide", "bias", "thin", "frozen"), ("long", "conv", "unused"))
READ = ("conv", "embed", "wide", "long", "thin", "bias")
ON_BOTH_RANKS = ("embed", "bias", "conv")  # one of each group


def behaviour(*layouts: str, is_quick: bool = False) -> Callable:
    """Make a test of a function that two ranks run with each layout."""
    slow = [one for one in layouts if not is_quick or one not in QUICK]
    return lambda check: each(layouts, slow)(on_ranks(2)(check))


def engine_of(name, steps=0, groups=False):
    """Return a new engine over a `Bag`, after some steps."""
    bag = Bag()
    if groups:
        members = [[getattr(bag, name) for name in names] for names in GROUPS]
        groups = [{"params": p, "lr": 1e-2 / (i + 1)} for i, p in enumerate(members)]
    engine = make_engine(LAYOUTS[name], bag, groups or None)
    for step in range(steps):
        take_step(engine, step)
    return engine


def params(engine, names=READ):
    return [(name, getattr(engine.module, name)) for name in names]


def number_of(value, engine):
    """Return how many elements of this rank's moments have a value."""
    moments = [m for state in base_optimizer(engine).state.values() for m in moments_of(state)]
    return sum((m.clone() == value).sum().item() for m in moments)


def assert_all_ranks_have(tensor):
    """Check that rank 0 has the same."""
    theirs = tensor.detach().clone()
    torch.distributed.broadcast(theirs, src=0)
    assert torch.equal(theirs, tensor), "ranks have different values"


def constant(param, value):
    return torch.full(getattr(param, "ds_shape", param.shape), value)


# --- Tensor fragments (DeepSpeed's test_zero_tensor_fragment.py) ---------------------------------


@behaviour(*ALL, is_quick=True)
def test_full_moments_are_read_alike_on_all_ranks_after_every_step(name, tmp_path):
    """Those without a gradient are zero, and frozen parameters have none."""
    engine, read = engine_of(name, groups=True), []
    for step in range(2):
        take_step(engine, step)
        read.append(
            [safe_get_full_optimizer_state(p, w) for _, p in params(engine) for w in MOMENTS]
        )
    for first, second in zip(*read, strict=True):
        assert first.dtype == torch.float32 and first.abs().max() > 0
        assert not torch.equal(first, second)
        assert_all_ranks_have(second)
    for which in MOMENTS:
        assert safe_get_full_optimizer_state(engine.module.unused, which).abs().max() == 0
        assert safe_get_full_optimizer_state(engine.module.frozen, which) is None
    assert safe_get_full_fp32_param(engine.module.frozen) is None


@behaviour(*ALL, is_quick=True)
def test_full_moments_are_written_and_leave_those_of_other_parameters(name, tmp_path):
    engine = engine_of(name, steps=1)
    others = [p for _, p in params(engine, ("embed", "long"))]
    before = [safe_get_full_optimizer_state(p, w) for p in others for w in MOMENTS]
    for _, p in params(engine, ("wide", "conv", "thin")):
        for which, value in zip(MOMENTS, (-0.3, 0.0625), strict=True):
            safe_set_full_optimizer_state(p, constant(p, value), which)
            assert torch.equal(safe_get_full_optimizer_state(p, which), constant(p, value)), which
    after = [safe_get_full_optimizer_state(p, w) for p in others for w in MOMENTS]
    assert all(map(torch.equal, before, after))


@behaviour(*ALL)
def test_step_after_full_moments_were_written_goes_where_they_say(name, tmp_path):
    engine = engine_of(name, steps=1)
    (_, p), *_ = params(engine, ("wide",))
    for which, value in zip(MOMENTS, (-100.0, 10000.0), strict=True):
        safe_set_full_optimizer_state(p, constant(p, value), which)
    before = safe_get_full_fp32_param(p).clone()
    take_step(engine, 1)
    # Step 2 of betas .9, .999: 90/.19 / sqrt(9990/.001999) = .212 of lr 1e-2, less the decay.
    moved = safe_get_full_fp32_param(p) - before * (1 - 1e-4)
    assert (moved - 0.212e-2).abs().max() < 0.212e-2 * 0.05


@behaviour(*STAGE3)
def test_local_moments_are_read_and_written_on_their_rank(name, tmp_path):
    engine = engine_of(name, steps=1)
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


# --- ZeRO checkpoints (test_zero_optimizer.py) ---------------------------------------------------


@behaviour(*FLAT)
def test_load_without_optimizer_states_restores_weights_and_leaves_moments(name, tmp_path):
    saved = engine_of(name, steps=2)
    saved.save_checkpoint(tmp_path)
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        loaded = engine_of(name)
        loaded.load_checkpoint(tmp_path, **options)
        assert not any(map(moments_of, base_optimizer(loaded).state.values()))
        for (_, p), (param, q) in zip(params(saved), params(loaded), strict=True):
            ours, theirs = safe_get_full_fp32_param(p), safe_get_full_fp32_param(q)
            assert torch.equal(ours.to(p.dtype), theirs.to(q.dtype)), param
            assert torch.equal(p, q), param


@behaviour(*ALL)
def test_checkpoint_from_before_the_first_step_loads_and_training_goes_on(name, tmp_path):
    saved, loaded = engine_of(name), engine_of(name, steps=1)
    saved.save_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path)
    for engine in (saved, loaded):
        take_step(engine, 0)
    assert_same(held(saved), held(loaded))


@behaviour(*ALL, is_quick=True)
def test_moments_are_read_from_a_loaded_engine_before_it_steps(name, tmp_path):
    saved, loaded = engine_of(name, steps=2), engine_of(name)
    saved.save_checkpoint(tmp_path, client_state={"note": 17})
    _, client_state = loaded.load_checkpoint(tmp_path)
    assert client_state["note"] == 17
    for (_, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        for which in MOMENTS:
            ours, theirs = (safe_get_full_optimizer_state(x, which) for x in (p, q))
            assert_same(ours, theirs)


@behaviour(*ALL)
def test_moments_are_read_and_set_when_an_engine_that_had_stepped_has_loaded(name, tmp_path):
    engine = engine_of(name, steps=2)
    engine.save_checkpoint(tmp_path)
    p = engine.module.conv
    before = safe_get_full_optimizer_state(p, "exp_avg")
    take_step(engine, 7)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), before)
    safe_set_full_optimizer_state(p, constant(p, -0.3), "exp_avg")
    assert number_of(-0.3, engine) > 1000


@behaviour(*ALL, is_quick=True)
def test_entries_of_other_code_are_saved_and_loaded_and_reports_omit_them(name, tmp_path):
    engine, loaded = engine_of(name, steps=1), engine_of(name)
    base, other = base_optimizer(engine), base_optimizer(loaded)
    for flat, state in base.state.items():
        state |= {"slow": flat.detach() + 1, "every": 5}
    base.state["round"] = {"of": 3}
    engine.save_checkpoint(tmp_path)
    loaded.load_checkpoint(tmp_path)
    assert other.state.pop("round") == base.state.pop("round") == {"of": 3}
    for ours, theirs in zip(base.state.values(), other.state.values(), strict=True):
        assert torch.equal(ours["slow"], theirs["slow"]) and theirs["every"] == 5
    for one, its in ((base, engine), (other, loaded)):
        one.state["round"] = True
        take_step(its, 1)
        assert one.memory_report().rows
        del one.state["round"]
    assert_same(held(engine), held(loaded))


@behaviour("zero1", "zero2 offload", "zero3 offload", is_quick=True)
def test_zero_to_fp32_gives_the_masters_of_all_groups(name, tmp_path):
    engine = engine_of(name, steps=2, groups=True)
    engine.save_checkpoint(tmp_path)
    torch.distributed.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name, p in params(engine):
        assert torch.equal(weights[name], safe_get_full_fp32_param(p)), name


# --- Offload states (test_offload_states.py) -----------------------------------------------------


@behaviour("zero1", "zero2", "zero2 offload")
def test_states_that_were_offloaded_and_reloaded_go_on_and_are_read_and_set(name, tmp_path):
    moved, stayed = (engine_of(name, steps=2, groups=True) for _ in range(2))
    moved.offload_states(pin_memory=False)
    moved.reload_states()
    for engine in (moved, stayed):
        take_step(engine, 2)
    assert_same(held(moved), held(stayed))
    for _, p in params(moved, ON_BOTH_RANKS):
        safe_set_full_optimizer_state(p, constant(p, 0.0625), "exp_avg_sq")
        assert_same(safe_get_full_optimizer_state(p, "exp_avg_sq"), constant(p, 0.0625))
    assert number_of(0.0625, moved) > 5000
