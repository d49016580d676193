# SPDX-License-Identifier: Apache-2.0
"""The measurement of the stable embedding."""

import pytest
import torch
from torch import nn

from benchmarks import stable_embedding
from benchmarks.stable_embedding import OPTIMIZERS, SETTLED, STARTS, gradients, recipe_of, trained


def test_stable_embedding_bench_changes_the_embeddings_alone():
    models = {}
    for start in STARTS:
        torch.manual_seed(0)
        models[start] = recipe_of(start, 1, 1, 0).task.make_model()
    torchs, ours, *stable = (dict(model.named_parameters()) for model in models.values())
    token, position = "token_embedding.weight", "position_embedding.weight"
    for name in ours.keys() - {token, position}:
        assert all(torch.equal(other[name], ours[name]) for other in (torchs, *stable))
    assert all(other[token].abs().max() < (6 / 512) ** 0.5 for other in stable)
    assert torchs[token].std() > 0.9 and ours[token].std() < 0.03
    assert torch.equal(torchs[position], ours[position])
    assert torch.equal(stable[0][position], ours[position])
    assert stable[1][position].std() > 0.9


def test_stable_embedding_bench_gradients_are_those_of_the_backward():
    found = gradients("StableEmbedding", 0)
    torch.manual_seed(0)
    task = recipe_of("StableEmbedding", 1, 1, 0).task
    model = task.make_model()
    model(*task.batch(0, 0)).backward()
    grad = model.token_embedding.weight.grad
    assert found["whole"]["largest"] == pytest.approx(grad.abs().max().item(), rel=1e-4)
    assert found["output"]["variance"] == pytest.approx(1.0, abs=0.02)
    # What comes through the lookup alone: the output layer has another weight.
    model.zero_grad()
    forward, weight = nn.functional.linear, model.token_embedding.weight
    nn.functional.linear = lambda x, w, *b: forward(x, w.detach() if w is weight else w, *b)
    try:
        model(*task.batch(0, 0)).backward()
    finally:
        nn.functional.linear = forward
    grad = model.token_embedding.weight.grad
    assert found["lookup"]["largest"] == pytest.approx(grad.abs().max().item(), rel=1e-4)
    assert found["lookup"]["variance"] == pytest.approx(grad.var().item(), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stable_embedding_bench_trains(optimizer):
    found = trained("StableEmbedding", optimizer, 1, SETTLED + 10, 0)
    assert 2.0 < found["validation"] < 3.3 < found["largest"] + 1.0


def test_stable_embedding_bench_table_has_means_and_ranges():
    runs = [
        {"validation": 2.5, "largest": 3.0, "variance": 1.0},
        {"validation": 2.25, "largest": 4.0, "variance": 0.5},
    ]
    part = {"largest": 0.25, "variance": 0.5}
    other = {"largest": 0.75, "variance": 0.5}
    table = stable_embedding.markdown(
        {
            "gradients": {"a start": [{"output": part}, {"output": other}]},
            "trainings": [{"start": "a start", "optimizer": "8-bit", "factor": 10, "runs": runs}],
            "steps": 7,
            "seeds": 2,
            "command": "python -m benchmarks.stable_embedding",
            "commit": None,
            "cpu": "a processor",
            "machine": {"cores": 2},
            "seconds": 61.4,
            "versions": {"torch": "2.13"},
        }
    )
    assert "| a start | 0.5 | 0.5 |" in table and "61 s" in table
    assert "| a start | 8-bit | 10 | 2.25 to 2.5 | 3 to 4 | 0.5 to 1 |" in table
