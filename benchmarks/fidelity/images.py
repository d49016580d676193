# SPDX-License-Identifier: Apache-2.0
"""A task with convolutions: classes of smooth random images, shifted, noisy and mislabelled."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.fidelity.training import Task

CLASSES, CHANNELS, SIZE = 10, 3, 16
# So many labels are drawn at random, which keeps gradients alive once the classes are learnt.
MISLABELLED = 0.1
PRUNED_EVERY = 16
VALIDATION_SEED, VALIDATION_EXAMPLES = 1_000_000, 2048


class Classifier(nn.Module):
    """Layers whose outputs are the logits of classes; forward returns the loss."""

    def __init__(self, *layers: nn.Module):
        """Take the layers."""
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the labels."""
        return F.cross_entropy(self.layers(inputs), labels)


def labelled(seed: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images [count, channels, size, size] and their labels [count], int64."""
    shape = CLASSES, CHANNELS, 4, 4
    coarse = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    templates = F.interpolate(torch.from_numpy(coarse), size=(SIZE, SIZE), mode="bilinear")
    generator = np.random.default_rng((seed, step))
    classes = generator.integers(0, CLASSES, count)
    shifts = generator.integers(0, SIZE, (count, 2))
    noise = generator.standard_normal((count, CHANNELS, SIZE, SIZE), dtype=np.float32)
    wrong = generator.random(count) < MISLABELLED
    labels = np.where(wrong, generator.integers(0, CLASSES, count), classes)
    pairs = zip(classes.tolist(), shifts.tolist(), strict=True)
    moved = [templates[kind].roll(tuple(shift), dims=(1, 2)) for kind, shift in pairs]
    return torch.stack(moved) + torch.from_numpy(noise), torch.from_numpy(labels)


@dataclass(frozen=True)
class ImageTask(Task):
    """Tell the classes apart."""

    batch_size: int = 32

    def make_model(self) -> nn.Module:
        """Return four 3 x 3 convolutions and a linear layer."""
        widths = (CHANNELS, 32, 64, 64, 128)
        layers: list[nn.Module] = []
        for number in range(4):
            layers += [nn.Conv2d(*widths[number : number + 2], 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if number < 2 else []
        end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES)
        return Classifier(*layers, *end)

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        return labelled(seed, step, self.batch_size)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark every 16th input channel of the third convolution, which is treated as pruned."""
        marks["layers.6.weight"][:, ::PRUNED_EVERY] = True

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Return the mean loss on new examples, a tenth of them mislabelled as in training."""
        return model(*labelled(VALIDATION_SEED, 0, VALIDATION_EXAMPLES)).item()
