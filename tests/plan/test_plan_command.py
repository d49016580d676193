# SPDX-License-Identifier: Apache-2.0
"""`zero8 plan` from its options to its output, and what it refuses."""

import json
import shlex
from dataclasses import replace

import pytest
from doc_blocks import is_shown
from model_configs import LLAMA_8B
from places import ROOT

from zero8 import cli
from zero8.bench.step.machines import Machine
from zero8.plan import measure
from zero8.plan.matrices import sent_by_zero8
from zero8.plan.model import Model
from zero8.plan.rates import Rates
from zero8.plan.setup import BY_NAME, Setup, with_deepspeed_config
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


def test_plan_prints_both_optimizers_side_by_side_in_few_lines(capsys):
    status, printed = plan(capsys, "--parameters", "70B", "--world-size", "64", "--stage", "3")
    lines = printed.splitlines()
    assert status == 0
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    (moments,) = [line.split() for line in lines if line.startswith("- moments")]
    assert moments == ["-", "moments", "65.19", "16.68"]
    assert "64 GPUs on 8 hosts" in printed


@pytest.mark.parametrize(
    ("words", "place", "grad_bytes"),
    [
        (["--offload", "none"], "gpu_bytes", 0),
        (["--offload", "cpu"], "host_bytes", 2),
        (["--offload", "cpu", "--stage", "3"], "host_bytes", 4),
        (["--offload", "cpu", "--dtype", "bf16-masters"], "host_bytes", 2),  # of weights
        (["--offload", "cpu", "--dtype", "fp32"], "host_bytes", 4),  # of weights
        (["--offload", "nvme", "--stage", "3", "--nvme-bandwidth", "5"], "nvme_bytes_of_host", 0),
    ],
)
def test_plan_saves_where_the_states_are(capsys, words, place, grad_bytes):
    """Of the moments, and of gradients or weights, which zero8 keeps once, or in 2 bytes."""
    result = planned(capsys, "--parameters", "1B", *words)
    saved = result["fp32_adam"][place] - result["zero8"][place]
    assert saved == pytest.approx((8 - 2 - 12 / 256 + grad_bytes) * 1e9, rel=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_plan_of_a_codec_counts_its_codes_and_scales(capsys, codec):
    """Per block of 256, `log` and `log6` have one float more than the others: the span of v."""
    default, chosen = (
        planned(capsys, "--parameters", "1B", *words) for words in ((), ("--codec", codec))
    )
    assert chosen["setup"]["codec"] == codec
    saved = default["zero8"]["host_bytes"] - chosen["zero8"]["host_bytes"]
    without_span = 4 / 256
    expected = {"log": 0, "log6": 0.5, "linear4": 1 + without_span}.get(codec, without_span)
    assert saved == pytest.approx(expected * 1e9, rel=1e-3)


@pytest.mark.parametrize("optimizer", BY_NAME)
def test_plan_of_an_optimizer_is_that_of_a_config_with_its_type(capsys, tmp_path, optimizer):
    config = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    content = {"optimizer": {"type": optimizer}, "bf16": {"enabled": True}}
    config.write_text(json.dumps({**content, "zero_optimization": zero}))
    by_name = planned(capsys, "--parameters", "1B", "--optimizer", optimizer)
    assert by_name == planned(capsys, "--parameters", "1B", "--ds-config", str(config))


def test_plan_of_ranks_of_one_host_counts_them_all(capsys):
    one, eight = (
        planned(capsys, "--parameters", "1B", "--world-size", "8", "--ranks-per-host", n)
        for n in ("1", "8")
    )
    assert eight["zero8"]["host_bytes"] == 8 * one["zero8"]["host_bytes"]


def test_plan_of_a_deepspeed_config_takes_its_settings(capsys, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
                "gradient_accumulation_steps": 4,
                "optimizer": {
                    "type": "Adam8bitBlockwise",
                    "params": {"block_size": 128, "weight_correction_bits": 8, "lr": 1e-3},
                },
                "zero_optimization": {
                    "stage": 3,
                    "sub_group_size": 1e6,
                    "reduce_bucket_size": "auto",
                    "offload_optimizer": {
                        "device": "nvme",
                        "buffer_count": 6,
                        "pipeline_read": True,
                        "pipeline_write": True,
                    },
                    "offload_param": {"device": "cpu"},
                },
            }
        )
    )
    setup = planned(capsys, "--parameters", "1B", "--ds-config", str(path), *NVME)["setup"]
    expected = {
        "stage": 3,
        "offload": "nvme",
        "offload_params": True,
        "dtype": "24-bit-masters",
        "accumulation_steps": 4,
        "sub_group_numel": 1_000_000,
        "reduce_bucket_numel": Setup().reduce_bucket_numel,
        "buffer_count": 6,
        "pipelined": True,
    }
    assert {key: setup[key] for key in expected} == expected
    assert setup["policy"]["block_size"] == 128


