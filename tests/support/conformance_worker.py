# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's own tests ask of an optimizer, as small checks that run on two ranks.

The checks know nothing of 8-bit states: fp32 AdamW runs through them too.  Where a value cannot
survive 8 bits, they write values that do: blocks of one number, a square for second moments.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ranks import error_of
from zero_worker import MOMENTS, Bag, base_optimizer, config, make_engine, take_step

OPTIMIZERS = {"ours": {"optimizer": "Adam8bitBlockwise"}, "AdamW": {"optimizer": "AdamW"}}

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
OFFLOADED = ("zero2 offload", "zero3 offload")
STAGE3 = ("zero3", "zero3 offload")

TIMEOUT_S = 120
GROUPS = (("embed", "single"), ("wide", "bias", "thin", "frozen"), ("long", "conv", "unused"))
# Parameters that lie on both ranks come first: where a read fails, it fails on both then.
READ = ("conv", "embed", "wide", "long", "thin", "bias")
ON_BOTH_RANKS = ("embed", "bias", "conv")  # one of each group


@dataclass
class Lab:
    """One optimizer in one layout: makes engines, and keeps one that has stepped for all checks."""

    optimizer: str
    layout: str
    folder: Path
    kept: object = None

    def config(self, **changes) -> dict:
        options = LAYOUTS[self.layout]
        torch_adam = {"torch_adam": True} if self.optimizer == "AdamW" else {}
        made = config(**OPTIMIZERS[self.optimizer], **torch_adam, **options)
        if self.layout == "bf16 optimizer":
            made["data_types"] = {"grad_accum_dtype": "fp32"}
        for key, value in changes.items():
            made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
        return made

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
        return str(self.folder / f"{self.optimizer} {self.layout} {name}".replace(" ", "_"))


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


def together(call):
    """Call; raise on both ranks if it fails on one of them."""
    caught = error_of(call)
    error = caught and ": ".join(caught)
    if failed := everywhere(error):
        raise AssertionError(failed)


def everywhere(error):
    """Return the errors of both ranks as one text, None if there are none."""
    errors = [None, None]
    torch.distributed.all_gather_object(errors, error)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text) or None


def backward(engine, step):
    loss = engine(step)
    engine.backward(loss)


# --- Tensor fragments (DeepSpeed's test_zero_tensor_fragment.py) ---------------------------------


@behaviour("safe_get_full_fp32_param is the master of the module's weight on all ranks", *ALL)
def full_param_get(lab):
    engine = lab.stepped()
    for name, p in params(engine):
        full = safe_get_full_fp32_param(p)
        assert full.dtype == torch.float32 and full.shape == Bag.SHAPES[name]
        assert_all_ranks_have(full)
        with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
            assert torch.equal(full.to(p.dtype), p.detach()), name


@behaviour("safe_set_full_fp32_param is read back and is where the next step starts", *ALL)
def full_param_set(lab):
    engine = lab.engine(steps=1)
    for _, p in params(engine, ("wide", "conv")):
        safe_set_full_fp32_param(p, constant(p, 3.0))
        assert torch.equal(safe_get_full_fp32_param(p), constant(p, 3.0))
    take_step(engine, 1)
    for _, p in params(engine, ("wide", "conv")):
        distance = (safe_get_full_fp32_param(p) - 3.0).abs()
        assert 0 < distance.max() < 0.1


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


@behaviour("safe_get_full_grad is the averaged gradient between backward and step", *ALL)
def full_grad_get(lab):
    engine = lab.engine(steps=1)
    backward(engine, 5)
    expected = Bag()
    expected(5).backward()
    for name, p in params(engine):
        got, grad = safe_get_full_grad(p), getattr(expected, name).grad
        assert torch.equal(got.float(), grad.to(p.dtype).float()), name
    engine.step()


