# SPDX-License-Identifier: Apache-2.0
"""The data and models that gradients are taken from in other settings than the main one."""

import numpy as np
import pytest
import torch

from benchmarks.fidelity import images as images
from benchmarks.fidelity import zipf as zipf
from benchmarks.fidelity.lora import LoraTask
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Gradients, Recipe, TrainingRun, adamw
from examples.gpt.model import GPTConfig
from zero8.spec.grid import BlockGrid

ZIPF, IMAGES = zipf.ZipfTask(batch_size=64), images.ImageTask(batch_size=8)
LORA = LoraTask(TextTask(GPTConfig(context=16, layers=1), window=16, batch_size=4), pretraining=2)
SYNTHETIC = pytest.mark.parametrize("task", [ZIPF, IMAGES], ids=["zipf", "images"])
TASKS = pytest.mark.parametrize("task", [ZIPF, IMAGES, LORA], ids=["zipf", "images", "lora"])


@SYNTHETIC
def test_batch_depends_on_seed_and_step_only(task):
    inputs, targets = task.batch(1, 2)
    again = task.batch(1, 2)
    assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
    assert not torch.equal(inputs, task.batch(1, 3)[0])
    assert not torch.equal(inputs, task.batch(2, 2)[0])


def test_zipf_tokens_over_many_draws_follow_zipfs_law():
    tokens, following = zipf.transitions(0, 0, 400_000)
    for sample in (tokens, following):
        counts = torch.bincount(sample, minlength=zipf.VOCABULARY)
        assert counts[-zipf.RESERVED :].sum() == 0
        octaves = [counts[2**j - 1 : 2 ** (j + 1) - 1].sum().item() for j in range(11)]
        masses = zipf.frequencies()
        expected = [400_000 * masses[2**j - 1 : 2 ** (j + 1) - 1].sum() for j in range(11)]
        assert octaves == pytest.approx(expected, rel=0.04)


def test_zipf_successors_are_a_permutation_that_keeps_frequencies_within_2():
    successors = zipf.successors()
    assert np.array_equal(np.sort(successors), np.arange(successors.size))
    ratio = (successors + 1) / np.arange(1, successors.size + 1)
    assert 0.5 < ratio.min() and ratio.max() < 2.0


def test_zipf_followers_are_likely_successors_in_half_of_all_cases():
    tokens, following = zipf.transitions(0, 1, 100_000)
    rare = tokens >= 255
    expected = torch.from_numpy(zipf.successors())[tokens[rare]]
    assert (following[rare] == expected).double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_images_of_a_class_are_its_shifted_template_and_noise():
    image, _ = images.examples(0, 0, 64)
    # Over shifts, a class's mean square is its template's, and the noise's is 1.
    power = (image.square().mean((1, 2, 3)) - 1).numpy()
    templates = images.templates().square().mean((1, 2, 3)).numpy()
    assert np.abs(power[:, None] - templates).min(1).max() < 0.25
    assert power.mean() == pytest.approx(templates.mean(), rel=0.25)


@TASKS
def test_gradients_of_a_task_are_zero_where_untrained_only(task):
    gradients = Gradients(TrainingRun(Recipe(steps=2, beta2=0.95, task=task)))
    assert all(BlockGrid.of(shape, 256) for shape in gradients.layout.shapes)
    assert gradients.untrained.numel() > 1000
    trained = torch.ones(gradients.layout.numel, dtype=torch.bool)
    trained[gradients.untrained] = False
    grad = gradients.next(0)
    assert not grad[~trained].any()
    assert grad[trained].any()


def test_embedding_gradients_touch_the_rows_of_the_batch_only():
    gradients = Gradients(TrainingRun(Recipe(steps=2, beta2=0.95, task=ZIPF)))
    views = dict(
        zip(gradients.layout.names, gradients.layout.views(gradients.next(0)), strict=True)
    )
    touched = views["embedding.weight"].any(1).nonzero().flatten()
    assert torch.equal(touched, ZIPF.batch(0, 0)[0].unique())


def test_adapters_alone_are_trained_and_half_of_their_matrices_have_narrow_rows():
    gradients = Gradients(TrainingRun(Recipe(steps=2, beta2=0.95, task=LORA)))
    shapes = dict(zip(gradients.layout.names, gradients.layout.shapes, strict=True))
    assert len(shapes) == 8
    for name, shape in shapes.items():
        which = name.rpartition(".")[2]
        assert {"lora_A": shape[0], "lora_B": shape[1]}[which] == 16


def test_adapters_change_nothing_before_they_are_trained():
    torch.manual_seed(0)
    adapted = LORA.make_model()
    torch.manual_seed(0)
    windows = LORA.batch(0, 0)
    before = adapted(*windows)
    for name, p in adapted.named_parameters():
        if name.endswith("lora_A"):
            p.data.zero_()
    assert torch.equal(adapted(*windows), before)


@pytest.mark.parametrize(
    ("task", "steps"), [(zipf.ZipfTask(batch_size=64), 60), (images.ImageTask(), 120)]
)
def test_training_a_task_lowers_its_loss(task, steps):
    run = TrainingRun(Recipe(steps=steps, beta2=0.95, task=task))
    optimizer = adamw(run.model, run.recipe)
    before = loss_of(run)
    for step in range(steps):
        run.model.zero_grad()
        run.backward(step)
        run.update(optimizer, step)
    assert loss_of(run) < 0.95 * before


@torch.no_grad()
def loss_of(run):
    return run.model(*run.recipe.task.batch(9, 9)).item()
