# SPDX-License-Identifier: Apache-2.0
"""The table of ZeRO modes, and what the ranks do in one cell of it."""

import gc
import math
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
from deepspeed.moe.layer import MoE
from zero_worker import Model, base_optimizer, batch, config, held, make_engine

BF16 = {"enabled": True}
MASTERS = BF16 | {"bf16_master_weights_and_grads": True}
# Starts so high that the first steps overflow, and rises again during the training.
FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": BF16},
    "accum32": {"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    "masters": {"bf16": MASTERS},
    "states": {"bf16": MASTERS | {"bf16_optimizer_states": True}},
    "fp16": {"fp16": FP16},
}


@dataclass(frozen=True)
class Cell:
    """One mode of ZeRO and what is varied with it.

    `precision` and `model` are of PRECISIONS and MODELS; `zero` and `options` are more of the
    config.  In the step `poisoned` the second rank has an infinite loss.  `resumes` says whether
    fp32 AdamW resumes exactly in a fresh engine, and we must.  `make test` runs the `quick` cells.
    """

    stage: int
    offload: str | None
    precision: str
    model: str = "net"
    zero: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    poisoned: int | None = None
    client_scheduler: bool = False
    resumes: bool = True
    quick: bool = False

    @property
    def accumulated(self) -> int:
        """Number of micro-batches to a step."""
        return self.options.get("gradient_accumulation_steps", 1)

    def config(self, world_size: int, optimizer: str) -> dict:
        """Return the DeepSpeed config; a single rank gets the batches of all."""
        made = config(self.stage, self.offload, optimizer=optimizer, zero=self.zero)
        made["optimizer"]["params"]["lr"] = LR
        made["train_micro_batch_size_per_gpu"] = MICRO * RANKS // world_size
        precision = self.precision
        if optimizer == "AdamW":
            made["optimizer"]["params"]["torch_adam"] = True
            # torch's AdamW would keep its moments in bfloat16, too.
            precision = {"masters": "bf16", "states": "bf16"}.get(precision, precision)
        return made | PRECISIONS[precision] | self.options


RANKS, MICRO, LR = 2, 4, 5e-3
STEPS, SAVED_AFTER = 10, 6

GAS = {"gradient_accumulation_steps": 2}
CLIP = {"gradient_clipping": 0.5}
TIMERS = {"wall_clock_breakdown": True}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 4}}}
ONE_CYCLE = {
    "scheduler": {
        "type": "OneCycle",
        "params": {
            "cycle_min_lr": LR / 5,
            "cycle_max_lr": LR,
            "cycle_first_step_size": 4,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
        },
    }
}
SMALL_SUB_GROUPS = {"sub_group_size": 5000}
ROUND_ROBIN = {"round_robin_gradients": True}
NO_SCATTER = {"reduce_scatter": False}
AUTOCAST_FP16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}

