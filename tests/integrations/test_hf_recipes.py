# SPDX-License-Identifier: Apache-2.0
"""Each recipe in configs/hf trains under transformers' Trainer, which fills in "auto"."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from needs import need
from places import ROOT
from ranks import StandingRanks

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]

RANKS = 2
FOLDER = ROOT / "configs" / "hf"
FILES = sorted(path.name for path in FOLDER.glob("*.json"))
ARGUMENTS = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "adam_beta1": 0.85,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-7,
    "weight_decay": 0.03,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "lr_scheduler_type": "linear",
    "seed": 3,
}
# By its name: to import its module, and with it all of transformers, takes 10 seconds.
TRAIN = SimpleNamespace(__module__="hf_recipe_worker", __name__="train")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
        need(f"no {missing[0]}: pip install {' '.join(missing)}")
    ranks = StandingRanks(RANKS, tmp_path_factory.mktemp("recipes"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FILES)
def test_recipe_under_the_trainer_takes_its_arguments_and_trains(ranks, tmp_path, name, bf16):
    arguments = {**ARGUMENTS, "bf16": bf16}
    path, output = str(FOLDER / name), str(tmp_path)
    for got in ranks.run(TRAIN, path=path, output=output, arguments=arguments, timeout_s=200):
        for group in got["groups"]:
            assert list(group["betas"]) == [0.85, 0.95] and group["eps"] == 1e-7
        # The Trainer decays matrices, not norms, where it makes the groups.
        assert {group["weight_decay"] for group in got["groups"]} <= {0.03, 0.0}
        assert max(group["weight_decay"] for group in got["groups"]) == 0.03
        assert got["clipping"] == 0.5
        assert got["batches"] == (RANKS * 4 * 2, 4, 2)
        assert got["dtype"] == ("torch.bfloat16" if bf16 else "torch.float32")
        assert got["stage"] == int(name.removeprefix("zero")[0])
        assert got["offload"].endswith("cpu")
        # Warm-up and decay are the Trainer's.
        assert max(got["lrs"]) == 1e-2 and got["lrs"][-1] < got["lrs"][-2] < 1e-2
        assert got["state bytes"] < 2.2  # 2 + 12 / 64 bytes, as its rows have 64 or 128 elements
        assert len(got["losses"]) == 6 and got["losses"][-1] < got["losses"][0] - 0.5
