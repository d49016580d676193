# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every framework, which the tests of conversions share."""

from functools import cache

import pytest
import torch
from convert_cases import STAGES, ZERO, converted
from convert_model import SAVED_AFTER, STEPS, results, run, train

from zero8.spec.adam import UNKNOWN_HISTORY


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="session")
def source_at(folder, standing_ranks):
    """Return a function: of one of SOURCES, its path; all of a number of ranks are made at once."""

    @cache
    def make(world):
        # Not imported by all tests in this folder: it takes DeepSpeed along.
        from convert_worker import save_dcp, settings, visit

        jobs = [
            {
                # In stage 2 a bfloat16 model, with float32 master weights.
                "ds_config": settings(stage, dtype={} if stage == 2 else None, **ZERO),
                "steps": range(SAVED_AFTER),
                "target": folder / f"zero{stage}x{world}",
            }
            for stage in STAGES
        ]
        standing_ranks(world).run(visit, jobs=jobs)
        standing_ranks(world).run(save_dcp, jobs=[{"name": f"dcpx{world}"}], folder=folder)

    @cache
    def plain():
        model, optimizer = train()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, folder / "plain")

    def of(name):
        plain() if name == "plain" else make(int(name[-1]))
        return folder / name

    return of


@pytest.fixture(scope="session")
def made(folder, source_at):
    """Return a function: of a source and a target, the path of the conversion and its result."""

    @cache
    def of(source, to):
        path = folder / f"{source}-{to}"
        return path, converted(source_at(source), path, to)

    return of


@pytest.fixture(scope="session")
def unconverted():
    """What one process holds when it would save, and after more steps; by whether history goes."""

    @cache
    def of(forgets_history=False):
        model, optimizer = train()
        saved = results(model, optimizer)
        for state in optimizer.state.values():
            if forgets_history:
                state["history"] = UNKNOWN_HISTORY
        run(model, optimizer, range(SAVED_AFTER, STEPS))
        return saved, results(model, optimizer)

    return of
