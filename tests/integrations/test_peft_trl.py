# SPDX-License-Identifier: Apache-2.0
"""LoRA's adapters train in 8 bits: with Trainer and with TRL's SFTTrainer.

The base models are float32, bfloat16, and bitsandbytes' 4-bit one of QLoRA; the configs of ZeRO are
those in configs/hf.
"""

from types import SimpleNamespace

import pytest
from places import ROOT
from ranks import StandingRanks

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

RANKS, STEPS, SAVED_AT = 2, 6, 3
TRAINED = 2 * 7 * 2 * 16 * 512
"""Elements of the adapters: of layers, of linear maps in each."""
MODES = {
    "Trainer, DDP, 4-bit": ("trainer", None, "4bit"),
    "Trainer, ZeRO-2": ("trainer", "zero2", "float32"),
    "Trainer, ZeRO-3, 4-bit": ("trainer", "zero3", "4bit"),
    "SFTTrainer, DDP": ("sft", None, "float32"),
    "SFTTrainer, ZeRO-2, bfloat16": ("sft", "zero2", "bfloat16"),
    "SFTTrainer, ZeRO-2, 4-bit": ("sft", "zero2", "4bit"),
    "SFTTrainer, ZeRO-3": ("sft", "zero3", "float32"),
}
"""What trains, the DeepSpeed config and the base model; by what is shown."""

# By its name: to import its module, and with it all of transformers, takes 15 seconds.
BY_TRAINER = SimpleNamespace(__module__="peft_worker", __name__="by_trainer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = StandingRanks(RANKS, tmp_path_factory.mktemp("peft"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("mode", MODES)
def test_adapters_train_in_8_bits_and_resume_with_the_same_bits(ranks, tmp_path, mode):
    kind, config, base = MODES[mode]
    path = config and str(ROOT / "configs" / "hf" / f"{config}_offload.json")
    arguments = {"folder": str(tmp_path), "base": base, "kind": kind, "ds_config": path}
    results = ranks.run(BY_TRAINER, timeout_s=240, **arguments)
    for rank in results:
        assert rank["trained"] == TRAINED
        # The second are narrow: 16 rows to a block.  No matrix of the base is so shaped.
        assert (rank["bits"], rank["shapes"]) == ({8}, {(16, 512), (512, 16)})
        assert rank["bytes"] / rank["numel"] < 2.1
        assert len(rank["losses"]) == STEPS and rank["losses"][-1] < rank["losses"][0] - 0.5
        # TRL makes the adapters of a quantized base bfloat16, as QLoRA did.
        adapters = "torch.bfloat16" if (kind, base) == ("sft", "4bit") else "torch.float32"
        assert rank["dtypes"] == {adapters}
        assert rank["resumes"]
        assert rank["resumed steps"] == list(range(SAVED_AT + 1, STEPS + 1))
        assert rank["settings"] == ((0.8, 0.95), 1e-7, 0.1)
        assert rank["filled"] == ((1.0, 4) if config else None)
    held = sum(rank["numel"] for rank in results)
    assert held == (TRAINED if config else RANKS * TRAINED)
