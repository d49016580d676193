# SPDX-License-Identifier: Apache-2.0
"""What ranks run of test_hf_deepspeed.py and test_accelerate_fsdp2.py."""

import hf_models
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
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


def train_with_fsdp2(folder):
    """Save and load the state of Accelerate in each type of state dict; whether bits are equal."""
    result = {}
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        accelerator, model, optimizer = _sharded(kind)
        _steps(accelerator, model, optimizer, range(3))
        accelerator.save_state(f"{folder}/{kind}")
        expected = _steps(accelerator, model, optimizer, range(3, 6))
        report = optimizer.optimizer.memory_report()
        again = _sharded(kind)
        unlike = _steps(*_sharded(kind), range(3, 6))
        again[0].load_state(f"{folder}/{kind}")
        got = _steps(*again, range(3, 6))
        result[kind] = {
            "equal": [torch.equal(a, b) for a, b in zip(expected, got, strict=True)],
            "fresh": [torch.equal(a, b) for a, b in zip(expected, unlike, strict=True)],
            "bits": {row.name: row.bits for row in report.rows},
        }
    return result


def _sharded(kind: str):
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        cpu_offload=CPUOffloadPolicy(pin_memory=False),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=kind,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    # Accelerate shards on GPUs only; all that follows is its own code, on the CPU.
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    model = hf_models.small_llama()
    groups = hf.named_groups(model, 0.1)
    optimizer = zero8.Adam8bitBlockwise(groups, lr=1e-2, fp32_params=["*embed*"])
    return accelerator, *accelerator.prepare(model, optimizer)


def _steps(accelerator, model, optimizer, seeds) -> list[torch.Tensor]:
    for seed in seeds:
        batch = hf_models.tokens(2 * seed + accelerator.process_index)
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().full_tensor().clone() for p in model.parameters()]
