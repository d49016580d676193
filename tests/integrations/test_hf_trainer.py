# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer without DeepSpeed, in one process; examples/trainer.py, too."""

import sys

import hf_models
import pytest
from places import ROOT
from processes import run

import zero8
from zero8.integrations import hf

pytestmark = pytest.mark.integrations


def trained(folder, resume=None, **others):
    """Return a Trainer that has trained with our factory, from a checkpoint of `folder` perhaps."""
    settings = others.pop("settings", {})
    args = hf_models.arguments(folder)
    made = hf_models.trainer(
        folder, args=args, optimizer_cls_and_kwargs=hf.optimizer(args, **settings), **others
    )
    made.train(resume_from_checkpoint=resume and str(resume))
    return made


def inner(trainer):
    """Return the optimizer that Accelerate has wrapped."""
    return trainer.optimizer.optimizer


def test_factory_makes_our_optimizer_with_the_names_and_groups_of_trainer(tmp_path):
    ours, theirs = trained(tmp_path / "ours"), hf_models.trainer(tmp_path / "theirs")
    theirs.train()
    assert type(inner(ours)) is zero8.Adam8bitBlockwise
    names = [{id(p): name for name, p in t.model.named_parameters()} for t in (ours, theirs)]
    for group, expected in zip(inner(ours).param_groups, inner(theirs).param_groups, strict=True):
        assert group["param_names"] == [names[1][id(p)] for p in expected["params"]]
        assert group["param_names"] == [names[0][id(p)] for p in group["params"]]
        for key in ("lr", "betas", "eps", "weight_decay", "initial_lr"):
            assert group[key] == expected[key], key
    group = inner(ours).param_groups[0]
    assert (group["initial_lr"], group["betas"]) == (hf_models.LR, hf_models.BETAS)
    assert (group["eps"], group["weight_decay"]) == (hf_models.EPS, hf_models.WEIGHT_DECAY)


KINDS = {
    "adam": {},
    "lion": {"kind": "lion"},
    "sgd": {"kind": "sgd", "momentum": 0.9, "nesterov": True},
    "ademamix": {"kind": "ademamix", "t_beta3": 6},
    "muon": {"kind": "muon", "ns_dtype": "float32"},
}


def test_factory_of_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kind: got 'adamw', expected one of .*'sgd'"):
        hf.optimizer(hf_models.arguments(tmp_path), kind="adamw")


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_trainer_resumes_to_the_bits_of_a_run_that_was_not_cut_off(tmp_path, settings):
    whole = trained(tmp_path / "whole", settings=settings)
    assert inner(whole).algorithm.name == settings.get("kind", "adam")
    trained(tmp_path / "cut", stop_after=3, settings=settings)
    resumed = trained(tmp_path / "cut", resume=tmp_path / "cut" / "checkpoint-3", settings=settings)
    assert resumed.state.global_step == 6
    assert hf_models.same_weights(whole.model, resumed.model)
    assert not hf_models.same_weights(whole.model, hf_models.small_llama())


def test_trainer_example_started_again_resumes_from_its_checkpoint(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "trainer.py"), "--out", str(tmp_path)]
    for steps, saved in (("10", {"checkpoint-10"}), ("20", {"checkpoint-10", "checkpoint-20"})):
        done = run([*command, "--steps", steps], OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "8-bit: " in done.stdout
        assert {path.name for path in tmp_path.glob("checkpoint-*")} == saved
    # Losses are logged every 10 steps: of the second run only that of the last 10.
    assert done.stdout.count("'loss'") == 1