def test_plan_without_sections_in_the_deepspeed_config_has_deepspeeds_defaults():
    setup = with_deepspeed_config(Setup(), {})
    assert (setup.stage, setup.offload, setup.dtype) == (0, "none", "fp32")


MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
PRECISIONS = [
    (MASTERS, "Adam8bitBlockwise", 8, "24-bit-masters"),
    (MASTERS, "Adam8bitBlockwise", 0, "bf16-masters"),
    (MASTERS, "AdamW", 8, "bf16-masters"),
    ({"enabled": True}, "Adam8bitBlockwise", 8, "bf16"),
    ({"enabled": False}, "Adam8bitBlockwise", 8, "fp32"),
]


@pytest.mark.parametrize(("bf16", "optimizer", "bits", "dtype"), PRECISIONS)
def test_plan_of_a_deepspeed_config_has_24_bit_masters_where_zero8_corrects_bf16_masters(
    bf16, optimizer, bits, dtype
):
    section = {"type": optimizer, "params": {"weight_correction_bits": bits}}
    assert with_deepspeed_config(Setup(), {"bf16": bf16, "optimizer": section}).dtype == dtype


def test_plan_of_a_deepspeed_config_without_params_of_the_optimizer_has_bf16_masters():
    config = {"bf16": MASTERS, "optimizer": {"type": "Adam8bitBlockwise"}}
    assert with_deepspeed_config(Setup(), config).dtype == "bf16-masters"


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


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_plan_of_a_config_of_muon_counts_one_moment_of_matrices_and_two_of_the_others(stage):
    params = {"min_8bit_size": 10**9, "adam_params": ["embed"]}
    config = {"optimizer": {"type": "Muon8bitBlockwise", "params": params}}
    setup = replace(with_deepspeed_config(Setup(), config), stage=stage, world_size=2)
    shapes = {"embed": (1000, 10), "weight": (1000, 1000), "bias": (1000,)}
    share = share_of(Model("", tuple(shapes.items())), setup)
    ranks = 2 if stage else 1
    assert share.fp32_bytes * ranks == 4 * 10**6 + 8 * 11_000
    assert share.zero8_bytes * ranks == pytest.approx(share.fp32_bytes * ranks, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "num_bytes"),
    [
        # Halves of the third of five experts: one to its owner, one back.
        ("deepspeed", 2 * (4 * 64) // 2),
        ("fsdp2", 0),  # three experts and two
    ],
)
def test_plan_of_muon_counts_of_experts_those_that_are_cut(engine, num_bytes):
    setup = Setup(engine=engine, stage=3, world_size=2, algorithm_name="muon")
    assert sent_by_zero8(Model("", (("experts", (5, 4, 64)),)), setup) == num_bytes


