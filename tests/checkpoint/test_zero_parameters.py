# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ZeRO for other parameters than they have states of, and without their states."""

from functools import cache
from pathlib import Path

import pytest
from nests import difference
from params import each
from ranks import error_of
from universal_cuts import convert
from zero_worker import Bag, base_optimizer, config, held, make_engine, take_step, together

LAYOUTS = {f"zero{stage}": {"stage": stage} for stage in (1, 2, 3)}
LAYOUTS |= {f"{name} bf16": {**layout, "dtype": {}} for name, layout in LAYOUTS.items()}
every_layout = each(LAYOUTS, LAYOUTS.keys() - {"zero2", "zero3"})
WEIGHTS = {"module": {"load_module_only": True}, "no states": {"load_optimizer_states": False}}
TRAINED = {"same": {}, "thawed": {"frozen": True}, "frozen": {"bias": False}}
"""Whether parameters are trained when a checkpoint is loaded, where that differs from its run."""


def make(layout, trained=None, order=1, **more):
    """Return an engine over a bag of which other parameters are trained."""
    model = Bag()
    for name, is_trained in (trained or {}).items():
        getattr(model, name).requires_grad_(is_trained)
    ds_config = config(offload=None, **LAYOUTS[layout]) | more
    return make_engine(ds_config, model, list(model.parameters())[::order])


def strip(folder):
    """Remove the states of the tag "first"."""
    for path in Path(folder, "first").glob("*optim_states.pt"):
        path.unlink()


def save_and_load(folder: str, layout: str) -> dict:
    """Return what comes of loads of the tag "first", after which "second" was saved."""
    engine, found = make(layout), {}
    take_step(engine, 0)
    saved = held(engine)["parameters"]
    engine.save_checkpoint(folder, tag="first")
    take_step(engine, 1)
    engine.save_checkpoint(folder, tag="second")

    def load(name, engine, tag="first", **options):
        # DeepSpeed's weights of ZeRO-3 lack the second name of what is tied within a module.
        options["load_module_strict"] = "zero3" not in layout
        found[name] = error_of(engine.load_checkpoint, folder, tag=tag, **options)
        found[f"{name}, weights"] = difference(saved, held(engine)["parameters"])

    for name, trained in TRAINED.items():
        engine = make(layout, trained)
        load(name, engine)
        for option, options in WEIGHTS.items():
            load(f"{name}, {option}", engine if name != "same" else make(layout), **options)
    engine = make(layout, order=-1)
    load("reversed", engine)
    found["reversed, steps"] = {int(s["step"]) for s in base_optimizer(engine).state.values()}
    together(convert, folder)
    for name in ("thawed", "frozen"):
        engine = make(layout, TRAINED[name], checkpoint={"load_universal": True})
        load(f"{name}, universal", engine, "second_universal")
    together(strip, folder)
    engine = make(layout)
    load("without states", engine)
    for option, options in WEIGHTS.items():
        load(f"without states, {option}", engine, **options)
    return found


@pytest.fixture(scope="module")
def loaded(standing_ranks, tmp_path_factory):
    """Return a function: of a layout, what each rank met."""

    @cache
    def of(layout):
        folder = tmp_path_factory.mktemp("parameters") / "checkpoints"
        arguments = {"folder": str(folder), "layout": layout}
        return standing_ranks(2).run(save_and_load, timeout_s=240, **arguments)

    return of


@every_layout
def test_zero_checkpoint_of_another_order_is_refused_on_all_ranks(name, loaded):
    for found in loaded(name):
        assert found["same"] is None and found["same, weights"] == ""
        kind, text = found["reversed"]
        assert kind == "ValueError"
        assert "the checkpoint's parameters are in another order" in text
        assert 1 not in found["reversed, steps"] and found["reversed, weights"] != ""


@pytest.mark.parametrize("way", ["", ", universal"])
@every_layout
def test_zero_checkpoint_of_other_trained_parameters_is_refused_by_name(name, way, loaded):
    for found in loaded(name):
        for trained, got in {
            "thawed": "without states of frozen. ",
            "frozen": "with states of what is not trained here: bias. ",
        }.items():
            kind, text = found[trained + way]
            assert kind == "ValueError"
            assert f"load_checkpoint: got a checkpoint {got}" in text
            assert "load_checkpoint(..., load_optimizer_states=False)" in text


@every_layout
def test_zero_checkpoint_of_other_trained_parameters_gives_its_weights_alone(name, loaded):
    """The tag asked for, also under ZeRO-3, where DeepSpeed takes `latest`, or no weights."""
    for found in loaded(name):
        for trained in TRAINED:
            for option in WEIGHTS:
                assert found[f"{trained}, {option}"] is None
                assert found[f"{trained}, {option}, weights"] == ""


@every_layout
def test_zero_checkpoint_without_files_of_states_gives_its_weights_if_they_are_elsewhere(
    name, loaded
):
    has_weights = "zero3" not in name
    for found in loaded(name):
        kind, text = found["without states"]
        assert kind == "ValueError" and "optim_states.pt (written by rank 1): missing" in text
        for option in WEIGHTS:
            error = found[f"without states, {option}"]
            assert error is None if has_weights else error == (kind, text)
            assert (found[f"without states, {option}, weights"] == "") == has_weights
