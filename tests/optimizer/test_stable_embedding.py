# SPDX-License-Identifier: Apache-2.0
"""The embedding layer, and the float32 moments of its parameters in one process."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from small_optimizers import run
from torch import nn

from zero8 import Adam8bitBlockwise, Lion8bitBlockwise, StableEmbedding

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ROWS, DIM = 90, 64  # more elements than min_8bit_size
BF16 = torch.bfloat16


def model_of(**keywords):
    torch.manual_seed(0)
    return nn.Sequential(StableEmbedding(ROWS, DIM, **keywords), nn.Linear(DIM, ROWS, bias=False))


# --- The layer -----------------------------------------------------------------------------------


def test_stable_embedding_starts_uniform_as_xaviers_with_zeros_at_padding():
    torch.manual_seed(3)
    layer = StableEmbedding(ROWS, DIM, padding_idx=-2)
    torch.manual_seed(3)
    expected = nn.init.xavier_uniform_(torch.empty(ROWS, DIM))
    assert expected.abs().max() < (6 / (ROWS + DIM)) ** 0.5
    expected[ROWS - 2] = 0.0
    assert torch.equal(layer.weight, expected)
    assert torch.equal(layer.norm.weight, torch.ones(DIM)) and not layer.norm.bias.any()


def test_stable_embedding_output_is_the_normed_output_of_torchs():
    settings = dict(padding_idx=2, max_norm=0.5, norm_type=1.0, scale_grad_by_freq=True)
    layer, tokens = StableEmbedding(ROWS, DIM, **settings), torch.tensor([[1, 2, 1], [5, 6, 89]])
    plain = nn.Embedding(ROWS, DIM, **settings, _weight=layer.weight.detach().clone())
    nn.init.normal_(layer.norm.weight)
    nn.init.normal_(layer.norm.bias)
    expected = F.layer_norm(plain(tokens), (DIM,), layer.norm.weight, layer.norm.bias)
    found = layer(tokens)
    assert torch.equal(found, expected) and torch.equal(layer.weight, plain.weight)
    assert torch.equal(found[0, 1], layer.norm.bias)
    for output in (found, expected):
        output.square().sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad) and not layer.weight.grad[2].any()


# --- Its moments ---------------------------------------------------------------------------------


def tied():
    model = model_of()
    model[1].weight = model[0].weight
    return model


def loaded_by_assigning():
    model = model_of(device="meta")
    model.load_state_dict(model_of().state_dict(), assign=True)
    return model


def registered_again():
    model = model_of()
    model[0].register_parameter("weight", nn.Parameter(torch.randn(ROWS, DIM)))
    return model


WAYS = {
    "made": model_of,
    "tied": tied,
    "deep copy": lambda: copy.deepcopy(model_of()),
    "unpickled": lambda: pickle.loads(pickle.dumps(model_of())),
    "assign=True": loaded_by_assigning,
    "registered again": registered_again,
    "compiled": lambda: torch.compile(model_of()),
}


@pytest.mark.parametrize("optimizer_class", [Adam8bitBlockwise, Lion8bitBlockwise])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_stable_embedding_has_float32_moments_however_it_came(way, optimizer_class):
    model = way()
    for settings in ({}, {"min_8bit_size": 0}):
        optimizer = optimizer_class(model.named_parameters(), **settings)
        run(optimizer, list(model.parameters()), 1)
        rows = optimizer.memory_report().rows
        found = {row.name: (row.bits, row.reason) for row in rows}
        assert found.pop("0.weight") == (32, "in a StableEmbedding")
        assert [bits for bits, _ in found.values()] == [32, 32, 8][: len(found)]


def test_stable_embedding_whose_weight_a_framework_has_replaced_is_freed():
    model = model_of()
    optimizer = Adam8bitBlockwise(model.named_parameters())
    weight = weakref.ref(model[0].weight)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(5))]
    del model
    gc.collect()
    assert optimizer.memory_report().rows == () and weight() is None
