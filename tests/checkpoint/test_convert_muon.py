# SPDX-License-Identifier: Apache-2.0
"""Conversions of Muon's checkpoints, in which AdamW steps what is no matrix."""

from functools import cache
from pathlib import Path

import muon_worker
import pytest
import torch
from convert_cases import converted
from convert_worker import visit
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from fsdp_checkpoints import save
from muon_in_zero import IN_FLOAT32, LAYOUTS, OF_DEEPSPEED, WithoutFilters, results
from muon_sharded import resumed, run, sharded
from muon_worker import MATRICES, SHAPES, Known, alone, optimizer_of, wrong
from params import each
from zero_worker import base_optimizer, config, make_engine, take_step

pytestmark = pytest.mark.usefixtures("one_torch_thread")  # as ranks have

SAVED_AFTER, STEPS = 2, 4
SOURCES = ("plain", "sharded", "zero2 offload", "zero3 offload, parts")
RANKS = 2


def job_of(layout: str, **options) -> dict:
    """Return a job of `visit`, but for the steps and places."""
    ds_config = LAYOUTS[layout] | options
    return {"ds_config": ds_config, "grouped": False, "model": Known, "read": results}


def save_fsdp2(folder: str) -> None:
    model = sharded()
    optimizer = optimizer_of(model)
    run(model, optimizer, 0, SAVED_AFTER)
    save(model, optimizer, "sharded", Path(folder))


def plain(path: Path) -> None:
    model = Known()
    optimizer = optimizer_of(model)
    run(model, optimizer, 0, SAVED_AFTER)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@pytest.fixture(scope="module")
def source_at(standing_ranks, tmp_path_factory):
    """Return a function that returns the path of a source."""
    folder = tmp_path_factory.mktemp("muon")

    @cache
    def of(source: str) -> Path:
        if source == "plain":
            plain(folder / source)
        elif source == "sharded":
            standing_ranks(RANKS).run(save_fsdp2, folder=str(folder))
        else:
            place = {"steps": range(SAVED_AFTER), "target": folder / source}
            standing_ranks(RANKS).run(visit, jobs=[{**job_of(source), **place}])
        return folder / source

    return of


@each(SOURCES, SOURCES[1:])
def test_convert_of_muon_to_plain_goes_on_with_the_same_bits(name, source_at, tmp_path):
    made = converted(source_at(name), tmp_path / "made", "plain")
    assert made["parameters"] == len(SHAPES)
    content = torch.load(tmp_path / "made", weights_only=True)
    model = Known()
    model.load_state_dict(content["model"])
    optimizer = optimizer_of(model, lr=7.0)
    optimizer.load_state_dict(content["optimizer"])
    run(model, optimizer, SAVED_AFTER, STEPS)
    assert wrong(muon_worker.results(model, optimizer), alone(STEPS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_convert_of_muon_to_dcp_goes_on_under_fsdp2(source, source_at, tmp_path, standing_ranks):
    converted(source_at(source), tmp_path / "sharded", "dcp")
    for _, _, got in standing_ranks(3).run(resumed, folder=tmp_path):
        assert wrong(got, alone(STEPS)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "layout"),
    [(s, "zero3 offload" if at % 2 else "zero2 offload") for at, s in enumerate(SOURCES)],
)
def test_convert_of_muon_to_zero_goes_on(source, layout, source_at, tmp_path, standing_ranks):
    """The bound of m^2/v of AdamW's parameters is in no universal checkpoint."""
    converted(source_at(source), tmp_path / "made", "zero")
    place = {"source": tmp_path, "steps": range(SAVED_AFTER, STEPS)}
    universal = {"checkpoint": {"load_universal": True}}
    for (found,) in standing_ranks(3).run(visit, jobs=[{**job_of(layout, **universal), **place}]):
        assert wrong(found["loaded"], alone(SAVED_AFTER)) == []
        expected = alone(STEPS)
        assert wrong(found["stepped"], {name: expected[name] for name in MATRICES}) == []


def test_muon_of_matrices_alone_goes_to_torchs_muon_and_back(tmp_path):
    """Whose groups have no use_muon, and whose eps is that of the norm."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(12, 512))
    p.grad = torch.randn_like(p)
    group = {"params": [p], "use_muon": True}
    ours = optimizer_of(torch.nn.ParameterList(), params=[group], ns_eps=1e-6)
    ours.step()
    torch.save(ours.state_dict(), tmp_path / "ours")
    converted(tmp_path / "ours", tmp_path / "made", "fp32")
    theirs = torch.optim.Muon([p])
    theirs.load_state_dict(torch.load(tmp_path / "made", weights_only=True))
    assert theirs.param_groups[0]["eps"] == 1e-6  # and not AdamW's
    (moment,) = ours.moments(p)
    assert torch.equal(theirs.state[p]["momentum_buffer"].flatten(), moment.read(0, p.numel()))
    theirs.step()
    theirs.param_groups[0]["lr"] = 0.02
    back = optimizer_of(torch.nn.ParameterList(), params=[group], min_8bit_size=10**9)
    back.load_state_dict(theirs.state_dict())
    assert (back.param_groups[0]["ns_eps"], back.param_groups[0]["lr"]) == (1e-6, 0.02)
    assert torch.equal(back.state[p]["momentum_buffer"], theirs.state[p]["momentum_buffer"])
    back.step()


def save_deepspeeds(stage: int, folder: str) -> dict:
    zero = {"reduce_scatter": stage < 3}
    engine = make_engine(
        config(stage=stage, zero=zero, optimizer="Muon", **OF_DEEPSPEED), WithoutFilters()
    )
    with torch.compiler.set_stance("force_eager"):  # DeepSpeed's would compile for half a minute
        for step in range(SAVED_AFTER):
            take_step(engine, step)
    engine.save_checkpoint(folder)
    return of_matrices(engine)


def of_matrices(engine) -> dict:
    """Return by matrix its values and moments; DeepSpeed's Muon does not give AdamW's away."""
    found = {}
    for name, p in engine.module.named_parameters():
        if name in MATRICES:
            moment = safe_get_full_optimizer_state(p, "momentum_buffer")
            weights = safe_get_full_fp32_param(p)
            found[name] = {"values": weights, "moments": [moment.view(weights.shape)]}
    return found


def load_deepspeeds(stage: int, folder: str) -> tuple[dict, int]:
    """Return what zero8's Muon has loaded in float32, and the steps after one more."""
    options = OF_DEEPSPEED | IN_FLOAT32
    engine = make_engine(
        config(stage=stage, optimizer="Muon8bitBlockwise", **options), WithoutFilters()
    )
    engine.load_checkpoint(folder)
    loaded = of_matrices(engine)
    take_step(engine, SAVED_AFTER)
    steps = {int(state["step"]) for state in base_optimizer(engine).state.values()}
    return loaded, max(steps)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_of_deepspeeds_muon_goes_on_in_zero8s(stage, standing_ranks, tmp_path):
    arguments = {"stage": stage, "folder": str(tmp_path / "theirs")}
    ranks = standing_ranks(RANKS)
    (expected, *_) = ranks.run(save_deepspeeds, timeout_s=400, **arguments)
    for loaded, steps in ranks.run(load_deepspeeds, **arguments):
        assert wrong(loaded, expected) == []
        assert steps == SAVED_AFTER + 1
