# SPDX-License-Identifier: Apache-2.0
"""The embedding layer, and the float32 moments of its parameters in one process."""

import copy
import gc
import inspect
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


def optimizer_of(model, optimizer_class=Adam8bitBlockwise, **keywords):
    return optimizer_class(model.named_parameters(), **{"weight_decay": 0.0, **keywords})


def bits_after_a_step(model, optimizer) -> dict[str, tuple[int, str]]:
    """Return bits and reason of each parameter's moments."""
    run(optimizer, list(model.parameters()), 1)
    return {row.name: (row.bits, row.reason) for row in optimizer.memory_report().rows}


FLOAT32 = 32, "in a StableEmbedding"


# --- The layer -----------------------------------------------------------------------------------


def test_stable_embedding_takes_the_arguments_of_torchs():
    def arguments(cls):
        return [(p.name, p.default) for p in inspect.signature(cls).parameters.values()]

    assert arguments(StableEmbedding) == arguments(nn.Embedding)


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


@pytest.mark.parametrize(("rows", "variance"), [(500, 0.996), (50_000, 0.799)])
def test_stable_embedding_output_has_the_stated_variance_at_the_start(rows, variance):
    torch.manual_seed(0)
    out = StableEmbedding(rows, 256)(torch.arange(500))
    of_weight = 2 / (rows + 256)
    assert of_weight / (of_weight + 1e-5) == pytest.approx(variance, abs=5e-4)
    assert out.var(-1, correction=0).mean().item() == pytest.approx(variance, abs=5e-3)


GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("has_autocast", [False, True], ids=["plain", "autocast"])
def test_stable_embedding_output_has_the_dtype_of_torchs(dtype, has_autocast, device):
    tokens, kept = torch.arange(8, device=device), {"dtype": dtype, "device": device}
    with torch.autocast(device, BF16, enabled=has_autocast):
        found, expected = (
            cls(ROWS, DIM, **kept)(tokens) for cls in (StableEmbedding, nn.Embedding)
        )
    assert found.dtype == expected.dtype == dtype
    found.float().square().sum().backward()


def test_stable_embedding_from_pretrained_keeps_the_weight():
    weight = torch.randn(ROWS, DIM).to(BF16)
    before = weight.clone()
    layer = StableEmbedding.from_pretrained(weight, padding_idx=1)
    assert isinstance(layer, StableEmbedding) and layer.padding_idx == 1
    assert layer.weight.data_ptr() == weight.data_ptr() and torch.equal(layer.weight, before)
    assert layer.norm.weight.dtype == layer.norm.bias.dtype == BF16
    assert not layer.weight.requires_grad and layer.norm.weight.requires_grad
    assert StableEmbedding.from_pretrained(weight, freeze=False).weight.requires_grad


def test_stable_embedding_loads_the_weight_of_torchs_if_not_strict():
    layer, plain = StableEmbedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
    with pytest.raises(RuntimeError, match='Missing key.*"norm.weight", "norm.bias"'):
        layer.load_state_dict(plain.state_dict())
    found = layer.load_state_dict(plain.state_dict(), strict=False)
    assert found.missing_keys == ["norm.weight", "norm.bias"] and not found.unexpected_keys
    assert torch.equal(layer.weight, plain.weight)
    assert torch.equal(layer.norm.weight, torch.ones(DIM))


# --- Its moments ---------------------------------------------------------------------------------


def tied():
    model = model_of()
    model[1].weight = model[0].weight
    return model


def tied_to_the_head():
    model = model_of()
    model[0].weight = model[1].weight
    return model


def loaded_by_assigning():
    model = model_of(device="meta")
    model.load_state_dict(model_of().state_dict(), assign=True)
    return model


def moved():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model_of().to(BF16)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def registered_again():
    model = model_of()
    model[0].register_parameter("weight", nn.Parameter(torch.randn(ROWS, DIM)))
    return model