@behaviour("safe_set_full_grad replaces the gradient of the step", "zero2", "zero3 offload")
def full_grad_set(lab):
    engine, plain = lab.engine(steps=1), lab.engine(steps=1)
    before = safe_get_full_optimizer_state(engine.module.wide, "exp_avg").clone()
    for each in (engine, plain):
        backward(each, 5)
    safe_set_full_grad(engine.module.wide, torch.zeros(Bag.SHAPES["wide"]))
    for each in (engine, plain):
        each.step()
    after = safe_get_full_optimizer_state(engine.module.wide, "exp_avg")
    # 0.9 of what it was, to one code of 1/16 of the value or of the block's smallest
    assert ((after - 0.9 * before).abs() <= before.abs() / 16 + before.abs().max() / 256).all()
    assert not torch.equal(after, safe_get_full_optimizer_state(plain.module.wide, "exp_avg"))
    ours, theirs = (safe_get_full_fp32_param(e.module.conv) for e in (engine, plain))
    assert torch.equal(ours, theirs)


@behaviour("safe_update_full_grad_vectorized scales all gradients", "zero2", "zero3 offload")
def full_grads_update(lab):
    engine = lab.engine(steps=1)
    backward(engine, 5)
    trained = [p for name, p in params(engine) if name != "bias"]  # odd: see odd_param_set
    before = [safe_get_full_grad(p).clone() for p in trained]
    safe_update_full_grad_vectorized(trained, lambda grad, p: grad * 2.0)
    for p, old in zip(trained, before, strict=True):
        assert torch.equal(safe_get_full_grad(p), old * 2.0)
    engine.step()


