# SPDX-License-Identifier: Apache-2.0
"""The table of settings: algorithm x task, and the schemes of each."""

from dataclasses import replace

from benchmarks.fidelity.rivals import ADAM_RIVALS, MUON_RIVALS
from benchmarks.fidelity.schemes import CONTROL, FP32, PEERS, WEIGHTS
from benchmarks.fidelity.tasks import EmbeddingTask, EndingTask, ImageTask, TextTask
from benchmarks.fidelity.training import Setting
from zero8.spec.codec import CODECS

CODED = (*CODECS, "deepspeed, bf16")
ALL = (CONTROL, *CODECS, *PEERS)
TRAINED = (FP32, "log", "dynamic")
FAST, SLOW = {"betas": (0.9, 0.95)}, {"betas": (0.9, 0.999)}
REPLAYED_RIVALS = tuple(n for n in ADAM_RIVALS if "its beta1" not in n and "1, resets" not in n)
LION = {"betas": (0.9, 0.99)}
SGD = {"momentum": 0.9, "nesterov": True}
LONG_SGD = {"momentum": 0.99, "nesterov": True}
MUON = {"momentum": 0.95, "betas": (0.9, 0.99), "ns_dtype": "float32"}
GPT = Setting("GPT, beta2 0.999", TextTask(), 1200, options=SLOW)
SHORT = replace(GPT, steps=600)


def _mix(steps: int) -> dict:
    """Return AdEMAMix's keywords: alpha and beta3 come up over the whole run, as in its paper."""
    return {"betas": (0.9, 0.999, 0.9999), "t_alpha": steps, "t_beta3": steps}


def _narrow(width: int) -> TextTask:
    return TextTask(replace(TextTask.config, width=width))


def _of(task: str, algorithm: str, steps: int, peak_lr: float, decay: float, options: dict):
    """Return a setting of an algorithm other than Adam, whose learning rate is tuned for fp32."""
    tasks = {"GPT": TextTask(), "convolutions": ImageTask()}
    name = f"{task}, {algorithm}"
    schemes = {"replayed": tuple(CODECS), "trained": TRAINED}
    return Setting(name, tasks[task], steps, algorithm, options, peak_lr, decay, **schemes)


MAIN = (
    replace(GPT, replayed=ALL, trained=(FP32, *CODECS)),
    replace(GPT, name="GPT, beta2 0.95", options=FAST, replayed=ALL, trained=TRAINED),
)
RIVALS = (
    replace(GPT, name="rivals, beta2 0.95", options=FAST, replayed=(*ALL, *REPLAYED_RIVALS)),
    replace(GPT, name="rivals, beta2 0.999", replayed=(*ALL, *REPLAYED_RIVALS)),
    replace(
        GPT,
        name="rivals, small, beta2 0.999",
        task=_narrow(64),
        steps=400,
        trained=(*TRAINED, "log6", "deepspeed, bf16", *ADAM_RIVALS),
    ),
    replace(
        _of("GPT", "Muon", 160, 6e-3, 0.1, MUON),
        name="rivals, small, Muon",
        task=_narrow(128),
        replayed=(*CODECS, *MUON_RIVALS),
        trained=(FP32, "log", "MuonQ, 4 bits"),
    ),
)
"""Papers' states; `small` are narrower GPTs, which can be trained as often as there are schemes."""
SETTINGS = (
    *MAIN,
    *RIVALS,
    replace(SHORT, name="GPT, lr x 10", peak_lr=1e-2, replayed=CODED),
    replace(SHORT, name="GPT, lr x 10, beta2 0.95", peak_lr=1e-2, options=FAST, replayed=CODED),
    replace(SHORT, name="GPT, beta1 0.99", options={"betas": (0.99, 0.999)}, replayed=CODED),
    replace(SHORT, name="embedding", task=EmbeddingTask(), replayed=CODED),
    replace(
        SHORT, name="embedding, beta2 0.95", task=EmbeddingTask(), options=FAST, replayed=CODED
    ),
    replace(SHORT, name="convolutions", task=ImageTask(), replayed=CODED, trained=TRAINED),
    replace(GPT, name="gradients that end", task=EndingTask(), replayed=CODED),
    replace(
        GPT, name="gradients that end, beta2 0.95", task=EndingTask(), options=FAST, replayed=CODED
    ),
    _of("GPT", "Lion", 240, 3e-4, 0.1, LION),
    _of("GPT", "SGD", 240, 0.1, 0.0, SGD),
    replace(_of("GPT", "SGD", 240, 0.01, 0.0, LONG_SGD), name="GPT, SGD, momentum 0.99"),
    _of("GPT", "AdEMAMix", 240, 6e-4, 0.1, _mix(240)),
    _of("GPT", "Muon", 160, 6e-3, 0.1, MUON),
    _of("convolutions", "Lion", 600, 1e-3, 0.1, LION),
    _of("convolutions", "SGD", 600, 0.1, 0.0, SGD),
    _of("convolutions", "AdEMAMix", 600, 3e-3, 0.1, _mix(600)),
    replace(
        SHORT,
        name="GPT, kept weights",
        weight_decay=0.0,
        keeps_weights=True,
        replayed=tuple(WEIGHTS),
        trained=tuple(WEIGHTS),
    ),
)
"""Everything, settings of the longest jobs first."""
QUICK = tuple(
    replace(setting, trained=TRAINED, seeds=(1, 2, 3), replayed=(CONTROL, "log", "dynamic", *PEERS))
    for setting in MAIN
)
