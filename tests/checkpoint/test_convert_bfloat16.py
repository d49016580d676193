# SPDX-License-Identifier: Apache-2.0
"""Conversions of bfloat16 weights whose optimizer keeps 8 more bits of them."""

import pytest
import torch
from convert_cases import ZERO, converted, pieces_of, trained_names, uncut
from convert_model import SAVED_AFTER, Mixed, named_groups, train

from zero8 import Adam8bitBlockwise


def corrected_weights(values, correction):
    """Return the 24-bit weights of `weight_correction_bits=8`."""
    bits = values.bfloat16().view(torch.int16).to(torch.int32) << 16
    return (bits + (correction.to(torch.int32) << 8)).view(torch.float32)


CORRECTED = {"weight_correction_bits": 8}


@pytest.fixture(scope="module")
def corrected_sources(folder, standing_ranks):
    """bfloat16 weights with corrections: of one process, under FSDP2, as masters of ZeRO-2."""
    from convert_worker import save_dcp, settings, visit

    model, optimizer = train(dtype=torch.bfloat16, **CORRECTED)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, folder / "bf16_plain")
    jobs = [{"name": "bf16_dcp", "dtype": torch.bfloat16, **CORRECTED}]
    standing_ranks(2).run(save_dcp, jobs=jobs, folder=folder)
    masters = {"dtype": {"bf16_master_weights_and_grads": True}, **ZERO, **CORRECTED}
    job = {"ds_config": settings(2, "cpu", **masters), "target": folder / "bf16_zero"}
    standing_ranks(2).run(visit, jobs=[{**job, "steps": range(SAVED_AFTER)}])
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("source", ["bf16_plain", "bf16_dcp", "bf16_zero"])
def test_convert_keeps_corrections_of_bfloat16_weights(source, corrected_sources, folder):
    """In 8-bit targets verbatim, in float32 ones as the last 8 bits of the weights."""
    expected, trained = corrected_sources
    result = converted(folder / source, folder / f"{source}-plain", "plain")
    assert result["notes"] == []
    content = torch.load(folder / f"{source}-plain", weights_only=True)
    model = Mixed(torch.bfloat16)
    model.load_state_dict(content["model"])
    optimizer = Adam8bitBlockwise(named_groups(model, trained_names(source)), **CORRECTED)
    optimizer.load_state_dict(content["optimizer"])
    result = converted(folder / source, folder / f"{source}-fp32", "fp32")
    assert ["corrections" in note for note in result["notes"]] == [True]
    in_fp32 = torch.load(folder / f"{source}-fp32", weights_only=True)["model"]
    pieces = pieces_of(folder / source)
    for name, p in model.named_parameters():
        q = getattr(expected, name)
        kept = uncut(name, pieces)
        assert torch.equal(p[kept], q[kept])
        if q in trained.state:
            ours, theirs = (
                o.state[p]["param_correction"] for o, p in ((optimizer, p), (trained, q))
            )
            assert theirs.any() and torch.equal(ours[kept], theirs[kept])
            expected_fp32 = corrected_weights(p.detach(), ours)
            assert torch.equal(in_fp32[name], expected_fp32)
            if name == "embed":
                assert torch.equal(in_fp32["head.weight"], expected_fp32)


@pytest.mark.slow
def test_convert_to_zero_has_corrections_in_float32_master_weights(corrected_sources, folder):
    converted(folder / "bf16_dcp", folder / "bf16_dcp-zero", "zero")
    expected = torch.load(folder / "bf16_dcp-fp32", weights_only=True)["model"]
    assert (folder / "latest_universal").read_text() == "bf16_dcp-zero"
    for name in ("wide", "bias"):
        path = folder / "bf16_dcp-zero" / "zero" / name / "fp32.pt"
        assert torch.equal(torch.load(path)["param"], expected[name])
