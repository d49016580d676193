# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.below`: what is kept of moments, and a row for each way to keep it."""

import json

import pytest
import torch
from torch import nn

from benchmarks.below import command
from benchmarks.below.bands import PER_OCTAVE, Bands, coded, columns_of_a_code
from benchmarks.below.codes import TwelveBitCode, packed, unpacked
from benchmarks.below.shared import Coded, Groups, KeptAdamW, Tiles
from benchmarks.below.spreads import spreads, spreads_of
from benchmarks.fidelity.losses import final_loss

METRICS = ("p999_update_error", "drift", "sqrt_v_bias", "max_u_over_bound")
ERRORS = {"4bit": 0.4, **{name: 0.011 * (1 + n) for n, name in enumerate(command.CODES)}}


def moments(*shape):
    generator = torch.Generator().manual_seed(3)
    m = torch.randn(shape, generator=generator)
    return m, m.square() * (0.5 + torch.rand(shape, generator=generator))


def test_packed_codes_of_12_bits_unpack_to_themselves():
    codes = torch.arange(4096, dtype=torch.int32).view(-1, 64)
    assert packed(codes).numel() == 1.5 * codes.numel()
    assert torch.equal(unpacked(packed(codes)), codes)


@pytest.mark.parametrize("m_bits", [4, 5, 6])
def test_code_of_12_bits_is_within_a_cell_and_has_the_bytes_that_it_says(m_bits):
    code = TwelveBitCode(m_bits)
    m, v = moments(32, 64)
    m[:, ::5] = v[:, ::5] = 0
    state = code.encode(m, v, 7)
    stored_m, stored_v = code.decode(state)
    assert torch.equal(stored_v > 0, v > 0) and torch.equal(stored_m[v == 0], m[v == 0])
    octaves = state["span"].float() / 8 / (code.v.top - 1)
    positive = v > 0
    off = (stored_v.view(torch.int32) - v.view(torch.int32)).abs() / 2**23
    assert (off <= octaves * 1.01 + 2**-7)[positive].all()
    r, stored_r = (x[positive] / stored_v[positive].sqrt() for x in (m, stored_m))
    assert (stored_r - r).abs().max() <= 1.02 * r.abs().max() / code.m.top
    sizes = sum(x.numel() * x.element_size() for x in state.values())
    assert sizes / m.numel() == code.bytes_per_param == 1.5 + 5 / 64


@pytest.mark.parametrize("m_bits", [4, 5, 6])
def test_m_of_12_bits_whose_gradient_has_ended_decays_to_zero(m_bits):
    code = TwelveBitCode(m_bits)
    m, v = moments(32, 64)
    loud = m[:, 1::2].clone()
    for step in range(1, 200):
        m, v = code.decode(code.encode(0.9 * m, 0.999 * v, step))
        m[:, 1::2] = loud  # others of the block go on, and hold its scale
    assert not m[:, ::2].any()


def test_groups_keep_the_mean_of_neighbours_and_of_a_short_rest():
    _, v = moments(3, 100)
    kept = v.clone()
    Groups(64).keep(v, kept, 1)
    assert torch.allclose(kept[:, :64], v[:, :64].mean(1, keepdim=True).expand(3, 64))
    assert torch.allclose(kept[:, 64:], v[:, 64:].mean(1, keepdim=True).expand(3, 36))


def test_groups_of_narrow_rows_run_through_them():
    _, v = moments(8, 16)
    kept = v.clone()
    Groups(64).keep(v, kept, 1)
    assert torch.allclose(kept[:4], v[:4].mean().expand(4, 16))


def test_tiles_keep_what_is_of_rank_1_and_the_means_of_all_else():
    product = torch.rand(100, 1) @ torch.rand(1, 150)
    kept = product.clone()
    Tiles(64).keep(kept, kept, 1)
    assert torch.allclose(kept, product)
    _, v = moments(100, 150)
    kept = v.clone()
    Tiles(64).keep(v, kept, 1)
    for dim in (0, 1):
        assert torch.allclose(kept[64:, 128:].mean(dim), v[64:, 128:].mean(dim), rtol=1e-4)


def test_bands_keep_what_is_of_rank_1_within_a_level():
    product = torch.rand(100, 1) @ (0.1 + torch.rand(1, 300))
    kept = product.clone()
    Bands().keep(kept, kept, 1)
    off = (kept / product).log2().abs()
    assert off[:64].max() <= 1.001 / PER_OCTAVE  # the rows below share codes between columns


def test_bands_keep_zeros_of_rows_and_columns_and_leave_narrow_rows():
    _, v = moments(64, 256)
    v[3], v[:, 5] = 0, 0
    kept = v.clone()
    Bands().keep(kept, kept, 1)
    assert torch.equal(kept > 0, v > 0)
    _, narrow = moments(256, 63)
    kept = narrow.clone()
    Bands().keep(kept, kept, 1)
    assert torch.equal(kept, narrow)