WAYS = {
    "made": model_of,
    "tied": tied,
    "tied to the head": tied_to_the_head,
    "deep copy": lambda: copy.deepcopy(model_of()),
    "unpickled": lambda: pickle.loads(pickle.dumps(model_of())),
    "to_empty": lambda: model_of(device="meta").to_empty(device="cpu"),
    "assign=True": loaded_by_assigning,
    "other dtype": moved,
    "registered again": registered_again,
    "compiled": lambda: torch.compile(model_of()),
}


@pytest.mark.parametrize("optimizer_class", [Adam8bitBlockwise, Lion8bitBlockwise])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_stable_embedding_has_float32_moments_however_it_came(way, optimizer_class):
    model = way()
    for settings in ({}, {"min_8bit_size": 0}):
        optimizer = optimizer_of(model, optimizer_class, **settings)
        found = bits_after_a_step(model, optimizer)
        assert found.pop("0.weight") == FLOAT32
        assert [bits for bits, _ in found.values()] == [32, 32, 8][: len(found)]


COPIES = {"deep copy": copy.deepcopy, "unpickled": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_stable_embedding_of_a_copied_optimizer_keeps_float32_moments(copied):
    model = model_of()
    optimizer = optimizer_of(model)
    expected = bits_after_a_step(model, optimizer)
    new = copied(optimizer)
    assert {row.name: (row.bits, row.reason) for row in new.memory_report().rows} == expected
    new.load_state_dict(optimizer.state_dict())
    assert new.memory_report().rows == optimizer.memory_report().rows
    fresh = copied(optimizer_of(model))
    run(fresh, [p for group in fresh.param_groups for p in group["params"]], 1)
    assert fresh.memory_report().rows == optimizer.memory_report().rows


def test_stable_embedding_loads_moments_of_a_plain_embedding_decoded():
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.LayerNorm(DIM))
    optimizer = Adam8bitBlockwise(model.parameters(), weight_decay=0.0)
    run(optimizer, list(model.parameters()), 3)
    stable = StableEmbedding(ROWS, DIM)
    ours = Adam8bitBlockwise(stable.parameters(), weight_decay=0.0)
    ours.load_state_dict(optimizer.state_dict())
    stores = zip(optimizer.moments(model[0].weight), ours.moments(stable.weight), strict=True)
    for theirs, mine in stores:
        assert mine.codec is None and torch.equal(mine.dense, theirs.read(0, ROWS * DIM))
    assert ours.memory_report().rows[0].reason == "in a StableEmbedding"


def test_stable_embedding_whose_weight_a_framework_has_replaced_is_freed():
    model = model_of()
    optimizer, weight = optimizer_of(model), weakref.ref(model[0].weight)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(5))]
    del model
    gc.collect()
    assert optimizer.memory_report().rows == () and weight() is None


# --- What is logged ------------------------------------------------------------------------------


def test_stable_embedding_is_a_cause_in_the_line_on_float32_shares(caplog):
    optimizer_of(model_of())
    assert "(in a StableEmbedding: 49.5%, of fewer than 2 dimensions: 1.1%)" in caplog.text


COPY = "has the shape of the weight of a StableEmbedding, but is another tensor"


def test_copy_of_a_stable_embedding_is_logged(caplog):
    model = model_of()
    copied = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    Adam8bitBlockwise(copied.items(), weight_decay=0.0)
    assert f"zero8: parameter 0.weight {COPY}" in caplog.text


def copy_of_weight(model):
    return "0.weight", model[0].weight.detach().clone().requires_grad_()


QUIET = {
    "named in fp32_params": lambda m: ([copy_of_weight(m)], {"fp32_params": ["0.*"]}),
    "beside the original": lambda m: ([copy_of_weight(m), ("original", m[0].weight)], {}),
    "of a frozen one": lambda m: ([copy_of_weight(m.requires_grad_(False))], {}),
}


@pytest.mark.parametrize("case", QUIET.values(), ids=QUIET)
def test_copy_of_a_stable_embedding_is_not_logged_without_need(case, caplog):
    gc.collect()  # layers of other tests
    model = model_of()
    params, settings = case(model)
    Adam8bitBlockwise(params, weight_decay=0.0, **settings)
    assert COPY not in caplog.text
