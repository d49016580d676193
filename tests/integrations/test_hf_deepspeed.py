# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with a DeepSpeed config, in ZeRO-2 with CPU offload."""

import hf_models
import pytest
from ranks import run_ranks
from shared_memory import leave_out_shared_memory

import zero8
from zero8.integrations import hf

pytestmark = pytest.mark.integrations

leave_out_shared_memory()  # without LOCAL_SIZE it would not be called

OFFLOAD = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
UNFORCED = OFFLOAD | {"zero_force_ds_cpu_optimizer": False}
AUTO = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}


def named(kind: str) -> dict:
    return OFFLOAD | {"optimizer": {"type": kind, "params": AUTO}}


OURS = named("Adam8bitBlockwise")


def trained(folder, ds_config, resume=None, **others):
    made = hf_models.trainer(folder, deepspeed=ds_config, **others)
    made.train(resume_from_checkpoint=resume)
    return made


def bits_in(optimizer) -> dict[str, int]:
    return {row.name: row.bits for row in optimizer.memory_report().rows}


def train_from_the_json(folder):
    """Train by the word in the JSON, and resume with AdamW; test_peft_trl.py resumes with ours."""
    made = trained(f"{folder}/cut", OURS, stop_after=3)
    assert bits_in(made.model_wrapped.optimizer.optimizer)["lm_head.weight"] == 8
    cut = f"{folder}/cut/checkpoint-3"
    with pytest.raises(ValueError, match="which DeepSpeedCPUAdam cannot read(?s:.)*--to zero"):
        trained(f"{folder}/out", named("AdamW"), resume=cut)


def train_with_an_object(folder):
    """Give Trainer an optimizer, which it drops."""
    for ds_config, other in (
        (OFFLOAD, "DeepSpeedCPUAdam"),
        (UNFORCED, "AdamW"),
        (named("AdamW"), "DeepSpeedCPUAdam"),
    ):
        model = hf_models.small_llama()
        ours = zero8.Adam8bitBlockwise(model.named_parameters(), lr=1e-2)
        with pytest.raises(ValueError) as caught:
            trained(folder, ds_config, model=model, optimizers=(ours, None))
        assert f"would step with {other}, not with the Adam8bitBlockwise" in str(caught.value)
        assert '"optimizer": {"type": "Adam8bitBlockwise"' in str(caught.value)


def train_with_the_factory(folder):
    """Have Trainer make the optimizer: DeepSpeed must be told to take it."""

    def train(ds_config):
        args = hf_models.arguments(folder, deepspeed=ds_config)
        given = hf.optimizer(args, fp32_params=["*embed*"])
        made = hf_models.trainer("", args=args, optimizer_cls_and_kwargs=given)
        made.train()
        return bits_in(made.model_wrapped.optimizer.optimizer)

    with pytest.raises(ValueError, match='"zero_force_ds_cpu_optimizer": false'):
        train(OFFLOAD)
    bits = train(UNFORCED)
    assert (bits["model.embed_tokens.weight"], bits["lm_head.weight"]) == (32, 8)


@pytest.mark.parametrize(
    "train", [train_from_the_json, train_with_an_object, train_with_the_factory]
)
def test_trainer_steps_with_ours_or_says_what_to_do(train, tmp_path):
    run_ranks(train, 1, tmp_path, timeout_s=300, folder=str(tmp_path))
