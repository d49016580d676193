# SPDX-License-Identifier: Apache-2.0
import json
import re

import pytest
from places import ROOT

from examples.gpt.config_fsdp2 import load_config
from zero8.state.keywords import OWN_KEYS

DEFAULT = ROOT / "configs" / "fsdp2_offload.toml"
BASELINE, EIGHT_BIT = "AdamW", "Adam8bitBlockwise"


@pytest.fixture
def changed(tmp_path):
    """Return a function that writes the default config with one text in the place of another."""

    def write(old, new):
        text = DEFAULT.read_text()
        assert old in text
        path = tmp_path / "config.toml"
        path.write_text(text.replace(old, new, 1))
        return path

    return write


@pytest.mark.parametrize(
    ("ours", "theirs", "optimizer", "mixed_precision"),
    [
        ("fsdp2_offload.toml", "zero2_offload.json", "Adam8bitBlockwise", "none"),
        ("fsdp2_offload_sgd.toml", "zero2_offload_sgd.json", "SGD8bitBlockwise", "none"),
        ("gpu/fsdp2_offload_1b.toml", "gpu/zero2_offload_1b.json", "Adam8bitBlockwise", "bf16"),
    ],
)
def test_load_config_file_is_the_twin_of_deepspeeds(ours, theirs, optimizer, mixed_precision):
    ours = load_config(ROOT / "configs" / ours, optimizer, 123)
    theirs = json.loads((ROOT / "configs" / theirs).read_text())
    assert ours.micro_batch_size == theirs["train_micro_batch_size_per_gpu"]
    assert ours.accumulation_steps == theirs.get("gradient_accumulation_steps", 1)
    assert ours.gradient_clipping == theirs["gradient_clipping"]
    assert ours.optimizer.keywords == theirs["optimizer"]["params"]
    schedule = theirs["scheduler"]["params"]
    assert ours.scheduler.warmup_steps == schedule["warmup_num_steps"]
    assert ours.scheduler.min_ratio == schedule["cos_min_ratio"]
    assert ours.scheduler.total_steps == 123
    assert ours.fsdp2.offload and ours.fsdp2.mixed_precision == mixed_precision
    assert theirs.get("bf16", {}).get("enabled", False) == (mixed_precision == "bf16")


def test_load_config_codec_of_the_run_replaces_that_of_the_file():
    ours, twin = (load_config(DEFAULT, name, 1, "fp8") for name in (EIGHT_BIT, BASELINE))
    assert ours.optimizer.keywords["codec"] == "fp8"
    assert "codec" not in twin.optimizer.keywords


def test_load_config_8bit_only_keys_are_dropped_for_adamw(changed):
    path = changed("lr = 2e-3", "\n".join(["lr = 2e-3", *(f"{key} = 1" for key in OWN_KEYS)]))
    assert set(load_config(path, EIGHT_BIT, 1).optimizer.keywords) >= set(OWN_KEYS)
    assert (
        load_config(path, BASELINE, 1).optimizer.keywords
        == load_config(DEFAULT, BASELINE, 1).optimizer.keywords
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("micro_batch_size", "batch_size", "top level: got unknown key 'batch_size'"),
        ("lr =", "rate =", "[optimizer]: got unknown key 'rate'; valid keys are betas, block_size"),
        ("min_ratio =", "ratio =", "got unknown key 'ratio'; valid keys are min_ratio, warmup"),
        ("offload =", "offlod =", "[fsdp2]: got unknown key 'offlod'; valid keys are mixed_prec"),
        ("lr = 2e-3", "", "[optimizer]: expected the key 'lr' too"),
        (
            "[fsdp2]",
            "[fsdp]",
            "top level: got unknown key 'fsdp'; valid keys are accumulation_steps, fsdp2",
        ),
        ('"Adam8bitBlockwise"', '"SGD"', "got optimizer type 'SGD', expected 'Adam8bitBlockwise'"),
        ('"none"', '"fp16"', "got mixed_precision = 'fp16', expected one of ['none', 'bf16']"),
        ("offload = true", "offload = 1", "got offload = 1, expected a bool"),
        ("size = 8", "size = 0", "got micro_batch_size = 0, expected a positive int"),
        ("[optimizer]", "{", "is a valid config"),  # no TOML
    ],
)
def test_load_config_what_it_does_not_know_raises_with_what_it_does(changed, old, new, message):
    path = changed(old, new)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_config(path, EIGHT_BIT, 1)
    assert str(path) in str(caught.value)
