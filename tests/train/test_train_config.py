# SPDX-License-Identifier: Apache-2.0
"""The configs of a run: one file for both optimizers, one word apart."""

import json
from types import SimpleNamespace

import pytest
from places import ROOT

from examples.gpt import build, config, engine_fsdp2
from examples.gpt.engine import DEEPSPEED, DEFAULTS, FSDP2, TWINS, defaults
from zero8.algorithms.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.state.keywords import OWN_KEYS

DEFAULT = ROOT / "configs" / "zero2_offload.json"
BASELINE, EIGHT_BIT = "AdamW", "Adam8bitBlockwise"
PAIRS = [(engine, name) for engine in DEFAULTS for name in DEFAULTS[engine]]


def loaded(engine, path, optimizer, steps=400, codec=None):
    """Return a config, and the name and keywords of its optimizer."""
    load = config.load_config if engine == DEEPSPEED else engine_fsdp2.load_config
    found = load(path, optimizer, steps, codec)
    section = found.pop("optimizer")
    pair = (section["type"], section["params"]) if engine == DEEPSPEED else section
    return found, *pair


@pytest.mark.parametrize(("engine", "ours"), PAIRS)
def test_default_config_of_a_pair_differs_in_the_optimizer_only(engine, ours):
    path = ROOT / defaults(engine, ours)[0]
    (quantized, *q), (fp32, *f) = (loaded(engine, path, name) for name in (ours, TWINS[ours]))
    assert (q[0], f[0]) == (ours, TWINS[ours])
    if (engine, ours) == (DEEPSPEED, "SGD8bitBlockwise"):
        # torch's, which DeepSpeed knows nothing of, in its fastest form.
        assert fp32.pop("zero_allow_untested_optimizer") and f[1].pop("fused")
    assert q[1] == f[1]
    if engine == FSDP2:
        assert [one.pop("scheduler").keywords for one in (fp32, quantized)] == [
            {"warmup_steps": 40, "min_ratio": 0.1, "total_steps": 400}
        ] * 2
    assert fp32 == quantized


@pytest.mark.parametrize(
    ("ours", "theirs", "optimizer"),
    [
        ("fsdp2_offload.toml", "zero2_offload.json", "Adam8bitBlockwise"),
        ("fsdp2_offload_sgd.toml", "zero2_offload_sgd.json", "SGD8bitBlockwise"),
        ("gpu/fsdp2_offload_1b.toml", "gpu/zero2_offload_1b.json", "Adam8bitBlockwise"),
    ],
)
def test_config_of_fsdp2_is_the_twin_of_deepspeeds(ours, theirs, optimizer):
    found, _, keywords = loaded(FSDP2, ROOT / "configs" / ours, optimizer)
    theirs = json.loads((ROOT / "configs" / theirs).read_text())
    assert found["micro_batch_size"] == theirs["train_micro_batch_size_per_gpu"]
    assert found["accumulation_steps"] == theirs.get("gradient_accumulation_steps", 1)
    assert found["gradient_clipping"] == theirs["gradient_clipping"]
    assert keywords == theirs["optimizer"]["params"]
    schedule = theirs["scheduler"]["params"]
    assert found["scheduler"].keywords["warmup_steps"] == schedule["warmup_num_steps"]
    assert found["scheduler"].keywords["min_ratio"] == schedule["cos_min_ratio"]
    is_bf16 = theirs.get("bf16", {}).get("enabled", False)
    assert found["fsdp2"] == {"offload": True, "mixed_precision": "bf16" if is_bf16 else "none"}


def write(folder, engine, params, kind=EIGHT_BIT):
    """Write a config with an optimizer's parameters, all numbers or strings; return its path."""
    path = folder / "config"
    if engine == DEEPSPEED:
        path.write_text(json.dumps({"optimizer": {"type": kind, "params": params}}))
    else:
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"type": kind, **params}.items()]
        path.write_text("\n".join(["[scheduler]", "[optimizer]", *lines]))
    return path


@pytest.mark.parametrize("engine", DEFAULTS)
def test_keys_of_zero8_are_dropped_for_adamw_and_the_codec_of_a_run_is_zero8s(tmp_path, engine):
    path = write(tmp_path, engine, {"lr": 1e-3, **dict.fromkeys(OWN_KEYS, 1)})
    for codec, expected in ((None, 1), ("fp8", "fp8")):
        assert loaded(engine, path, BASELINE, codec=codec)[2] == {"lr": 1e-3}
        assert loaded(engine, path, EIGHT_BIT, codec=codec)[2] == {
            **{"lr": 1e-3, **dict.fromkeys(OWN_KEYS, 1)},
            "codec": expected,
        }


@pytest.mark.parametrize("engine", DEFAULTS)
@pytest.mark.parametrize("optimizer", [BASELINE, EIGHT_BIT])
def test_config_of_another_optimizer_is_refused_with_the_file(tmp_path, engine, optimizer):
    path = write(tmp_path, engine, {}, kind="AdamW")
    with pytest.raises(ValueError, match=f"got optimizer type 'AdamW' in '{path}', expected"):
        loaded(engine, path, optimizer)


@pytest.mark.parametrize("total", [400, "auto"])
def test_total_steps_of_the_file_become_those_of_the_run(tmp_path, total):
    asked = json.loads(DEFAULT.read_text())
    asked["scheduler"]["params"]["total_num_steps"] = total
    (tmp_path / "config").write_text(json.dumps(asked))
    got = config.load_config(tmp_path / "config", EIGHT_BIT, 123)
    assert got["scheduler"]["params"].pop("total_num_steps") == 123
    del asked["scheduler"]["params"]["total_num_steps"]
    assert got == asked


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_adamw_on_a_gpu_without_offload_is_torchs(monkeypatch, tmp_path, device):
    """DeepSpeed's needs a CUDA toolkit; whatever stays the same is left alone."""
    accelerator = SimpleNamespace(device_name=lambda: device)
    monkeypatch.setattr(config, "get_accelerator", lambda: accelerator)
    path = write(tmp_path, DEEPSPEED, {})
    expected = {"torch_adam": True} if device == "cuda" else {}
    assert loaded(DEEPSPEED, path, BASELINE)[2] == expected
    assert loaded(DEEPSPEED, path, EIGHT_BIT)[2] == {}
    assert "torch_adam" not in loaded(DEEPSPEED, DEFAULT, BASELINE)[2]


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
