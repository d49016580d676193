# SPDX-License-Identifier: Apache-2.0
"""The measurement of Muon: Newton-Schulz, codes of momentum, errors, the optimizer, and files."""

import json
import math

import pytest
import torch

from benchmarks.fidelity.schemes import FP32_CONTROL, Shadow
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Layout, Recipe, TrainingRun
from benchmarks.muon import command
from benchmarks.muon.errors import COMPARED_EVERY, MOMENTA, YARDSTICK, Updates, update_errors
from benchmarks.muon.losses import TRAINED_STATES, Muon
from benchmarks.muon.orthogonal import (
    angle_deg,
    is_hidden,
    median_singular_value,
    orthogonalized,
)
from benchmarks.muon.states import CODES, STATES, nesterov
from examples.gpt.model import GPTConfig

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LAYOUT = Layout(("a", "token_embedding", "b"), ((64, 128), (64, 64), (128, 64)))
TINY = Recipe(
    steps=2,
    beta2=0.95,
    task=TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2),
)


def gradients(numel, steps):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for _ in range(steps)]


# --- Newton-Schulz -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 128), (128, 64)])
def test_singular_values_of_an_orthogonalized_matrix_are_near_1(shape):
    update = gradients(64 * 128, 1)[0].view(shape)
    found = orthogonalized(update)
    values = torch.linalg.svdvals(found)
    assert found.shape == shape and 0.6 < values.min() and values.max() < 1.3
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    assert angle_deg(found, left @ right) < 15


def test_orthogonalized_update_does_not_depend_on_its_scale_and_is_0_at_0():
    update = gradients(64 * 64, 1)[0].view(64, 64)
    assert torch.allclose(orthogonalized(update), orthogonalized(1000 * update), atol=1e-3)
    assert torch.equal(orthogonalized(torch.zeros(64, 128)), torch.zeros(64, 128))


def test_angles_are_right_where_cosines_round_to_1():
    one = torch.tensor([[1.0, 0.0]])
    assert angle_deg(one, torch.tensor([[3.0, 3.0]])) == pytest.approx(45)
    assert angle_deg(one, torch.tensor([[1.0, 1e-6]])) == pytest.approx(math.degrees(1e-6))


def test_median_singular_value_is_over_the_norm():
    update = torch.diag(torch.tensor([4.0, 2.0, 2.0, 1.0, 0.0]))
    assert median_singular_value(update) == pytest.approx(2 / 5)


def test_hidden_matrices_are_those_of_the_blocks():
    model = TINY.task.make_model()
    hidden = [name for name, p in model.named_parameters() if is_hidden(name, p.shape)]
    layers = ("qkv", "projection", "mlp.0", "mlp.2")
    assert hidden == [f"blocks.0.{layer}.weight" for layer in layers]


# --- Codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "largest_code"), [("int8", 127), ("4bit_linear", 7)])
def test_linear_code_is_within_half_a_code(name, largest_code):
    code = CODES[name]
    moment = gradients(4 * code.block_size, 1)[0]
    moment[: code.block_size] = 0.0
    blocks = moment.view(4, code.block_size)
    decoded = code.decode(code.encode(moment))
    half = blocks.abs().amax(1, keepdim=True) / largest_code / 2
    assert ((decoded - blocks).abs() <= half * (1 + 1e-5)).all()
    assert torch.equal(decoded[0], blocks[0])
    assert torch.equal(decoded.abs().amax(1), blocks.abs().amax(1))


def test_codes_fit_their_bits():
    sizes = {name: len(CODES[name].levels) for name in ("int8", "4bit", "4bit_linear")}
    assert sizes == {"int8": 255, "4bit": 16, "4bit_linear": 15}


