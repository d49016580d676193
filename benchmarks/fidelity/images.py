# SPDX-License-Identifier: Apache-2.0
"""A task with convolutions: classes of smooth random images, shifted, noisy and mislabelled."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, CHANNELS, SIZE = 10, 3, 16
# So many labels are drawn at random, which keeps gradients alive once the classes are learnt.
MISLABELLED = 0.1
PRUNED_EVERY = 16
# The examples of validation are drawn with a seed that no training has.
VALIDATION_SEED, VALIDATION_EXAMPLES = 1_000_000, 2048


@cache
def templates() -> Tensor:
    """Return the image of each class, [classes, channels, size, size]: 4 x 4 noise, enlarged."""
    noise = np.random.default_rng(0).standard_normal((CLASSES, CHANNELS, 4, 4), dtype=np.float32)
    return F.interpolate(torch.from_numpy(noise), size=(SIZE, SIZE), mode="bilinear")


def examples(seed: int, step: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images [count, channels, size, size] and their labels [count], int64."""
    generator = np.random.default_rng((seed, step))
    classes = generator.integers(0, CLASSES, count)
    shifts = generator.integers(0, SIZE, (count, 2))
    noise = generator.standard_normal((count, CHANNELS, SIZE, SIZE), dtype=np.float32)
    wrong = generator.random(count) < MISLABELLED
    labels = np.where(wrong, generator.integers(0, CLASSES, count), classes)
    moved = [
        templates()[c].roll(tuple(shift), dims=(1, 2))
        for c, shift in zip(classes.tolist(), shifts.tolist(), strict=True)
    ]
    return torch.stack(moved) + torch.from_numpy(noise), torch.from_numpy(labels)


class ConvModel(nn.Module):
    """Four 3 x 3 convolutions and a linear layer; forward returns the loss."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        widths = (CHANNELS, 32, 64, 64, 128)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(wide, wider, 3, padding=1)
            for wide, wider in zip(widths[:-1], widths[1:], strict=True)
        )
        self.output = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the labels."""
        x = images
        for number, convolution in enumerate(self.convolutions):
            x = convolution(x).relu()
            if number < 2:
                x = F.max_pool2d(x, 2)
        return F.cross_entropy(self.output(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class ImageTask:
    """Tell the classes apart; see `benchmarks.fidelity.training.Task`."""

    batch_size: int = 32

    def make_model(self) -> nn.Module:
        """Return the model."""
        return ConvModel()

    def batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        return examples(seed, step, self.batch_size)

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Mark every 16th input channel of one convolution, which is treated as pruned."""
        marks["convolutions.2.weight"][:, ::PRUNED_EVERY] = True

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Return the mean loss on new examples, a tenth of them mislabelled as in training."""
        return model(*examples(VALIDATION_SEED, 0, VALIDATION_EXAMPLES)).item()