def test_codes_of_columns_have_the_mean_of_their_factors_over_steps():
    """The golden ratio's thresholds miss a share by at most about 2 log2(n) / n of n steps."""
    factors = torch.logspace(-14, 0, 64, base=2)
    octaves = sum(coded(factors, step).log2() for step in range(1, 1001)) / 1000
    assert torch.allclose(octaves, factors.log2(), atol=0.02 / PER_OCTAVE)
    assert torch.equal(
        coded(torch.tensor([0.0, 2.0**-40, 1.0]), 1), torch.tensor([0.0, 2**-15.875, 1.0])
    )


@pytest.mark.parametrize(
    ("rows", "columns", "shared"),
    [(64, 256, 1), (63, 256, 2), (32, 256, 2), (1, 256, 64), (64, 44, 1), (40, 44, 2), (1, 65, 64)],
)
def test_columns_of_a_code_are_as_few_as_the_bytes_of_the_rows_allow(rows, columns, shared):
    assert columns_of_a_code(rows, columns) == shared


def test_bytes_of_shared_v_count_means_and_factors():
    shape = torch.Size((1024, 256))
    m = 1 + 4 / 256
    assert Groups(64).bytes_of(shape) == shape.numel() * (m + 4 / 64)
    assert Tiles(64).bytes_of(shape) == shape.numel() * (m + 2 * 4 / 64)
    assert Bands().bytes_of(shape) == shape.numel() * (m + 4 / 256 + 1 / 64)
    assert Bands().bytes_of(torch.Size((9, 300))) == 9 * (300 * m + 2 * 4 + 5)
    assert Coded(TwelveBitCode(6)).bytes_of(shape) == shape.numel() * (1.5 + 5 / 64)


def test_spreads_of_a_matrix_of_rank_1_are_those_of_its_factors():
    columns = 4.0 ** torch.arange(64).repeat(2)[None, :].remainder(2)
    found = spreads_of(torch.full((128, 1), 3.0) * columns)
    assert found == pytest.approx({"row": 0.5, "column": 0.0, "tile": 0.0}, abs=1e-5)


def test_spreads_leave_out_rows_without_any_gradient():
    v = torch.ones(100, 64)
    v[50:] = 0
    assert spreads_of(v) == {"row": 0.0, "column": 0.0, "tile": 0.0}


class Whole:
    """Keep everything."""

    def keep(self, m, v, step):
        """Leave both as they are."""


def test_adamw_that_keeps_everything_steps_as_torch():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(64, 64)) for _ in "12")
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizers = [
        KeptAdamW([ours], Whole(), **options),
        torch.optim.AdamW([theirs], lr=1e-3, **options),
    ]
    for _ in range(5):
        ours.grad = torch.randn(64, 64)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(ours, theirs, rtol=1e-6)


def made_up(jobs, *, workers, label):
    """Stand for run_jobs: rows that say of which code, model and seed they are."""
    results = {}
    for job in jobs:
        recipe, *kept = job.arguments
        if job.function is command.replay_codes:
            counts = {"zero_grad_moved": 0, "zero_grad_count": 7, "bytes_per_param": 1.5}
            shared = {**dict.fromkeys(METRICS, 0.5), **counts, "beta2": recipe.beta2}
            results[job] = [
                {"scheme": name, "block_size": 64, "rms_update_error": error, **shared}
                for name, error in ERRORS.items()
            ]
        elif job.function is spreads:
            row = {"matrix": "weight", "shape": [64, 128], "row": 0.5, "column": 0.25}
            results[job] = [{**row, "tile": 0.125}]
        elif job.function is final_loss:
            results[job] = 2.0 + 0.01 * recipe.seed
        else:
            assert job.function is command.kept_loss
            shift = 0.125 if isinstance(kept[0], Tiles | Bands) else 0.25
            results[job] = 2.0 + 0.01 * recipe.seed + shift, 1.25
    return results


def test_below_measured_writes_a_row_per_code_matrix_and_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_jobs", made_up)
    out = tmp_path / "below.json"
    assert command.main(["--json", str(out)]) == 0
    result, text = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert f"wrote {out}" in capsys.readouterr().out
    assert result["command"] == f"python -m benchmarks.below --json {out}"
    errors = {(row["beta2"], row["scheme"]): row["rms_update_error"] for row in result["updates"]}
    assert errors == {
        (beta2, name): error for beta2 in (0.999, 0.95) for name, error in ERRORS.items()
    }
    differences = {
        (row["model"], row["scheme"]): round(row["difference_mean"], 9) for row in result["losses"]
    }
    expected = {
        (model, name): 0.125 if isinstance(kept, Tiles | Bands) else 0.25
        for model, kinds in command.KEPT.items()
        for name, kept in kinds.items()
    }
    assert differences == {**expected, **{(model, "fp32"): 0.0 for model in command.KEPT}}
    assert "| 0.95 | m 6 + v 6 bits | 64 | 1.500 | 0.033 |" in text
    assert "| weight | 64 x 128 | 0.50 | 0.25 | 0.12 |" in text
    assert "| LoRA | v of rank 1, 256 x 256 | 1.250 | 10 | 200 | 2.1800 |" in text