# BF16_Optimizer serves zero1_accum32 only; FP16_UnfusedOptimizer serves stage 0 in bf16 and fp16.
# What the optimizer sees: float32 masters and gradients everywhere, bfloat16 ones in the precisions
# "masters" and "states"; never float16.  Other optimizers than ours and DeepSpeed's on the CPU get
# bfloat16 masters in "states" without offload only.
# DeepSpeed 0.19.8 treats every optimizer alike here:
# * Stage 0 in bf16 and fp16 takes a step with zero gradients before the first.
# * Stage 0 in fp16 divides gradients by the loss scale, but never multiplies the loss by it.
# * Stage 3 under autocast resumes in a fresh engine with other gradients (last digits) than before.
# * Stage 3, and experts with offload, keep the optimizer alive when the engine is destroyed.
CELLS = {
    "zero0_fp32": Cell(0, None, "fp32", "odd", options=GAS | CLIP | WARMUP, quick=True),
    "zero0_bf16": Cell(0, None, "bf16", "groups", options=CLIP | ONE_CYCLE, poisoned=3),
    "zero0_fp16": Cell(0, None, "fp16", "odd", options=CLIP, poisoned=3),
    "zero1_fp32": Cell(1, None, "fp32", "odd", zero=ROUND_ROBIN, options=GAS),
    "zero1_bf16": Cell(
        1, None, "bf16", "groups", options=CLIP, poisoned=3, client_scheduler=True, quick=True
    ),
    "zero1_accum32": Cell(
        1, None, "accum32", "odd", options=GAS | CLIP | WARMUP, poisoned=3, quick=True
    ),
    "zero1_masters": Cell(1, None, "masters", zero=NO_SCATTER),
    "zero1_states": Cell(1, None, "states", "groups", options=GAS),
    "zero1_fp16": Cell(1, None, "fp16", options=CLIP | ONE_CYCLE),
    "zero1_cpu_fp32": Cell(1, "cpu", "fp32", "groups", options=CLIP, poisoned=3, quick=True),
    "zero1_cpu_bf16": Cell(1, "cpu", "bf16", "odd", options=GAS),
    "zero1_cpu_masters": Cell(1, "cpu", "masters", options=CLIP | WARMUP, poisoned=3),
    "zero1_cpu_states": Cell(1, "cpu", "states", "odd", zero=ROUND_ROBIN),
    "zero1_cpu_fp16": Cell(1, "cpu", "fp16", "odd", options=GAS),
    "zero2_fp32": Cell(2, None, "fp32", "groups", zero=NO_SCATTER, options=CLIP | ONE_CYCLE),
    "zero2_bf16": Cell(2, None, "bf16", "odd", options=GAS | CLIP | TIMERS, poisoned=3, quick=True),
    "zero2_accum32": Cell(2, None, "accum32", "groups", options=GAS),
    "zero2_masters": Cell(
        2, None, "masters", "odd", zero=ROUND_ROBIN, options=CLIP, client_scheduler=True
    ),
    "zero2_states": Cell(2, None, "states", options=GAS | WARMUP),
    "zero2_fp16": Cell(2, None, "fp16", "groups", zero=ROUND_ROBIN, options=GAS),
    "zero2_cpu_fp32": Cell(2, "cpu", "fp32", "odd", zero=ROUND_ROBIN, options=GAS | TIMERS),
    "zero2_cpu_bf16": Cell(2, "cpu", "bf16", "groups", options=GAS | ONE_CYCLE, quick=True),
    "zero2_cpu_masters": Cell(2, "cpu", "masters", "odd", options=GAS, poisoned=3),
    "zero2_cpu_states": Cell(2, "cpu", "states", zero=NO_SCATTER, options=CLIP),
    "zero2_cpu_fp16": Cell(2, "cpu", "fp16", "odd", options=CLIP | TIMERS),
    "zero3_fp32": Cell(3, None, "fp32", "odd", options=GAS | CLIP),
    "zero3_bf16": Cell(3, None, "bf16", "groups", zero=SMALL_SUB_GROUPS, poisoned=3),
    "zero3_accum32": Cell(3, None, "accum32", "odd", options=GAS),
    "zero3_masters": Cell(3, None, "masters", options=CLIP | WARMUP),
    "zero3_states": Cell(3, None, "states", "groups", zero=NO_SCATTER, options=GAS),
    "zero3_fp16": Cell(3, None, "fp16", "odd", zero=SMALL_SUB_GROUPS),
    "zero3_cpu_fp32": Cell(3, "cpu", "fp32", "groups", zero=NO_SCATTER, options=CLIP | TIMERS),
    "zero3_cpu_bf16": Cell(
        3, "cpu", "bf16", "odd", zero=SMALL_SUB_GROUPS, options=GAS | CLIP, poisoned=3, quick=True
    ),
    "zero3_cpu_masters": Cell(3, "cpu", "masters", "odd", zero=SMALL_SUB_GROUPS, poisoned=3),
    "zero3_cpu_states": Cell(3, "cpu", "states", options=GAS | ONE_CYCLE),
    "zero3_cpu_fp16": Cell(3, "cpu", "fp16", "groups", options=GAS | CLIP, client_scheduler=True),
    "zero0_moe": Cell(0, None, "fp32", "experts"),
    "zero1_moe": Cell(1, None, "fp32", "local experts", zero=ROUND_ROBIN, options=GAS),
    "zero1_accum32_moe": Cell(1, None, "accum32", "experts", options=CLIP),
    "zero1_cpu_moe": Cell(1, "cpu", "bf16", "experts", options=CLIP),
    "zero2_moe": Cell(2, None, "bf16", "experts", options=GAS),
    "zero2_moe_fp16": Cell(2, None, "fp16", "local experts", options=CLIP),
    "zero2_cpu_moe": Cell(2, "cpu", "bf16", "local experts", options=CLIP),
    "zero2_cpu_moe_states": Cell(2, "cpu", "states", "experts", options=GAS),
    "zero1_aligned": Cell(1, None, "bf16", "odd", zero={"parameter_alignment": True}),
    "zero2_overlap": Cell(2, None, "bf16", "odd", zero={"overlap_comm": True}, options=GAS),
    "zero2_not_contiguous": Cell(2, None, "fp32", "odd", zero={"contiguous_gradients": False}),
    "zero0_autocast_fp16": Cell(0, None, "fp32", options=AUTOCAST_FP16),
    "zero2_autocast": Cell(2, None, "fp32", options=AUTOCAST),
    "zero2_cpu_autocast_fp16": Cell(2, "cpu", "fp32", options=AUTOCAST_FP16, poisoned=3),
    "zero3_cpu_autocast": Cell(3, "cpu", "fp32", options=AUTOCAST | GAS, resumes=False),
    "zero3_cpu_params": Cell(3, "cpu", "masters", "odd", zero={"offload_param": {"device": "cpu"}}),
    "zero3_hpz": Cell(3, None, "bf16", "odd", zero={"zero_hpz_partition_size": 2}, options=GAS),
}


