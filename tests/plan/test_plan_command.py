# SPDX-License-Identifier: Apache-2.0
"""`zero8 plan` from its options to its output, and what it refuses."""

import json
import shlex
from dataclasses import replace

import pytest
from doc_blocks import is_shown

from zero8 import cli
from zero8.plan.model import Model
from zero8.plan.setup import Setup, with_deepspeed_config
from zero8.plan.share import share_of
from zero8.spec.codec import CODECS
from zero8.state.policy import Policy

NVME = ("--nvme-bandwidth", "5")


def plan(capsys, *words):
    status = cli.main(["plan", *words])
    return status, capsys.readouterr().out


def planned(capsys, *words):
    status, printed = plan(capsys, "--json", *words)
    assert status == 0, printed
    return json.loads(printed)


def saved_bytes(result):
    """Return by place the bytes that zero8 saves a rank."""
    found = {}
    for row in result["memory"]:
        saved = row["fp32_bytes"] - row["zero8_bytes"]
        found[row["place"]] = found.get(row["place"], 0) + saved
    return {place: saved for place, saved in found.items() if saved}


@pytest.mark.parametrize(
    ("words", "place", "grad_bytes"),
    [
        (["--offload", "none"], "GPU", 0),
        (["--offload", "cpu"], "host", 2),
        (["--offload", "cpu", "--stage", "3"], "host", 4),
        (["--offload", "cpu", "--dtype", "bf16-masters"], "host", 2),  # of weights
        (["--offload", "cpu", "--dtype", "fp32"], "host", 4),  # of weights
        (["--offload", "nvme", "--stage", "3", *NVME], "NVMe", 0),
    ],
)
def test_plan_saves_where_the_states_are(capsys, words, place, grad_bytes):
    """Of the moments, and of gradients or weights, which zero8 keeps once, or in 2 bytes."""
    saved = saved_bytes(planned(capsys, "--parameters", "1B", *words))[place]
    assert saved == pytest.approx((8 - 2 - 12 / 256 + grad_bytes) * 1e9, rel=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_plan_of_a_codec_counts_its_codes_and_scales(capsys, codec):
    """Per block of 256, `log` and `log6` have one float more than the others: the span of v."""
    default, chosen = (
        planned(capsys, "--parameters", "1B", *words)["zero8"]["need"]["host_bytes"]
        for words in ((), ("--codec", codec))
    )
    without_span = 4 / 256
    expected = {"log": 0, "log6": 0.5, "linear4": 1 + without_span}.get(codec, without_span)
    assert default - chosen == pytest.approx(expected * 1e9, rel=1e-3)


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
    assert with_deepspeed_config(Setup(), config) == Setup(
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


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("Adam", 8), ("Lion", 4), ("SGD", 4), ("AdEMAMix", 12)]
)
def test_plan_of_a_config_counts_the_moments_of_its_optimizer(name, num_bytes):
    section = {"type": f"{name}8bitBlockwise", "params": {"min_8bit_size": 10**9}}
    setup = with_deepspeed_config(Setup(), {"optimizer": section})
    model = Model("one", (("weight", (1000, 1000)),))
    share = share_of(model, setup)
    assert share.fp32_bytes == share.zero8_bytes == num_bytes * 10**6
    in_8bit = share_of(model, replace(setup, policy=Policy())).zero8_bytes
    assert 1 < 4 * in_8bit / share.fp32_bytes < 1.05


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


OF_STAGE_2 = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
REFUSED = {
    "stage 0 with offload": (["--stage", "0"], None, "expected stage 1, 2 or 3"),
    "nvme with stage 2": (["--offload", "nvme"], None, "only DeepSpeed's stage 3"),
    "nvme of no speed": (["--offload", "nvme", "--stage", "3"], None, "--nvme-bandwidth: expected"),
    "fp16 with fsdp2": (["--engine", "fsdp2", "--dtype", "fp16"], None, "dtype: got 'fp16'"),
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


@pytest.mark.shown("docs/planning.md", "--host-memory")
def test_plan_in_a_page_is_what_the_command_prints(block, capsys):
    ((command, shown),) = block.session
    status, printed = plan(capsys, *shlex.split(command)[2:])
    assert status == 0
    assert is_shown(shown, printed), printed
