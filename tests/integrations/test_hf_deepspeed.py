# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with a DeepSpeed config, in ZeRO-2 with CPU offload."""

import hf_models
import pytest
import torch
from hf_worker import train_with_deepspeed
from ranks import run_ranks

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    (result,) = run_ranks(train_with_deepspeed, 1, folder, timeout_s=300, folder=str(folder))
    return result


def test_json_word_steps_in_8_bits_with_the_settings_of_trainer(found):
    assert found["settings"][1:] == [hf_models.EPS, hf_models.WEIGHT_DECAY]
    assert tuple(found["settings"][0]) == hf_models.BETAS
    assert found["bits"]["lm_head.weight"] == 8


def test_json_word_resumes_to_the_bits_of_a_run_that_was_not_cut_off(found):
    pairs = zip(found["whole"], found["resumed"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("case", "other"),
    [("CPU Adam", "DeepSpeedCPUAdam"), ("AdamW", "AdamW"), ("JSON AdamW", "DeepSpeedCPUAdam")],
)
def test_object_that_trainer_drops_is_an_error_that_says_to_name_it_in_the_json(found, case, other):
    kind, message = found[f"object dropped, {case}"]
    assert kind == "ValueError"
    assert f"would step with {other}, not with the Adam8bitBlockwise" in message
    assert '"optimizer": {"type": "Adam8bitBlockwise"' in message


def test_factory_under_offload_says_what_to_set_and_works_when_it_is(found):
    kind, message = found["factory, forced"]
    assert (kind, '"zero_force_ds_cpu_optimizer": false' in message) == ("ValueError", True)
    assert found["factory"]["model.embed_tokens.weight"] == 32
    assert found["factory"]["lm_head.weight"] == 8


def test_checkpoint_that_is_resumed_with_adamw_says_how_to_convert_it(found):
    kind, message = found["ours into AdamW"]
    assert kind == "ValueError"
    assert "which DeepSpeedCPUAdam cannot read" in message
    assert "--to zero" in message
