# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest
from places import ROOT

from examples.gpt import build, config
from examples.gpt.config import load_config
from examples.gpt.engine import DEEPSPEED, TWINS, defaults
from zero8.algorithms.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.state.keywords import OWN_KEYS

DEFAULT = ROOT / "configs" / "zero2_offload.json"
BASELINE, EIGHT_BIT = "AdamW", "Adam8bitBlockwise"


@pytest.mark.parametrize(("eight_bit", "twin"), TWINS.items())
def test_load_config_default_file_differs_in_the_type_word_only(eight_bit, twin):
    path = ROOT / defaults(DEEPSPEED, twin)[0]
    fp32, quantized = load_config(path, twin, 400), load_config(path, eight_bit, 400)
    assert fp32["optimizer"].pop("type") == twin
    assert quantized["optimizer"].pop("type") == eight_bit
    if twin == "SGD":
        # torch's, which DeepSpeed knows nothing of, in its fastest form.
        assert fp32.pop("zero_allow_untested_optimizer")
        assert fp32["optimizer"]["params"].pop("fused")
    assert fp32 == quantized


def test_load_config_8bit_only_keys_are_dropped_for_adamw(tmp_path):
    path = tmp_path / "config.json"
    params = {"lr": 1e-3, **dict.fromkeys(OWN_KEYS, 1)}
    path.write_text(json.dumps({"optimizer": {"type": EIGHT_BIT, "params": params}}))
    assert load_config(path, BASELINE, 1)["optimizer"]["params"] == {"lr": 1e-3}
    assert load_config(path, EIGHT_BIT, 1)["optimizer"]["params"] == params


def test_load_config_codec_of_the_run_replaces_that_of_the_file(tmp_path):
    path = tmp_path / "config.json"
    for params in ({}, {"codec": "dynamic"}):
        path.write_text(json.dumps({"optimizer": {"type": EIGHT_BIT, "params": params}}))
        assert load_config(path, EIGHT_BIT, 1)["optimizer"]["params"] == params
        ours = load_config(path, EIGHT_BIT, 1, "fp8")
        assert ours["optimizer"]["params"] == {"codec": "fp8"}
        assert load_config(path, BASELINE, 1, "fp8")["optimizer"]["params"] == {}


@pytest.mark.parametrize(
    ("optimizer", "codec", "steps"),
    [
        (EIGHT_BIT, None, [(ADAM, CODECS["log"])]),
        (EIGHT_BIT, "log6", [(ADAM, CODECS["log6"])]),
        (BASELINE, None, []),
    ],
)
def test_build_for_a_run_is_of_the_steps_of_its_optimizer(monkeypatch, optimizer, codec, steps):
    asked = []

    def op_for_steps(*step):
        asked.append(step)
        return SimpleNamespace(load=lambda: None)

    monkeypatch.setattr(build, "op_for_steps", op_for_steps)
    monkeypatch.setattr(build.ops, "needed", lambda *_: [])
    build.build_for(DEFAULT, optimizer, codec)
    assert asked == steps


@pytest.mark.parametrize("total", [400, "auto"])
def test_load_config_total_steps_of_the_file_becomes_steps_and_nothing_else(tmp_path, total):
    asked = json.loads(DEFAULT.read_text())
    asked["scheduler"]["params"]["total_num_steps"] = total
    (tmp_path / "config.json").write_text(json.dumps(asked))
    got = load_config(tmp_path / "config.json", EIGHT_BIT, 123)
    assert got["scheduler"]["params"].pop("total_num_steps") == 123
    del asked["scheduler"]["params"]["total_num_steps"]
    assert got == asked


@pytest.mark.parametrize("scheduler", [{}, {"scheduler": {"type": "WarmupLR", "params": {}}}])
def test_load_config_schedule_without_total_steps_stays_without(tmp_path, scheduler):
    asked = {"optimizer": {"type": EIGHT_BIT}, **scheduler}
    (tmp_path / "config.json").write_text(json.dumps(asked))
    assert load_config(tmp_path / "config.json", EIGHT_BIT, 123) == asked


@pytest.mark.parametrize("content", ['{"optimizer": {"type": "AdamW"}}', "{}"])
@pytest.mark.parametrize(("eight_bit", "twin"), TWINS.items())
def test_load_config_other_type_raises(tmp_path, content, eight_bit, twin):
    path = tmp_path / "config.json"
    path.write_text(content)
    for optimizer in (eight_bit, twin):
        with pytest.raises(ValueError, match=f"expected '{eight_bit}'"):
            load_config(path, optimizer, 1)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_load_config_adamw_on_a_gpu_without_offload_is_torchs(monkeypatch, tmp_path, device):
    """DeepSpeed's needs a CUDA toolkit; whatever stays the same is left alone."""
    accelerator = SimpleNamespace(device_name=lambda: device)
    monkeypatch.setattr(config, "get_accelerator", lambda: accelerator)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"optimizer": {"type": EIGHT_BIT}}))
    params = load_config(path, BASELINE, 1)["optimizer"].get("params", {})
    assert params == ({"torch_adam": True} if device == "cuda" else {})
    assert "params" not in load_config(path, EIGHT_BIT, 1)["optimizer"]
    assert "torch_adam" not in load_config(DEFAULT, BASELINE, 1)["optimizer"]["params"]