def test_plan_of_muon_has_operations_instead_of_a_time(capsys, tmp_path):
    path, config = tmp_path / "plan.png", tmp_path / "config.json"
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "Muon8bitBlockwise"}
    config.write_text(json.dumps({"zero_optimization": offload, "optimizer": optimizer}))
    words = ("--parameters", "1B", "--world-size", "4", "--ds-config", str(config))
    result = planned(capsys, *words)
    # Five times three products, each of 2 * 4096^3 operations, for each of the 59.6 matrices.
    assert result["flop_per_rank"]["fp32_adam"] == pytest.approx(1e9 * 5 * 3 * 2 * 4096, rel=0.01)
    assert result["flop_per_rank"]["zero8"] == result["flop_per_rank"]["fp32_adam"] / 4
    assert result["zero8"]["step"] is None
    status, printed = plan(capsys, *words, "--plot", str(path))
    assert status == 0 and path.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, printed.splitlines())) <= 100
    (products,) = [x.split() for x in printed.splitlines() if x.startswith("products of matrices")]
    assert [float(one) for one in products[-2:]] == pytest.approx([122.9, 30.7], rel=0.01)
    assert "Muon steps 100.0 % of the parameters" in printed and "ms" not in printed.split()


def test_plan_of_muon_on_nvme_has_one_moment_there(capsys, tmp_path):
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"zero_optimization": offload, "optimizer": {"type": "Muon8bitBlockwise"}})
    )
    result = planned(capsys, "--parameters", "1B", *NVME, "--ds-config", str(config))
    # Of 4 bytes float32 in fp32, a byte and the scales of blocks of 256 here; the rest is equal.
    saved = result["fp32_adam"]["nvme_bytes_of_host"] - result["zero8"]["nvme_bytes_of_host"]
    assert saved == pytest.approx(1e9 * (4 - (1 + 4 / 256)), rel=0.001)


def test_plan_takes_cores_and_bandwidths_as_they_are_given(capsys):
    words = ("--parameters", "1B", "--cores", "2", "--bandwidth", "1000")
    hardware = planned(capsys, *words)["hardware"]
    assert (hardware["host"]["cores"], hardware["host"]["gb_per_s"]) == (2, 1000)


def test_plan_measures_the_machine_where_it_is_asked_to(capsys, monkeypatch):
    found = Machine("this one", 3, 30.0), Rates(3.0, 2.0, 1.0, "measured"), {}
    monkeypatch.setattr(measure, "measure", lambda: found)
    hardware = planned(capsys, "--parameters", "1B", "--measure", "--cores", "4")["hardware"]
    assert hardware["host"] == {"name": "this one", "cores": 4, "gb_per_s": 30.0}
    assert hardware["rates"]["zero8"] == 2.0


def test_plan_draws_a_figure(capsys, tmp_path):
    path = tmp_path / "plan.png"
    _, printed = plan(capsys, "--parameters", "1B", "--plot", str(path))
    assert f"wrote {path}" in printed
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plan_of_int8_weights_says_which_they_are_and_estimates_no_time(capsys, tmp_path):
    path = tmp_path / "shapes.json"
    shapes = {"embed.weight": [100, 64], "a.weight": [200, 64], "a.bias": [200], "b": [50, 32, 2]}
    path.write_text(json.dumps(shapes))
    words = ["--model", str(path), "--engine", "fsdp2", "--weights", "int8"]
    status, printed = plan(capsys, *words, "--plot", str(tmp_path / "plan.png"))
    assert status == 0 and ", bf16, INT8 weights, " in printed
    assert f"INT8 weights: {100 * 12800 / 22600:.1f} % of the parameters" in printed
    assert "optimizer step, ms" not in printed and "Step time: not estimated" in printed
    assert planned(capsys, *words)["zero8"]["step"] is None


