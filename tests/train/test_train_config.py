# SPDX-License-Identifier: Apache-2.0
"""The configs of a run: one file for both optimizers, one word apart."""

import json

import pytest

from examples.gpt.engines import load_config
from zero8.state.keywords import OWN_KEYS

BASELINE, EIGHT_BIT = "AdamW", "Adam8bitBlockwise"


def params_of(path, optimizer, codec=None):
    return load_config(path, optimizer, codec)["optimizer"]["params"]


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


def test_config_of_another_optimizer_is_refused_with_the_file(tmp_path):
    path = write(tmp_path, ".json", {}, kind="AdamW")
    with pytest.raises(ValueError, match=f"got optimizer type 'AdamW' in '{path}', expected"):
        load_config(path, EIGHT_BIT)
