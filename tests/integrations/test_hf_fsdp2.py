# SPDX-License-Identifier: Apache-2.0
"""FSDP2 by Hugging Face's Trainer, and so by Accelerate, with CPU offload on two ranks."""

from contextlib import contextmanager

import hf_models
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from ranks import run_ranks
from torch.distributed.fsdp import CPUOffloadPolicy

from zero8.integrations import hf

pytestmark = pytest.mark.integrations


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


def train_and_resume(folder, kind):
    """Train to the end, and from a checkpoint in the middle: the bits are equal."""

    def trained(name, resume=None, **others):
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
        return made, [p.detach().full_tensor() for p in made.model_wrapped.parameters()]

    with sharding_on_cpus():
        _, whole = trained("whole")
        _, unlike = trained("cut", stop_after=3)
        made, resumed = trained("cut", resume=f"{folder}/cut/checkpoint-3")
    assert all(map(torch.equal, whole, resumed)) and not all(map(torch.equal, whole, unlike))
    bits = {row.name: row.bits for row in made.optimizer.optimizer.memory_report().rows}
    assert (bits["model.embed_tokens.weight"], bits["lm_head.weight"]) == (32, 8)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_fsdp2_goes_on_with_the_bits_of_a_run_that_was_not_cut_off(kind, tmp_path):
    """It knows names, too, by which `fp32_params` are found."""
    run_ranks(train_and_resume, 2, tmp_path, timeout_s=400, folder=tmp_path, kind=kind)