REFUSED = {
    "stage 0 with offload": (["--stage", "0"], "expected stage 1, 2 or 3"),
    "nvme with stage 2": (["--offload", "nvme"], "only DeepSpeed's stage 3"),
    "nvme of no speed": (["--offload", "nvme", "--stage", "3"], "--nvme-bandwidth: expected"),
    "fsdp2 with fp16": (["--engine", "fsdp2", "--dtype", "fp16"], "dtype: got 'fp16' with fsdp2"),
    "no ranks": (["--world-size", "0"], "world_size: got 0"),
    "no ranks on a host": (["--ranks-per-host", "0"], "ranks_per_host: got 0"),
    "no bandwidth": (["--bandwidth", "0"], "gb_per_s: got 0.0, expected more than 0"),
    "no cores": (["--cores", "-1"], "cores: got -1"),
    "no such config": (["--ds-config", "/nowhere.json"], "/nowhere.json"),
    "INT8 weights with DeepSpeed": (["--weights", "int8"], "as ZeRO flattens weights"),
    "INT8 weights with a config": (
        ["--weights", "int8", "--ds-config", str(ROOT / "configs/zero2_offload.json")],
        "use --engine fsdp2",
    ),
    "INT8 weights with Muon": (
        ["--weights", "int8", "--engine", "fsdp2", "--optimizer", "Muon8bitBlockwise"],
        "orthogonalized in floating point",
    ),
    "INT8 weights with corrections": (
        ["--weights", "int8", "--engine", "fsdp2", "--dtype", "24-bit-masters"],
        "use --dtype bf16-masters",
    ),
    "config and stage": (["--ds-config", "/nowhere.json", "--stage", "3"], "got --stage too"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_plan_of_what_cannot_be_is_refused(capsys, words, message):
    status, printed = plan(capsys, "--parameters", "1B", *words)
    assert status == 2
    assert printed.startswith("zero8 plan: ") and message in printed


CONFIGS = {
    "list": ([], "expected a DeepSpeed config"),
    "fp32 gradients": ({"data_types": {"grad_accum_dtype": "fp32"}}, "grad_accum_dtype"),
    "stage": ({"zero_optimization": {"stage": 7}}, "stage: got 7"),
    "device": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}},
        "offload: got 'disk'",
    ),
    "parameters of stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offloaded parameters, expected 3",
    ),
    "parameters on NVMe": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "offload_param: got device 'nvme'",
    ),
    "accumulation": ({"gradient_accumulation_steps": 0}, "accumulation_steps: got 0"),
    "block size": (
        {"optimizer": {"type": "Adam8bitBlockwise", "params": {"block_size": 3}}},
        "block_size: got 3",
    ),
    "codec": (
        {"optimizer": {"type": "Adam8bitBlockwise", "params": {"codec": "none"}}},
        "codec",
    ),
}


@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_plan_of_a_deepspeed_config_that_is_not_planned_for_is_refused(
    capsys, tmp_path, config, message
):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    status, printed = plan(capsys, "--parameters", "1B", "--ds-config", str(path))
    assert status == 2 and message in printed


@pytest.mark.parametrize("stage", [2, 3])
def test_plan_of_a_config_for_trainer_leaves_its_auto_values_at_their_defaults(capsys, stage):
    path = ROOT / "configs" / "hf" / f"zero{stage}_offload.json"
    assert '"gradient_accumulation_steps": "auto"' in path.read_text()
    setup = planned(capsys, "--parameters", "1B", "--ds-config", str(path))["setup"]
    expected = {"stage": stage, "dtype": "bf16", "accumulation_steps": 1, "overlap_comm": None}
    assert {key: setup[key] for key in expected} == expected


@pytest.mark.parametrize("words", [[], ["--parameters", "1B", "--model", "x.json"]])
def test_plan_needs_one_model(words):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", *words])


def test_plan_in_a_page_is_what_the_command_prints(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))  # which the page describes
    ((command, shown),) = block.session
    status, printed = plan(capsys, *shlex.split(command)[2:])
    assert status == 0
    assert is_shown(shown, printed), printed


def test_plan_of_each_size_that_the_docs_name_prints_a_plan(block, capsys):
    for command in block.commands:
        status, printed = plan(capsys, *shlex.split(command)[2:])
        assert status == 0 and "each host" in printed
    assert len(block.commands) == 3


def test_plan_without_fp32_masters_takes_what_the_docs_say(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    text = (ROOT / "docs" / "from-adamw-to-8-bit.md").read_text()
    for dtype in ("bf16", "bf16-masters", "24-bit-masters"):
        words = ("--model", str(tmp_path / "config.json"), "--stage", "2", "--dtype", dtype)
        gib = planned(capsys, *words)["zero8"]["host_bytes"] / 2**30
        assert f"{gib:.2f}" in text, dtype
