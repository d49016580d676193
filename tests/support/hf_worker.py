# SPDX-License-Identifier: Apache-2.0
"""What ranks run of test_hf_deepspeed.py and test_hf_fsdp2.py."""

from contextlib import contextmanager

import hf_models
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from ranks import error_of
from torch.distributed.fsdp import CPUOffloadPolicy

import zero8
from zero8.integrations import hf

OFFLOAD = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
UNFORCED = OFFLOAD | {"zero_force_ds_cpu_optimizer": False}
KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}


def named(kind: str) -> dict:
    return OFFLOAD | {"optimizer": {"type": kind, "params": AUTO}}


def _stepping(trainer):
    """Return what a Trainer's engine steps with."""
    return trainer.model_wrapped.optimizer.optimizer


def _weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train_with_deepspeed(folder):
    """Train in all the ways in which a Trainer gets, or does not get, our optimizer."""

    def trained(name, ds_config, resume=None, **others):
        made = hf_models.trainer(f"{folder}/{name}", deepspeed=ds_config, **others)
        made.train(resume_from_checkpoint=resume)
        return made

    def with_object(name, ds_config):
        model = hf_models.small_llama()
        ours = zero8.Adam8bitBlockwise(model.named_parameters(), lr=1e-2)
        return trained(name, ds_config, model=model, optimizers=(ours, None))

    def with_factory(name, ds_config):
        args = hf_models.arguments(f"{folder}/{name}", deepspeed=ds_config)
        given = hf.optimizer(args, fp32_params=["*embed*"])
        made = hf_models.trainer("", args=args, optimizer_cls_and_kwargs=given)
        made.train()
        return made

    result = {}
    whole = trained("whole", named("Adam8bitBlockwise"))
    group = _stepping(whole).param_groups[0]
    result["settings"] = [group[key] for key in ("betas", "eps", "weight_decay")]
    result["bits"] = {r.name: r.bits for r in _stepping(whole).memory_report().rows}
    result["whole"] = _weights(whole.model)
    trained("cut", named("Adam8bitBlockwise"), stop_after=3)
    cut = f"{folder}/cut/checkpoint-3"
    resumed = trained("cut", named("Adam8bitBlockwise"), resume=cut)
    result["resumed"] = _weights(resumed.model)
    result["object dropped, CPU Adam"] = error_of(with_object, "object", OFFLOAD)
    result["object dropped, AdamW"] = error_of(with_object, "object", UNFORCED)
    result["object dropped, JSON AdamW"] = error_of(with_object, "object", named("AdamW"))
    result["factory, forced"] = error_of(with_factory, "factory", OFFLOAD)
    factory = with_factory("factory", UNFORCED)
    result["factory"] = {r.name: r.bits for r in _stepping(factory).memory_report().rows}
    result["ours into AdamW"] = error_of(trained, "out", named("AdamW"), resume=cut)
    return result


@contextmanager
def sharding_on_cpus():
    """Have Accelerate shard on the CPU, with CPU offload: it does on GPUs only.

    It decides that when its state is made; all that follows is its own code, and Trainer's.
    """
    made = AcceleratorState.__init__

    def make(self, *args, fsdp_plugin=None, **kwargs):
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
            AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = make
    try:
        yield
    finally:
        AcceleratorState.__init__ = made


def train_with_fsdp2(folder):
    """Go on from checkpoints of Trainer, and so of Accelerate, of both kinds; are bits equal?"""

    def trained(name, kind, resume=None, **others):
        AcceleratorState._reset_state(True)
        config = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": kind,
            "cpu_offload": True,
        }
        args = hf_models.arguments(
            f"{folder}/{name}", fsdp=True, fsdp_config=config, ddp_backend="gloo"
        )
        given = hf.optimizer(args, fp32_params=["*embed*"])
        made = hf_models.trainer("", args=args, optimizer_cls_and_kwargs=given, **others)
        made.train(resume_from_checkpoint=resume)
        return made

    result = {}
    with sharding_on_cpus():
        for kind in KINDS:
            whole = trained(f"whole {kind}", kind)
            unlike = trained(f"cut {kind}", kind, stop_after=3)
            resumed = trained(f"cut {kind}", kind, resume=f"{folder}/cut {kind}/checkpoint-3")
            result[kind] = {
                "equal": _equal(_full(whole.model_wrapped), _full(resumed.model_wrapped)),
                "fresh": _equal(_full(whole.model_wrapped), _full(unlike.model_wrapped)),
                "bits": {r.name: r.bits for r in resumed.optimizer.optimizer.memory_report().rows},
            }
    return result


def _full(model) -> list[torch.Tensor]:
    return [p.detach().full_tensor().clone() for p in model.parameters()]


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(some, others, strict=True)]
