# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.codecs`: every codec is in every table, with its own numbers."""

import json

from benchmarks.codecs import command
from benchmarks.fidelity.losses import final_loss
from benchmarks.fidelity.robustness import replay_codecs
from benchmarks.fidelity.silence import silence
from zero8.spec.codec import CODECS

ERRORS = {name: 0.011 * (1 + number) for number, name in enumerate(CODECS)}
LOSSES = {"fp32": 0.0, **{name: 0.125 * (1 + number) for number, name in enumerate(CODECS)}}
METRICS = ("p999_update_error", "drift", "sqrt_v_bias", "max_u_over_bound", "v_zero_share")


def made_up(jobs, *, workers, label):
    """Stand for run_jobs: rows that say of which codec, setting and seed they are."""
    results = {}
    for job in jobs:
        if job.function is replay_codecs:
            (recipe,) = job.arguments
            counts = {"zero_grad_moved": 0, "zero_grad_count": 7, "bytes_per_param": 2.0}
            shared = {**dict.fromkeys(METRICS, 0.5), **counts, "beta2": recipe.beta2}
            factor = 2 if recipe.peak_lr == 1e-2 else 1
            rows = [
                {"scheme": name, "rms_update_error": factor * error, **shared}
                for name, error in ERRORS.items()
            ]
            gone = {"scheme": "deepspeed_bf16", "reason": "gone", "beta2": recipe.beta2}
            results[job] = rows, [gone]
        elif job.function is silence:
            beta2, steps = job.arguments
            assert steps == 1200
            results[job] = [
                {"scheme": name, "beta2": beta2, "silent_steps": steps, "way": 1.0,
                 "way_over_fp32": 3.25, "last_abs_u": 0.0}
                for name in CODECS
            ]  # fmt: skip
        else:
            assert job.function is final_loss
            recipe, scheme = job.arguments
            results[job] = 2.0 + 0.01 * recipe.seed + LOSSES[scheme]
    return results


def test_codecs_measured_writes_a_row_per_setting_beta2_and_codec(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_jobs", made_up)
    out = tmp_path / "codecs.json"
    assert command.main(["--json", str(out)]) == 0
    result, text = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert f"wrote {out}" in capsys.readouterr().out
    assert result["command"] == f"python -m benchmarks.codecs --json {out}"
    errors = {
        (row["setting"], row["beta2"], row["scheme"]): row["rms_update_error"]
        for row in result["updates"]
    }
    settings = ("GPT", "lr x 10", "embedding")
    assert errors == {
        (setting, beta2, name): error * (2 if setting == "lr x 10" else 1)
        for setting in settings
        for beta2 in (0.999, 0.95)
        for name, error in ERRORS.items()
    }
    differences = {row["scheme"]: round(row["difference_mean"], 9) for row in result["losses"]}
    assert differences == LOSSES
    for name in CODECS:
        assert f"| lr x 10 | 0.95 | {name} | 2.000 | {2 * ERRORS[name]:.3g} |" in text
        assert f"| {name} | 0.95 | 1 | 3.25 | 0 |" in text
        assert f"| {name} | 0.999 | 5 | 400 | {2.03 + LOSSES[name]:.4f} |" in text
    assert "- skipped deepspeed_bf16, beta2 = 0.95, embedding: gone" in text
