# SPDX-License-Identifier: Apache-2.0
"""The replay in other settings, in a few steps, and the jobs of the whole measurement."""

import itertools
import json
import pickle
import sys

import psutil
import pytest
from places import ROOT
from processes import started

from benchmarks.fidelity.bf16 import weight_distances
from benchmarks.fidelity.command import experiments
from benchmarks.fidelity.images import ImageTask
from benchmarks.fidelity.lora import LoraTask
from benchmarks.fidelity.metrics import update_bounds
from benchmarks.fidelity.pool import Job, run_jobs
from benchmarks.fidelity.robustness import SETTINGS, replay_codecs
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Recipe, TrainingRun, adamw
from benchmarks.fidelity.zipf import ZipfTask
from examples.gpt.model import GPTConfig
from zero8.spec.codec import CODECS

TINY_GPT = TextTask(GPTConfig(context=64, width=64, layers=1, heads=2), window=16, batch_size=2)


ENDLESS = """
import time
from benchmarks.fidelity.metrics import update_bounds
from benchmarks.fidelity.pool import Job, run_jobs
from zero8.spec.codec import CODECS

def endless(on_step):
    print("working", flush=True)
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    run_jobs([Job(endless, (), 1)], workers=1, label="test")
"""

ZIPF, IMAGES = ZipfTask(batch_size=8), ImageTask(batch_size=4)
LORA = LoraTask(TextTask(GPTConfig(context=16, layers=1), window=16, batch_size=2), pretraining=2)


@pytest.mark.parametrize(("task", "beta2"), [(ZIPF, 0.999), (IMAGES, 0.95), (LORA, 0.999)])
def test_replay_of_a_task_keeps_bounds_and_moves_nothing_untrained(task, beta2):
    rows, skipped = replay_codecs(Recipe(steps=4, beta2=beta2, task=task), lambda: None)
    assert not skipped
    assert [row["scheme"] for row in rows] == [*CODECS, "deepspeed_bf16"]
    for row in rows[:2]:
        assert 0 < row["rms_update_error"] < 0.3
        assert row["max_u_over_bound"] < 1.001
        assert row["zero_grad_moved"] == 0 and row["zero_grad_count"] > 1000
    json.dumps(rows, allow_nan=False)


def test_replay_at_another_beta1_has_its_bounds():
    recipe = Recipe(steps=3, beta2=0.95, beta1=0.98, task=TINY_GPT)
    rows, _ = replay_codecs(recipe, lambda: None)
    bounds = list(itertools.islice(update_bounds((0.98, 0.95)), 3))
    assert [row["max_abs_u_bound"] for row in rows] == [max(bounds)] * len(rows)
    assert all(row["max_u_over_bound"] < 1.01 for row in rows)
    assert adamw(TrainingRun(recipe).model, recipe).defaults["betas"] == (0.98, 0.95)


def test_settings_differ_from_the_main_measurement_and_each_other():
    recipes = {Recipe(600, 0.95, **changes) for changes in SETTINGS.values()}
    assert len(recipes - {Recipe(600, 0.95)}) == len(SETTINGS)


def test_jobs_of_all_parts_survive_pickle_and_count_their_steps():
    for part in experiments(quick=False, steps=8):
        for job in part.jobs():
            assert pickle.loads(pickle.dumps(job)) == job
            assert job.steps > 0


@pytest.mark.slow
def test_run_jobs_with_equal_jobs_runs_them_once():
    job = Job(weight_distances, (Recipe(2, 0.999, task=TINY_GPT),), 2)
    results = run_jobs([job, job], workers=1, label="test")
    assert list(results) == [job]
    assert results[job][0]["weights"] == "nearest"


@pytest.mark.slow
def test_run_jobs_that_is_killed_leaves_no_worker(tmp_path):
    (tmp_path / "endless.py").write_text(ENDLESS)
    script = [sys.executable, str(tmp_path / "endless.py")]
    with started(script, PYTHONPATH=str(ROOT)) as process:
        assert process.stdout.readline() == "working\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert workers and not alive
