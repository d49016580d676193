# SPDX-License-Identifier: Apache-2.0
"""LoRA's adapters train in 8 bits: with PEFT by hand, with Trainer and with TRL's SFTTrainer.

The base models are float32, bfloat16, and bitsandbytes' 4-bit one of QLoRA.
"""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from needs import need
from places import ROOT
from ranks import StandingRanks

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

RANKS, STEPS, SAVED_AT = 2, 6, 3
LAYERS, MATRICES, NUMEL = 2, 7, 2 * 16 * 512
"""Layers of the model, linear maps in each, elements of the adapter of one."""
CONFIGS = {"zero2": "configs/hf/zero2_offload.json", "zero3": "configs/hf/zero3_offload.json"}

MODES = {
    "by hand, float32": ("by hand", None, "float32"),
    "by hand, bfloat16": ("by hand", None, "bfloat16"),
    "by hand, 4-bit": ("by hand", None, "4bit"),
    "Trainer, DDP": ("trainer", None, "float32"),
    "Trainer, ZeRO-2": ("trainer", "zero2", "float32"),
    "Trainer, ZeRO-2, 4-bit": ("trainer", "zero2", "4bit"),
    "Trainer, ZeRO-3": ("trainer", "zero3", "float32"),
    "Trainer, ZeRO-3, 4-bit": ("trainer", "zero3", "4bit"),
    "SFTTrainer, DDP": ("sft", None, "float32"),
    "SFTTrainer, ZeRO-2": ("sft", "zero2", "float32"),
    "SFTTrainer, ZeRO-2, bfloat16": ("sft", "zero2", "bfloat16"),
    "SFTTrainer, ZeRO-2, 4-bit": ("sft", "zero2", "4bit"),
    "SFTTrainer, ZeRO-3": ("sft", "zero3", "float32"),
}
"""What trains, the DeepSpeed config and the base model; by what is shown."""

FROZEN = {
    "float32": {"torch.float32"},
    "bfloat16": {"torch.bfloat16"},
    "4bit": {"torch.uint8", "torch.float32"},
}
"""The dtypes of a base model."""

# By their names: to import their module, and with it all of transformers, takes 15 seconds.
BY_HAND = SimpleNamespace(__module__="peft_worker", __name__="by_hand")
BY_TRAINER = SimpleNamespace(__module__="peft_worker", __name__="by_trainer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    names = ("transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes")
    if missing := [name for name in names if find_spec(name) is None]:
        need(f"no {missing[0]}: pip install {' '.join(missing)}")
    ranks = StandingRanks(RANKS, tmp_path_factory.mktemp("peft"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("mode", MODES)
def test_adapters_train_in_8_bits_resume_with_the_same_bits_and_load_elsewhere(
    ranks, tmp_path, mode
):
    kind, config, base = MODES[mode]
    arguments = {"folder": str(tmp_path), "base": base, "timeout_s": 240}
    if kind == "by hand":
        results = ranks.run(BY_HAND, **arguments)
    else:
        path = config and str(ROOT / CONFIGS[config])
        results = ranks.run(BY_TRAINER, kind=kind, ds_config=path, **arguments)
    trained = LAYERS * MATRICES * NUMEL
    for rank in results:
        assert rank["trained"] == trained
        assert rank["moments"]["bits"] == {8}
        # The second are narrow: 16 rows to a block.  No matrix of the base is so shaped.
        assert rank["moments"]["shapes"] == {(16, 512), (512, 16)}
        assert rank["moments"]["bytes"] / rank["moments"]["numel"] < 2.1
        assert len(rank["losses"]) == STEPS and rank["losses"][-1] < rank["losses"][0] - 0.5

        assert rank["frozen"] and rank["frozen dtypes"] == FROZEN[base]
        # TRL makes the adapters of a quantized base bfloat16, as QLoRA did.
        adapters = "torch.bfloat16" if (kind, base) == ("sft", "4bit") else "torch.float32"
        assert rank["dtypes"] == {adapters}

        assert rank["resumes"]
        if kind == "by hand":
            assert not rank["resumes without states"]
        else:
            assert rank["resumed steps"] == list(range(SAVED_AT + 1, STEPS + 1))

        carried = rank["carried"]
        assert carried["matters"] > 0.1 and carried["loads"]
        if base == "float32":
            # In float64, but Llama's five norms round to float32: the sums of W + BA and of W and
            # BA, 1e-14 apart, may round differently there, which what follows makes less than 100
            # times larger.  Without the adapter logits are another 0.1 and more.
            assert not carried["left"]
            assert carried["merge error"] <= 5 * 100 * 2**-24 * carried["largest"] < 0.01
    held = sum(rank["moments"]["numel"] for rank in results)
    assert held == (trained if config else RANKS * trained)
