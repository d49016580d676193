# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints of algorithms with other moments than Adam's, in stages 2 and 3."""

import pytest
import torch
from convert_cases import converted
from deepspeed.utils import safe_get_full_optimizer_state
from zero_worker import Bag, config, make_engine, take_step

from zero8.spec.algorithms import ELEMENTWISE, algorithm_called

RANKS = 2


def moments_of(engine, algorithm: str) -> dict[str, list[torch.Tensor]]:
    names = algorithm_called(algorithm).moment_names
    return {
        name: [safe_get_full_optimizer_state(p, one).view(Bag.SHAPES[name]) for one in names]
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


def config_of(stage: int, algorithm: str, **options) -> dict:
    optimizer = algorithm_called(algorithm).class_name
    settings = {"min_8bit_size": 1} | ({"momentum": 0.9} if algorithm == "sgd" else {})
    return config(stage=stage, offload=None, optimizer=optimizer, **settings) | options


def save(stage: int, algorithm: str, folder: str) -> dict:
    engine = make_engine(config_of(stage, algorithm), Bag())
    for step in range(2):
        take_step(engine, step)
    engine.save_checkpoint(folder)
    return moments_of(engine, algorithm)


def load(stage: int, algorithm: str, folder: str) -> dict:
    universal = {"checkpoint": {"load_universal": True}}
    engine = make_engine(config_of(stage, algorithm, **universal), Bag())
    engine.load_checkpoint(folder)
    loaded = moments_of(engine, algorithm)
    take_step(engine, 2)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [one.name for one in ELEMENTWISE])
@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoint_of_an_algorithm_has_its_moments(
    stage, algorithm, standing_ranks, tmp_path
):
    """To half a code in blocks that a boundary between ranks cuts, which are encoded anew."""
    ranks = standing_ranks(RANKS)
    arguments = {"stage": stage, "algorithm": algorithm}
    saved, _ = ranks.run(save, folder=str(tmp_path / "saved"), **arguments)
    converted(tmp_path / "saved", tmp_path / "universal", "zero")
    for loaded in ranks.run(load, folder=str(tmp_path), **arguments):
        for name, moments in saved.items():
            for got, expected in zip(loaded[name], moments, strict=True):
                assert (got - expected).norm() <= 0.02 * expected.norm(), name
                assert (got == expected).float().mean() > 0.8, name
