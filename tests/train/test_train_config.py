# SPDX-License-Identifier: Apache-2.0
"""The configs of a run: one file for both optimizers, one word apart."""

import json

import pytest
import torch
from train_worker import DEEPSPEED, FSDP2, config_of

from examples.gpt.engines import TWINS, completed, load_config
from zero8.state.keywords import OWN_KEYS

BASELINE, EIGHT_BIT = "AdamW", "Adam8bitBlockwise"
PAIRS = [(DEEPSPEED, name) for name in TWINS]
PAIRS += [(FSDP2, EIGHT_BIT), (FSDP2, "SGD8bitBlockwise")]


def params_of(path, optimizer, codec=None):
    return load_config(path, optimizer, codec)["optimizer"]["params"]


@pytest.mark.parametrize(("engine", "ours"), PAIRS)
def test_config_of_a_pair_differs_in_the_optimizers_type_only(engine, ours):
    quantized, fp32 = (load_config(config_of(engine, ours), name) for name in (ours, TWINS[ours]))
    assert quantized["optimizer"].pop("type") == ours
    assert fp32["optimizer"].pop("type") == TWINS[ours]
    assert fp32 == quantized


def write(folder, ending, params, kind=EIGHT_BIT):
    """Write a config with an optimizer's parameters, all numbers or strings; return its path."""
    path = folder / f"config{ending}"
    if ending == ".json":
        path.write_text(json.dumps({"optimizer": {"type": kind, "params": params}}))
    else:
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"type": kind, **params}.items()]
        path.write_text("\n".join(["[optimizer]", *lines]))
    return path


@pytest.mark.parametrize("ending", [".json", ".toml"])
def test_keys_of_zero8_are_dropped_for_adamw_and_the_codec_of_a_run_is_zero8s(tmp_path, ending):
    path = write(tmp_path, ending, {"lr": 1e-3, **dict.fromkeys(OWN_KEYS, 1)})
    for codec, expected in ((None, 1), ("fp8", "fp8")):
        assert params_of(path, BASELINE, codec) == {"lr": 1e-3}
        assert params_of(path, EIGHT_BIT, codec) == {
            **{"lr": 1e-3, **dict.fromkeys(OWN_KEYS, 1)},
            "codec": expected,
        }


@pytest.mark.parametrize("ending", [".json", ".toml"])
@pytest.mark.parametrize("optimizer", [BASELINE, EIGHT_BIT])
def test_config_of_another_optimizer_is_refused_with_the_file(tmp_path, ending, optimizer):
    path = write(tmp_path, ending, {}, kind="AdamW")
    with pytest.raises(ValueError, match=f"got optimizer type 'AdamW' in '{path}', expected"):
        load_config(path, optimizer)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_adamw_on_a_gpu_without_offload_is_torchs(monkeypatch, tmp_path, on_gpu):
    """DeepSpeed's needs a CUDA toolkit; whatever stays the same is left alone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)

    def params(path, optimizer):
        return completed(load_config(path, optimizer), 1)["optimizer"]["params"]

    path = write(tmp_path, ".json", {})
    assert params(path, BASELINE) == ({"torch_adam": True} if on_gpu else {})
    assert params(path, EIGHT_BIT) == {}
    assert "torch_adam" not in params(config_of(DEEPSPEED, BASELINE), BASELINE)
