# SPDX-License-Identifier: Apache-2.0
"""ZeRO checkpoints at other world sizes and stages, by DeepSpeed's universal checkpoints."""

import shutil
from argparse import Namespace
from itertools import pairwise

import pytest
import torch
from convert_worker import error_of_load, settings, visit
from damages import edited
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils import safe_get_full_optimizer_state
from places import GOLDEN
from universal_cuts import check_moments, convert, decoded, joined, travel
from zero_worker import BF16_MASTERS, MOMENTS, Bag, base_optimizer

from zero8.checkpoint.commands import convert as command
from zero8.checkpoint.write.universal_writer import MODEL_FILES
from zero8.spec.algorithms import ALGORITHMS

STEPS = ((0, 1), (2,))
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
PRECISIONS = {
    "BF16_Optimizer": settings(1, dtype={}) | FP32_GRADIENTS,
    "zero2 offload, bf16": settings(2, "cpu", dtype={}),
    "zero3, bf16": settings(3, dtype={}),
    "zero2 offload, bf16 masters": settings(2, "cpu", dtype=BF16_MASTERS),
    "zero3 offload, bf16 masters": settings(3, "cpu", dtype=BF16_MASTERS),
}


def check_visits(visits):
    """Check each load against what was saved before it.

    Masters and steps are exact; moments are encoded within half a code.
    """
    for before, after in pairwise(visits):
        saved, loaded = (
            [rank[when] for rank in ranks]
            for ranks, when in ((before, "stepped"), (after, "loaded"))
        )
        steps = {state["step"] for rank in saved for state in rank["states"]}
        assert len(steps) == 1
        for rank in loaded:
            assert {state["step"] for state in rank["states"]} == steps
            assert all(state["history"] > 1e38 for state in rank["states"])
            assert rank["options"] == saved[0]["options"]
        old, new = joined(saved), joined(loaded)
        exact = {name: {m: decoded(entry, m) for m in MOMENTS} for name, entry in old.items()}
        check_moments(exact, new)
        for name, entry in new.items():
            assert entry["holders"].eq(1).all(), name
            assert torch.equal(entry["weights"], old[name]["weights"]), name


# --- Quick ---------------------------------------------------------------------------------------


def test_universal_checkpoints_load_in_the_other_stages(standing_ranks, tmp_path):
    """The representative of the others, on two ranks."""
    chains = {"2 to 3": [settings(2), settings(3)], "3 to 2": [settings(3, "cpu"), settings(2)]}
    for visits in travel(standing_ranks, (2, 2), STEPS, chains, tmp_path).values():
        check_visits(visits)


# --- Other precisions ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def precisions(standing_ranks, tmp_path_factory):
    chains = {name: [config] * 2 for name, config in PRECISIONS.items()}
    folder = tmp_path_factory.mktemp("precisions")
    return travel(standing_ranks, (2, 3), STEPS, chains, folder, grouped=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
def test_universal_checkpoints_of_bf16_keep_moments_within_half_a_code(precisions, name):
    """With bfloat16 masters, too, whose dtype DeepSpeed would round them to."""
    check_visits(precisions[name])


# --- Other algorithms ----------------------------------------------------------------------------


def moments_of(engine) -> dict[str, list[torch.Tensor]]:
    names = base_optimizer(engine).algorithm.moment_names
    return {
        name: [safe_get_full_optimizer_state(p, one).view(Bag.SHAPES[name]) for one in names]
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS[:-1], ids=lambda one: one.name)  # not Muon
@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoint_of_an_algorithm_has_its_moments(
    stage, algorithm, standing_ranks, tmp_path
):
    """To half a code in blocks that a boundary between ranks cuts, which are encoded anew."""
    options = {"min_8bit_size": 1} | ({"momentum": 0.9} if algorithm.name == "sgd" else {})
    job = {"model": Bag, "grouped": False, "read": moments_of}

    def visited(universal, **places):
        ds_config = settings(stage, None, universal, optimizer=algorithm.class_name, **options)
        return standing_ranks(2).run(visit, jobs=[{"ds_config": ds_config, **job, **places}])

    (saved,), _ = visited(False, steps=(0, 1), target=tmp_path / "saved")
    command.convert(tmp_path / "saved", tmp_path / "universal", "zero")
    for (found,) in visited(True, source=tmp_path, steps=(2,)):
        for name, moments in saved["stepped"].items():
            for got, expected in zip(found["loaded"][name], moments, strict=True):
                assert (got - expected).norm() <= 0.02 * expected.norm(), name
                assert (got == expected).float().mean() > 0.8, name


# --- What is refused, and what is lost -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoint_that_does_not_fit_is_refused(standing_ranks, tmp_path, stage):
    """DeepSpeed would leave parameters as they are, or give all groups the options of the first."""
    ranks = standing_ranks(1)
    job = {"ds_config": settings(stage), "steps": (0,), "target": str(tmp_path)}
    ranks.run(visit, jobs=[job])
    convert(tmp_path)
    arguments = {"ds_config": settings(stage), "source": str(tmp_path)}
    ((kind, message),) = ranks.run(error_of_load, grouped=False, **arguments)
    assert kind == "ValueError"
    assert "got a checkpoint of 2 parameter groups, expected the optimizer's 1" in message
    (tmp_path / "saved_universal" / "zero" / "wide" / "exp_avg_sq.pt").unlink()
    ((_, message),) = ranks.run(error_of_load, **arguments)
    assert "zero/wide" in message and "exp_avg_sq" in message


# --- What is kept beside states and weights ------------------------------------------------------


def test_convert_to_zero_keeps_what_a_resume_reads(tmp_path):
    """The client state, the scheduler and the loss scale; what is of unknown classes is named."""
    shutil.copytree(GOLDEN / "zero2_checkpoint", tmp_path / "in")
    tag = tmp_path / "in" / "step3"
    scaler = DynamicLossScaler(2**16, 500, 1.0, 2, False, dtype=torch.half)
    scaler.update_scale(False)
    kept = {
        "lr_scheduler": {"last_batch_iteration": 3},
        "global_samples": 24,
        "sampler": {"order": torch.arange(5), "seen": {1, 2}, "names": [("a", None)]},
    }
    lost = {"args": {"nested": [Namespace(lr=0.1)]}}
    edited(lambda held: held.update(kept | lost))(tag / "mp_rank_00_model_states.pt")
    for path in tag.glob("*_optim_states.pt"):
        edited(lambda held: held["optimizer_state_dict"].update(loss_scaler=scaler))(path)
    result = command.convert(tmp_path / "in", tmp_path / "out", "zero")
    assert [note for note in result["notes"] if "'args'" in note and "argparse.Namespace" in note]
    for name in MODEL_FILES:
        found = torch.load(tmp_path / "out" / name, weights_only=False)
        assert torch.equal(found["sampler"].pop("order"), torch.arange(5))
        assert found["sampler"] == {"seen": {1, 2}, "names": [("a", None)]}
        assert (found["lr_scheduler"], found["global_samples"]) == (kept["lr_scheduler"], 24)
        assert "args" not in found
    held = torch.load(tmp_path / "out" / "zero" / "optimizer_state.pt", weights_only=False)
    assert type(held["loss_scaler"]) is DynamicLossScaler
    assert vars(held["loss_scaler"]) == vars(scaler)
    assert {"clip_grad", "overflow", "dynamic_loss_scale"} <= held.keys()