@behaviour("local fp32 parameters are read and written on their rank", *STAGE3)
def local_param(lab):
    engine = lab.engine(steps=1)
    for _, p in params(engine, ("wide", "conv")):
        safe_set_local_fp32_param(p, torch.full_like(safe_get_local_fp32_param(p), 0.5))
        assert torch.equal(
            safe_get_local_fp32_param(p).clone(), torch.full((p.ds_numel // 2,), 0.5)
        )
        assert torch.equal(safe_get_full_fp32_param(p), constant(p, 0.5))


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


@behaviour("local gradients are read and written on their rank", *STAGE3)
def local_grad(lab):
    engine = lab.engine(steps=1)
    backward(engine, 5)
    for _, p in params(engine, ("wide", "conv")):
        grad = safe_get_local_grad(p).clone()
        safe_set_local_grad(p, grad * 4.0)
        assert torch.equal(safe_get_local_grad(p), grad * 4.0)
    engine.step()


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


@behaviour(
    "safe_set of a parameter with an odd number of elements", "zero2 offload", "zero3 offload"
)
def odd_param_set(lab):
    engine = lab.engine(steps=1)
    p = engine.module.bias
    together(lambda: safe_set_full_fp32_param(p, constant(p, 0.5)))
    assert torch.equal(safe_get_full_fp32_param(p), constant(p, 0.5))


# --- ZeRO checkpoints (test_zero_optimizer.py) ---------------------------------------------------


@behaviour("a checkpoint restores masters, moments, steps and learning rates", *ALL)
def checkpoint_all(lab):
    saved = lab.engine(steps=2, groups=True)
    saved.save_checkpoint(lab.path("all"))
    loaded = lab.engine(groups=True)
    loaded.load_checkpoint(lab.path("all"))
    assert_same(snapshot(saved), snapshot(loaded))
    for engine in (saved, loaded):
        take_step(engine, 2)
    assert_same(snapshot(saved), snapshot(loaded))


@behaviour("a checkpoint loads into an engine that has gone elsewhere", *ALL)
def checkpoint_back(lab):
    engine = lab.engine(steps=2)
    engine.save_checkpoint(lab.path("back"))
    before = snapshot(engine)
    for step in (7, 8):
        take_step(engine, step)
    engine.load_checkpoint(lab.path("back"))
    assert_same(before, snapshot(engine))


@behaviour("load_optimizer_states=False restores weights and leaves moments", *ALL)
def checkpoint_weights(lab):
    saved = lab.engine(steps=2)
    saved.save_checkpoint(lab.path("weights"))
    loaded = lab.engine()
    loaded.load_checkpoint(lab.path("weights"), load_optimizer_states=False)
    assert snapshot(loaded).moments == []
    for (name, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        ours, theirs = safe_get_full_fp32_param(p), safe_get_full_fp32_param(q)
        assert torch.equal(ours.to(p.dtype), theirs.to(q.dtype)), name


@behaviour("load_module_only restores the module's weights only", *OFFLOADED)
def checkpoint_module(lab):
    saved = lab.engine(steps=2)
    saved.save_checkpoint(lab.path("module"))
    loaded = lab.engine()
    loaded.load_checkpoint(lab.path("module"), load_module_only=True)
    for (name, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        with deepspeed.zero.GatheredParameters([p, q] if hasattr(p, "ds_id") else []):
            assert torch.equal(p, q), name
    assert snapshot(loaded).moments == []


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


@behaviour("an elastic checkpoint restores moments", "zero1", "zero2 offload")
def checkpoint_elastic(lab):
    elastic = {"zero_optimization": {"elastic_checkpoint": True}}
    saved, loaded = lab.engine(steps=2, **elastic), lab.engine(**elastic)
    saved.save_checkpoint(lab.path("elastic"))
    loaded.load_checkpoint(lab.path("elastic"))
    for (_, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        assert torch.equal(safe_get_full_fp32_param(p), safe_get_full_fp32_param(q))
    take_step(saved, 2), take_step(loaded, 2)
    for (_, p), (_, q) in zip(params(saved), params(loaded), strict=True):
        difference = safe_get_full_fp32_param(p) - safe_get_full_fp32_param(q)
        assert difference.abs().max() <= 1e-2 / 16  # a code of lr


@behaviour("a checkpoint carries client state and the learning-rate schedule", *ALL)
def checkpoint_schedule(lab):
    def scheduled():
        halving = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
        return lab.engine(scheduler=halving)

    saved, loaded = scheduled(), scheduled()
    for step in range(3):
        take_step(saved, step)
    saved.save_checkpoint(lab.path("schedule"), client_state={"note": 17})
    _, client = loaded.load_checkpoint(lab.path("schedule"))
    assert client["note"] == 17
    for step in (3, 4):
        take_step(saved, step), take_step(loaded, step)
        assert saved.get_lr() == loaded.get_lr()
        assert saved.get_lr()[0] > 0
    assert_same(snapshot(saved), snapshot(loaded))


@behaviour(
    "a client's LambdaLR sets the rate of every group's step", "zero2 offload", "zero3 offload"
)
def client_schedule(lab):
    def halving(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    bag = Bag()
    engine, *_ = deepspeed.initialize(
        model=bag,
        model_parameters=list(bag.parameters()),
        lr_scheduler=halving,
        config=lab.config(),
    )
    rates, moves = [], []
    for _ in range(3):
        before = safe_get_full_fp32_param(bag.single).clone()
        rates.append(engine.get_lr()[0])
        take_step(engine, 0)  # the same gradient: steps of the rate's size
        moves.append((safe_get_full_fp32_param(bag.single) - before).abs().item())
    assert rates == [1e-2, 5e-3, 2.5e-3]
    for rate, move in zip(rates, moves, strict=True):
        assert abs(move - rate) <= rate * 0.05


@behaviour("zero_to_fp32 gives the masters of all groups, without DeepSpeed", *ALL)
def to_fp32(lab):
    engine = lab.engine(steps=2, groups=True)
    engine.save_checkpoint(lab.path("fp32"))
    torch.distributed.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(lab.path("fp32"))
    for name, p in params(engine):
        assert torch.equal(weights[name], safe_get_full_fp32_param(p)), name


@behaviour("zero_to_fp32 gives a frozen weight", *ALL)
def to_fp32_frozen(lab):
    engine = lab.engine(steps=1)
    engine.save_checkpoint(lab.path("frozen"))
    torch.distributed.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(lab.path("frozen"))
    assert torch.equal(weights["frozen"], Bag().frozen.to(engine.module.frozen.dtype).float())


@behaviour("zero_to_fp32 gives both names of a weight tied within one module", *OFFLOADED)
def to_fp32_tied(lab):
    engine = lab.engine(steps=1)
    engine.save_checkpoint(lab.path("tied"))
    torch.distributed.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(lab.path("tied"))
    assert torch.equal(weights["tied"], weights["embed"])


@behaviour("save_16bit_model writes the module's weights", *ALL)
def save_16bit(lab):
    gather = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = lab.engine(steps=2, groups=True, zero_optimization=gather)
    assert engine.save_16bit_model(lab.path("16bit"))
    torch.distributed.barrier()
    weights = torch.load(f"{lab.path('16bit')}/pytorch_model.bin")
    for name, p in params(engine):
        with deepspeed.zero.GatheredParameters([p] if hasattr(p, "ds_id") else []):
            assert torch.equal(weights[name], p), name


@behaviour("save_16bit_model of ZeRO-3 that may not gather says so", "zero3 offload")
def save_16bit_not(lab):
    engine = lab.stepped()
    assert engine.save_16bit_model(lab.path("no 16bit")) is False


# --- Universal checkpoints (test_universal_checkpoint.py) ----------------------------------------


@behaviour("a universal checkpoint restores masters, moments and step", *ALL)
def universal(lab):
    saved = lab.engine(steps=2)
    saved.save_checkpoint(lab.path("universal"), tag="saved")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        convert(f"{lab.path('universal')}/saved", f"{lab.path('universal')}/universal")
        Path(f"{lab.path('universal')}/latest_universal").write_text("universal")
    torch.distributed.barrier()
    loaded = lab.engine(checkpoint={"load_universal": True})
    loaded.load_checkpoint(lab.path("universal"), tag="universal")
    ours, theirs = snapshot(saved), snapshot(loaded)
    assert_same(ours, theirs)
    take_step(saved, 2), take_step(loaded, 2)
    ours, theirs = snapshot(saved), snapshot(loaded)
    assert ours.steps == theirs.steps
    for name in ours.masters:
        difference = ours.masters[name] - theirs.masters[name]
        assert difference.abs().max() <= 1e-2 / 16, name  # codes of blocks that ranks cut


def convert(source, target):
    ds_to_universal.main(
        SimpleNamespace(
            input_folder=source,
            output_folder=target,
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def save_universal(pairs, folder):
    """Of (optimizer, layout) pairs: save, convert, step once more; return the masters of both."""
    deepspeed.init_distributed(timeout=timedelta(seconds=TIMEOUT_S), verbose=False)
    results = {}
    for optimizer, layout in pairs:
        lab = Lab(optimizer, layout, Path(folder))
        engine = lab.engine(steps=2)
        engine.save_checkpoint(lab.path("resharded"), tag="saved")
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            convert(f"{lab.path('resharded')}/saved", f"{lab.path('resharded')}/universal")
            Path(f"{lab.path('resharded')}/latest_universal").write_text("universal")
        saved = snapshot(engine).masters
        take_step(engine, 2)
        results[optimizer, layout] = saved, snapshot(engine).masters
    return results


def load_universal(pairs, folder):
    """Load what `save_universal` saved, at another world size, and step; return the same."""
    results = {}
    for optimizer, layout in pairs:
        lab = Lab(optimizer, layout, Path(folder))
        engine = lab.engine(checkpoint={"load_universal": True})
        engine.load_checkpoint(lab.path("resharded"), tag="universal")
        loaded = snapshot(engine).masters
        take_step(engine, 2)
        results[optimizer, layout] = loaded, snapshot(engine).masters
    return results


# --- CPU Adam (test_cpu_adam.py) -----------------------------------------------------------------


@behaviour("the first step is Adam's: the rate, against the gradient", *ALL)
def first_step(lab):
    engine = lab.engine()
    before = {name: safe_get_full_fp32_param(p).clone() for name, p in params(engine)}
    take_step(engine, 0)
    expected = Bag()
    expected(0).backward()
    for name, p in params(engine):
        grad = getattr(expected, name).grad
        sizable = grad.abs() > 1e-4  # eps is 1e-8
        step = safe_get_full_fp32_param(p) - before[name] * (1 - 1e-4)
        assert (step + 1e-2 * grad.sign())[sizable].abs().max() < 1e-2 * 2e-3, name


@behaviour("sub-groups of any size step to the same weights", "zero3", "zero3 offload")
def sub_groups(lab):
    whole = lab.engine(steps=3)
    cut = lab.engine(steps=3, zero_optimization={"sub_group_size": 5000})
    assert len(base_optimizer(cut).state) > len(base_optimizer(whole).state)
    for (name, p), (_, q) in zip(params(whole), params(cut), strict=True):
        assert torch.equal(safe_get_full_fp32_param(p), safe_get_full_fp32_param(q)), name


@behaviour("groups step with rates of their own", *ALL)
def group_rates(lab):
    engine = lab.engine(groups=True)
    before = {name: safe_get_full_fp32_param(p).clone() for name, p in params(engine)}
    take_step(engine, 0)
    for number, name in enumerate(("embed", "wide", "long")):
        moved = safe_get_full_fp32_param(getattr(engine.module, name)) - before[name]
        largest = moved.abs().max().item()
        assert abs(largest * (number + 1) - 1e-2) < 1e-3, (name, largest)


@behaviour("the step counts are those of the engine", *ALL)
def step_counts(lab):
    engine = lab.engine(steps=3, groups=True)
    assert set(snapshot(engine).steps) == {3} and engine.global_steps == 3


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


@behaviour("offload_states of everything and reload_states change nothing", "zero1", "zero2")
def offload_all(lab):
    moved_and_back(lab)


@behaviour("offload_states of optimizer states changes nothing", "zero1", "zero2")
def offload_optimizer(lab):
    moved_and_back(lab, "optim_states")


@behaviour("offload_states of optimizer states in pinned memory changes nothing", "zero2")
def offload_pinned(lab):
    moved_and_back(lab, "optim_states", pin_memory=True)


@behaviour("offload_states of master weights changes nothing", "zero1", "zero2")
def offload_masters(lab):
    moved_and_back(lab, "hp_params")


@behaviour("offload_states of module weights changes nothing", "zero2", "zero3")
def offload_weights(lab):
    moved_and_back(lab, "lp_params")


@behaviour("offload_states of gradient buffers changes nothing", "zero2", "zero3")
def offload_grads(lab):
    moved_and_back(lab, "lp_grads", "contiguous_grad_buffer")


@behaviour("offload_states of optimizer states in ZeRO-3", "zero3")
def offload_optimizer_stage3(lab):
    moved_and_back(lab, "optim_states")


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


# --- Overflow, clipping, accumulation (half_precision, test_zero.py) -----------------------------


@behaviour("a step with an infinite gradient on one rank is skipped on all", "zero2 offload bf16")
def overflow_bf16(lab):
    engine = lab.engine(steps=2, bf16={"check_grad_overflow": True})
    overflow(engine)


@behaviour(
    "a step with NaN gradients in fp32 is skipped on all ranks", "zero2 offload", "zero3 offload"
)
def overflow_fp32(lab):
    overflow(lab.engine(steps=2))


def overflow(engine):
    before, skipped = snapshot(engine), engine.skipped_steps
    take_step(engine, 2, "wide" if os.environ["RANK"] == "1" else None)
    assert engine.skipped_steps == skipped + 1
    assert_same(before, snapshot(engine))
    take_step(engine, 3)
    assert snapshot(engine).steps == [step + 1 for step in before.steps]


FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}


def fp16_engine(lab, **changes):
    # This machine's processor may lack fp16 arithmetic that DeepSpeed asks for; torch has its own.
    accelerator = get_accelerator()
    supported, accelerator.is_fp16_supported = accelerator.is_fp16_supported, lambda: True
    try:
        return lab.engine(fp16={**FP16, **changes})
    finally:
        accelerator.is_fp16_supported = supported


@behaviour(
    "fp16: an overflow halves the loss scale and skips the step", "zero2 offload", "zero3 offload"
)
def fp16_overflow(lab):
    engine = fp16_engine(lab)
    take_step(engine, 0)
    scale = engine.optimizer.cur_scale
    overflow(engine)
    assert engine.optimizer.cur_scale in (scale / 2, scale)  # the window may double it again


@behaviour("fp16: steps without overflow double the loss scale", *OFFLOADED)
def fp16_growth(lab):
    engine = fp16_engine(lab)
    scale = engine.optimizer.cur_scale
    for step in range(3):
        take_step(engine, step)
    assert engine.optimizer.cur_scale > scale


@behaviour("fp16: a checkpoint restores masters, moments and the loss scale", "zero2 offload")
def fp16_checkpoint(lab):
    saved, loaded = fp16_engine(lab), fp16_engine(lab)
    for step in range(3):
        take_step(saved, step)
    saved.save_checkpoint(lab.path("fp16"))
    loaded.load_checkpoint(lab.path("fp16"))
    assert saved.optimizer.cur_scale == loaded.optimizer.cur_scale
    assert_same(snapshot(saved), snapshot(loaded))


@behaviour("gradients are clipped to the norm that the engine reports", *ALL)
def clipping(lab):
    engine = lab.engine(gradient_clipping=1e-3)
    plain = lab.engine()
    for each in (engine, plain):
        take_step(each, 0)
    norm = engine.get_global_grad_norm()
    assert norm == plain.get_global_grad_norm() > 1
    clipped, whole = (
        safe_get_full_optimizer_state(e.module.bias, "exp_avg") for e in (engine, plain)
    )  # fp32 moments: 0.1 g
    assert torch.allclose(clipped, whole * (1e-3 / norm), rtol=1e-4, atol=0)


@behaviour("gradients add up over accumulation steps, and only the last one steps", *ALL)
def accumulation(lab):
    engine = lab.engine(gradient_accumulation_steps=2)
    plain = lab.engine()
    before = safe_get_full_fp32_param(engine.module.wide).clone()
    take_step(engine, 0)
    assert torch.equal(safe_get_full_fp32_param(engine.module.wide), before)
    take_step(engine, 0)  # the average of the same gradient twice
    take_step(plain, 0)
    assert_same(snapshot(engine), snapshot(plain))


@behaviour("an engine that is destroyed leaves another one working", *ALL)
def destroy(lab):
    gone, stays = lab.engine(steps=1), lab.engine(steps=1)
    gone.destroy()
    take_step(stays, 1)
    assert set(snapshot(stays).steps) == {2}


# --- Running them --------------------------------------------------------------------------------


def run_cases(cases, folder):
    """Run (optimizer, layout, behaviour) cases; return for each None, or the error's text."""
    # A rank that waits for one that has failed must not wait for long.
    deepspeed.init_distributed(timeout=timedelta(seconds=TIMEOUT_S), verbose=False)
    results, labs = {}, {}
    for optimizer, layout, name in cases:
        print(f"=== {optimizer}, {layout}: {name}", flush=True)
        lab = labs.setdefault((optimizer, layout), Lab(optimizer, layout, Path(folder)))
        try:
            BEHAVIOURS[name].check(lab)
            error = None
        except Exception as caught:  # a failure is a result, and the next case must still run
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"
        results[optimizer, layout, name] = everywhere(error)
    return results
