# SPDX-License-Identifier: Apache-2.0
"""`zero8 plan` from its options to its output, and what it refuses."""

import json
import shlex

import pytest
from doc_blocks import is_shown

from zero8 import cli
from zero8.plan.model import Model
from zero8.plan.setup import Setup, with_ds_config
from zero8.state.policy import Policy


def plan(capsys, *words):
    status = cli.main(["plan", *words])
    return status, capsys.readouterr().out


def planned(capsys, *words):
    status, printed = plan(capsys, "--json", *words)
    assert status == 0, printed
    return json.loads(printed)


def test_plan_of_a_deepspeed_config_takes_its_settings():
    optimizer = {"block_size": 128, "weight_correction_bits": 8, "lr": 1e-3}
    nvme = {"device": "nvme", "buffer_count": 6, "pipeline_read": True, "pipeline_write": True}
    config = {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam8bitBlockwise", "params": optimizer},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e6,
            "reduce_bucket_size": "auto",
            "offload_optimizer": nvme,
            "offload_param": {"device": "cpu"},
        },
    }
    assert with_ds_config(Setup(), config) == Setup(
        stage=3,
        offload="nvme",
        offload_params=True,
        dtype="24-bit-masters",
        accumulation_steps=4,
        sub_group_numel=1_000_000,
        buffer_count=6,
        pipelined=True,
        policy=Policy(block_size=128),
    )


WITHOUT_TIME = {
    "Muon": ["--optimizer", "Muon8bitBlockwise"],
    "INT8 weights": ["--weights", "int8", "--engine", "fsdp2"],
    "GPU": ["--offload", "none"],
}


@pytest.mark.parametrize("words", WITHOUT_TIME.values(), ids=WITHOUT_TIME)
def test_plan_of_a_step_whose_time_is_not_known_says_so(capsys, words):
    words = ["--parameters", "1B", *words]
    assert planned(capsys, *words)["zero8"]["step"]["seconds"] is None
    assert "not estimated" in plan(capsys, *words)[1]


@pytest.mark.parametrize(("text", "numel"), [("8B", 8e9), ("350m", 350e6), ("1.5T", 1.5e12)])
def test_size_has_as_many_parameters_up_to_a_row(text, numel):
    model = Model.of_size(text)
    assert numel - 4096 < model.numel <= numel
    assert model.largest_numel == 4096 * 4096


OF_STAGE_2 = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
REFUSED = {
    "stage 0 with offload": (["--stage", "0"], None, "expected stage 1, 2 or 3"),
    "nvme with stage 2": (["--offload", "nvme"], None, "only DeepSpeed's stage 3"),
    "nvme of no speed": (["--offload", "nvme", "--stage", "3"], None, "--nvme-bandwidth: expected"),
    "fp16 with fsdp2": (["--engine", "fsdp2", "--dtype", "fp16"], None, "dtype: got 'fp16'"),
    "no size": (["--parameters", "8 billions"], None, "expected a size such as 350M, 8B"),
    "no ranks": (["--world-size", "0"], None, "world_size: got 0"),
    "INT8 weights": (["--weights", "int8"], None, "weights: got 'int8', expected fsdp2"),
    "config and stage": (["--stage", "3"], {}, "got --stage too"),
    "list": ([], [], "expected a DeepSpeed config"),
    "fp32 gradients": ([], {"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype"),
    "parameters of stage 2": ([], OF_STAGE_2, "offloaded parameters, expected 3"),
    "accumulation": ([], {"gradient_accumulation_steps": 0}, "accumulation_steps: got 0"),
}


@pytest.mark.parametrize(("words", "config", "message"), REFUSED.values(), ids=REFUSED)
def test_plan_of_what_cannot_be_is_refused(capsys, tmp_path, words, config, message):
    if config is not None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        words = [*words, "--ds-config", str(path)]
    status, printed = plan(capsys, "--parameters", "1B", *words)
    assert status == 2
    assert printed.startswith("zero8 plan: ") and message in printed


NO_MODELS = {
    '{"hidden_size": 8}': "a config.json with a model_type",
    '{"a": [3, -1]}': "expected names and shapes",
    "{}": "a JSON object that is not empty",
    "{": "not JSON",
}


@pytest.mark.parametrize(("text", "message"), NO_MODELS.items())
def test_plan_of_a_model_file_that_is_none_is_refused(capsys, tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    status, printed = plan(capsys, "--model", str(tmp_path / "config.json"))
    assert status == 2 and message in printed


@pytest.mark.shown("docs/planning.md", "--host-memory")
def test_plan_in_a_page_is_what_the_command_prints(block, capsys):
    ((command, shown),) = block.session
    status, printed = plan(capsys, *shlex.split(command)[2:])
    assert status == 0
    assert is_shown(shown, printed), printed