@pytest.mark.parametrize("states", STATES)
def test_update_is_muons_over_1_minus_the_momentum(states):
    mu, moment = 0.9, torch.zeros(LAYOUT.numel, dtype=torch.float64)
    shadow = Shadow(nesterov(states), LAYOUT, (mu, mu))
    for grad in gradients(LAYOUT.numel, 3):
        moment = mu * moment + (1 - mu) * grad.double()
        expected = ((1 - mu) * grad.double() + mu * moment) / (1 - mu)
        error = (shadow.update(grad) - expected).norm() / expected.norm()
    limit = 1e-6 if states == FP32_CONTROL else 0.2 if "4bit" in states else 0.02
    assert error < limit


# --- Errors and the optimizer --------------------------------------------------------------------


def test_float32_has_no_error_and_coarser_codes_have_larger_ones():
    compared = Updates(LAYOUT, 0.95)
    for grad in gradients(LAYOUT.numel, COMPARED_EVERY + 1):
        compared.take(grad, counts=True)
    rows = {row["states"]: row for row in compared.rows()}
    assert list(rows) == [*STATES, YARDSTICK]
    fp32, yardstick = rows[FP32_CONTROL], rows[YARDSTICK]
    assert fp32["compared_steps"] == 2
    assert [matrix["name"] for matrix in fp32["matrices"]] == ["a", "b"]
    assert fp32["update_error_worst"] == fp32["orthogonalized_error_worst"] == 0
    assert fp32["angle_deg_worst"] == yardstick["update_error_worst"] == 0
    assert 0 < yardstick["orthogonalized_error_mean"] < 0.1
    for key in ("update_error_mean", "orthogonalized_error_mean", "angle_deg_mean"):
        assert 0 < rows["log"][key] < rows["4bit"][key]


def test_step_of_muon_moves_matrices_by_the_scaled_update_and_the_rest_as_adamw():
    run = TrainingRun(TINY)
    run.backward(0)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    optimizer = Muon(run.model, TINY, FP32_CONTROL, momentum=0.95)
    run.update(optimizer, 0)
    lr, decay = TINY.lr(0), TINY.weight_decay
    for name, p in run.model.named_parameters():
        if is_hidden(name, p.shape):
            update = 0.2 * math.sqrt(max(p.shape)) * orthogonalized(p.grad)
        else:
            update = p.grad / (p.grad.abs() + 1e-8)
        expected = (1 - lr * decay) * before[name] - lr * update
        assert torch.allclose(p, expected, atol=1e-2 * lr), name


# --- The command ---------------------------------------------------------------------------------


def small_results(jobs, *, workers, label):
    """Stands for run_jobs: the replay of a small model, and made-up losses."""
    return {
        job: update_errors(TINY, lambda: None)
        if job.function is update_errors
        else 2.0 + 0.01 * job.arguments[0].seed
        for job in jobs
    }


def test_command_writes_all_states_as_json_and_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_jobs", small_results)
    out = tmp_path / "new" / "muon.json"
    assert command.main(["--json", str(out)]) == 0
    result = json.loads(out.read_text())
    found = [(row["momentum"], row["states"]) for row in result["updates"]]
    assert found == [(mu, states) for mu in MOMENTA for states in (*STATES, YARDSTICK)]
    trained = [(row["optimizer"], row["states"]) for row in result["losses"]]
    muons = [(f"Muon {mu}", states) for mu in (0.95, 0.99) for states in TRAINED_STATES]
    assert trained == [*muons, ("AdamW", "fp32")]
    assert result["command"] == f"python -m benchmarks.muon --json {out}"
    table = out.with_suffix(".md").read_text()
    for heading in ("Updates", "Matrices", "Validation losses"):
        assert f"## {heading}\n" in table
    for states in (*STATES, YARDSTICK):
        assert table.count(f"| 0.95 | {states} |") == table.count(f"| 0.99 | {states} |") == 2
    assert "| text | AdamW | fp32 | 2.0300 | 2.0100 | 2.0500 | +0.0000" in table
    assert str(out) in capsys.readouterr().out
