# SPDX-License-Identifier: Apache-2.0
"""A signal that arrives in an engine's step finds it done and counted, all sub-groups of it."""

import signal

import pytest
from nests import difference
from zero_worker import Bag, base_optimizer, config, held, make_engine, take_step

import zero8  # noqa: F401  registers the optimizer type

# Both step in several parts: over groups, and over sub-groups.
LAYOUTS = {
    "stage 2": config(stage=2),
    "stage 3": config(stage=3, zero={"sub_group_size": 5000}),
}
PARTS = 2
"""At least so many steps of the optimizer make a step of the engine."""


class Interrupt(Exception):
    """What the handler raises, as that of Ctrl-C does."""


def engine_of(ds_config):
    bag = Bag()
    params = list(bag.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    return make_engine(ds_config, bag, groups)


def interrupted_steps(layouts):
    """Interrupt the first part of a second step; return what the handler finds, and after it."""
    return {name: interrupted_step(ds_config) for name, ds_config in layouts.items()}


def interrupted_step(ds_config):
    expected, engine = engine_of(ds_config), engine_of(ds_config)
    base, parts, found = base_optimizer(engine), [], []

    def handle(number, frame):
        found.append((engine.global_steps, held(engine)))
        raise Interrupt

    def interrupt(*_):
        parts.append(len(parts))
        if len(parts) == 1:
            signal.raise_signal(signal.SIGUSR1)

    for one in (expected, engine):
        take_step(one, 0)
    take_step(expected, 1)
    before = signal.signal(signal.SIGUSR1, handle)
    hook = base.register_step_post_hook(interrupt)
    try:
        take_step(engine, 1)
        raised = False
    except Interrupt:
        raised = True
    finally:
        hook.remove()
        signal.signal(signal.SIGUSR1, before)
    result = {"raised": raised, "parts": len(parts), "steps": [steps for steps, _ in found]}
    result["found"] = difference(found[0][1], held(expected))
    for one in (expected, engine):
        take_step(one, 2)
    return result | {"later": difference(held(engine), held(expected))}


@pytest.fixture(scope="module")
def ranks(standing_ranks):
    return standing_ranks(2).run(interrupted_steps, layouts=LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_interrupt_in_an_engines_step_finds_it_done_and_counted(ranks, name):
    for result in ranks:
        assert result[name].pop("parts") >= PARTS
        assert result[name] == {"raised": True, "steps": [2], "found": "", "later": ""}
