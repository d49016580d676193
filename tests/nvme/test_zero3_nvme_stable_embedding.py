# SPDX-License-Identifier: Apache-2.0
"""A StableEmbedding keeps float32 moments where ZeRO-3 swaps them to a disk."""

import pytest
from needs import need_nvme
from nvme_worker import Tower, make_tower, nvme_config
from zero_worker import base_optimizer, train

from zero8 import StableEmbedding

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


class StableTower(Tower):
    """A Tower with another embedding, whose moments are swapped."""

    def __init__(self):
        super().__init__()
        self.embed = StableEmbedding(*self.embed.weight.shape)


def reports(folder):
    """Return the losses and the report of a run that swaps to a folder, and of one in memory."""
    found = []
    for where in (folder, None):
        engine = make_tower(nvme_config(where), StableTower)
        losses = train(engine, 3)
        optimizer = base_optimizer(engine)
        rows = sorted(optimizer.memory_report().rows, key=lambda row: row.name)
        found.append((losses, rows, len(optimizer.on_disk)))
    return found


def test_zero3_nvme_stable_embedding_has_float32_moments(standing_ranks, tmp_path):
    need_nvme()
    ranks = standing_ranks(2).run(reports, folder=str(tmp_path), timeout_s=900)
    numel = 0
    for (losses, rows, swapped), (expected_losses, expected, _) in ranks:
        assert swapped > 0 and losses == expected_losses and rows == expected
        stable = [row for row in rows if row.name == "embed.weight"]
        assert {(row.bits, row.reason) for row in stable} == {(32, "in a StableEmbedding")}
        numel += sum(row.numel for row in stable)
        assert {row.bits for row in rows if row.name == "inner.weight"} <= {8}
    assert numel == 67 * 1041