class Odd(Model):
    """Tied, frozen and unused parameters, and one that is shorter than the ranks are many."""

    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(131, 96)
        self.head = torch.nn.Linear(96, 67, bias=False)
        torch.nn.init.normal_(self.embed.weight, std=0.2)
        self.head.weight = self.embed.weight
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.unused = torch.nn.Parameter(torch.full((50, 100), 0.5))
        self.frozen = torch.nn.Parameter(torch.full((50, 100), 0.25), requires_grad=False)

    def logits(self, hidden):
        return self.head(self.down(hidden) * self.gain) * (4 * self.frozen[0, 0])


class Experts(Model):
    """Two experts in the middle, both on every rank or one on each."""

    def __init__(self, ep_size):
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(131, 64), torch.nn.Linear(64, 131))
        # All tokens count, so that the result does not depend on a random choice of them.
        self.moe = MoE(
            131, expert, num_experts=2, ep_size=ep_size, drop_tokens=False, use_rts=False
        )

    def logits(self, hidden):
        mixed, *_ = self.moe(hidden)
        return self.head(hidden + mixed)


MODELS = {
    "net": Model,
    "groups": Model,
    "odd": Odd,
    "experts": lambda: Experts(ep_size=1),
    "local experts": lambda: Experts(ep_size=2),
}


def groups_of(model):
    """Return two groups, with their own learning rates and weight decays."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 2 * LR},
    ]


def make(cell, optimizer):
    """Return a cell's engine over a freshly seeded model."""
    torch.manual_seed(7)
    model = MODELS[cell.model]()
    return make_engine(
        cell.config(int(os.environ["WORLD_SIZE"]), optimizer),
        model,
        groups_of(model) if cell.model == "groups" else None,
        lr_scheduler=decay if cell.client_scheduler else None,
    )


def decay(optimizer):
    """Return torch's own kind of learning-rate scheduler."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def micro_batch(number):
    """Return tokens and targets of a micro-batch; a single rank has those of all."""
    ranks = [int(os.environ["RANK"])] if os.environ["WORLD_SIZE"] != "1" else range(RANKS)
    parts = [batch(7000 + number, MICRO, rank) for rank in ranks]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def train(engine, cell, steps):
    """Train and return of each step its loss, learning rate, betas, and whether it was skipped."""
    log = []
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    for step in steps:
        total, skipped = 0.0, engine.skipped_steps
        for number in range(cell.accumulated):
            factor = math.inf if step == cell.poisoned and last else 1.0
            inputs = micro_batch(step * cell.accumulated + number)
            loss = engine(*(x.to(engine.device) for x in inputs))
            engine.backward(loss * factor)
            engine.step()
            total += loss.item() / cell.accumulated
        group = base_optimizer(engine).param_groups[0]
        log.append(
            {
                "loss": total,
                "lr": float(group["lr"]),
                "betas": tuple(group["betas"]),
                "skipped": engine.skipped_steps - skipped,
            }
        )
    return log


def run_cell(name, folder):
    """Train, save and go on; load into a fresh engine and go on; the same with fp32 AdamW."""
    cell, result = CELLS[name], {}
    for prefix, optimizer in (("", "Adam8bitBlockwise"), ("AdamW ", "AdamW")):
        engine, tag = make(cell, optimizer), f"{name} {optimizer}"
        log = train(engine, cell, range(SAVED_AFTER))
        result[f"{prefix}before"] = held(engine)
        engine.save_checkpoint(folder, tag=tag)
        result[f"{prefix}log"] = log + train(engine, cell, range(SAVED_AFTER, STEPS))
        result[f"{prefix}after"] = held(engine)
        result[f"{prefix}wrapper"] = type(engine.optimizer).__name__
        engine.destroy()
        engine = make(cell, optimizer)
        path, _ = engine.load_checkpoint(folder, tag=tag)
        # A file that is still mapped must not be written again.
        assert "optim_states.pt" not in Path("/proc/self/maps").read_text()
        assert path is not None
        result[f"{prefix}loaded"] = held(engine)
        result[f"{prefix}resumed log"] = train(engine, cell, range(SAVED_AFTER, STEPS))
        result[f"{prefix}resumed"] = held(engine)
        left = weakref.ref(base_optimizer(engine))
        engine.destroy()
        del engine
        gc.collect()
        result[f"{prefix}kept"] = left() is not None
    return result
