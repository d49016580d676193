# SPDX-License-Identifier: Apache-2.0
"""The model of muon_worker.py under ZeRO: its configs, and what came of its steps."""

from deepspeed.utils import safe_get_full_optimizer_state
from muon_worker import MATRICES, OPTIONS, SHAPES, Known
from zero_worker import config, parameters_of

MUON = {"optimizer": "Muon8bitBlockwise", **OPTIONS}
LAYOUTS = {
    "no zero": config(stage=0, offload=None, **MUON),
    "zero1": config(stage=1, offload=None, **MUON),
    "zero2": config(stage=2, offload=None, **MUON),
    "zero2 offload": config(**MUON),
    "zero3": config(stage=3, offload=None, **MUON),
    "zero3 offload": config(stage=3, **MUON),
    # Partitions in several parts, of which each is stepped by itself.
    "zero3 offload, parts": config(stage=3, zero={"sub_group_size": 4000}, **MUON),
}
# What both Muons understand.
OF_DEEPSPEED = {
    "muon_lr": 2e-2,
    "adam_lr": 1e-3,
    "momentum": 0.9,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "ns_method": "gram",
}
IN_FLOAT32 = {"adjust_lr_fn": "original", "ns_dtype": "float32", "min_8bit_size": 10**9}


class WithoutFilters(Known):
    """DeepSpeed's Muon fails on them."""

    def __init__(self):
        super().__init__()
        del self.conv


def results(engine) -> dict[str, dict]:
    """Return by parameter its values and its moments in float32, whole."""
    found, values = {}, parameters_of(engine)
    for name, p in engine.module.named_parameters():
        keys = ("momentum_buffer",) if name in MATRICES else ("exp_avg", "exp_avg_sq")
        if engine.zero_optimization_stage() == 0:  # DeepSpeed does not look for states
            moments = [one.read(0, p.numel()) for one in engine.optimizer.moments(p)]
        else:
            moments = [safe_get_full_optimizer_state(p, key) for key in keys]
        moments = [one.view(SHAPES[name]) for one in moments]
        found[name] = {"values": values[name], "moments": moments}
    return found
