# SPDX-License-Identifier: Apache-2.0
"""One quantization: moments of an fp32 run are encoded, decoded and compared at sampled steps.

Nothing of an error is carried to the next step: this is the error of the codes alone, which the
paper's figures 4 and 5 show.
"""

import math

import torch
from torch import Tensor

from benchmarks.fidelity.coded import Pair, adam_update
from benchmarks.fidelity.training import Gradients, Setting
from benchmarks.maps.codes import GRAINS, NAMES, code_of

NUM_CODES = 256
LARGE = 0.1  # of relative errors
SAMPLES = 25


class PairTally:
    """Sums over elements, by the codes of their moments: [code of m, code of v], float64.

    Errors are |u_q - u|; relative ones, over |u|, are of elements with u != 0.
    """

    def __init__(self):
        """Start empty."""
        self.count, self._moving, self._absolute, self._relative = (
            torch.zeros(NUM_CODES, NUM_CODES, dtype=torch.float64) for _ in range(4)
        )
        self._squares = self._reference_squares = self._large = 0.0

    def add(self, m_codes: Tensor, v_codes: Tensor, update: Tensor, reference: Tensor) -> None:
        """Add elements: places of their codes, int64, and updates, float32, all of one shape."""
        pair = (m_codes * NUM_CODES + v_codes).flatten()
        error = (update.double() - reference.double()).abs().flatten()
        moving = reference.flatten() != 0
        relative = error[moving] / reference.flatten()[moving].abs()
        self.count += _sums(pair)
        self._moving += _sums(pair[moving])
        self._absolute += _sums(pair, error)
        self._relative += _sums(pair[moving], relative)
        self._squares += error.square().sum().item()
        self._reference_squares += reference.double().square().sum().item()
        self._large += (relative > LARGE).sum().item()

    def by_pair(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return share, mean error and mean relative error of pairs, NaN where none has it."""
        share = torch.where(self.count > 0, self.count / self.count.sum(), torch.nan)
        return share, self._absolute / self.count, self._relative / self._moving

    def by_first_moment(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same for each code of m."""
        count, moving = self.count.sum(1), self._moving.sum(1)
        return (
            count / count.sum(),
            self._absolute.sum(1) / count,
            self._relative.sum(1) / moving,
        )

    def row(self) -> dict:
        """Return the means over all elements."""
        numel, moving = self.count.sum().item(), self._moving.sum().item()
        return {
            "pairs_used": int((self.count > 0).sum()),
            "mean_absolute_error": self._absolute.sum().item() / numel,
            "mean_relative_error": self._relative.sum().item() / moving,
            "rms_update_error": math.sqrt(self._squares / self._reference_squares),
            "large_relative_share": self._large / moving,
        }


def _sums(pair: Tensor, weights: Tensor | None = None) -> Tensor:
    sums = torch.bincount(pair, weights, minlength=NUM_CODES**2)
    return sums.view(NUM_CODES, NUM_CODES)


def add_moments(tally: PairTally, pair: Pair, moments, step: int, betas) -> None:
    """Encode and decode both moments of one matrix, and add its elements to a tally."""
    state = pair.encode(*moments, step)
    read = pair.decode(state)
    update = adam_update(*read, step, betas)
    m, v = (x.view_as(blocks) for x, blocks in zip(moments, read, strict=True))
    # The places of codes in the order of their values.
    codes = (state[x][0].long() + 128 * (state[x][0].dtype == torch.int8) for x in "mv")
    tally.add(*codes, update, adam_update(m, v, step, betas))


def once(setting: Setting) -> dict[tuple[str, str], PairTally]:
    """Train in fp32, quantize all moments at SAMPLES steps; return a tally per name and grain."""
    tallies = {(name, grain): PairTally() for grain in GRAINS for name in NAMES}
    model, betas = setting.make_model(seed=0), setting.options["betas"]
    trainer = torch.optim.AdamW(
        model.parameters(), betas=betas, weight_decay=setting.weight_decay, fused=True
    )
    gradients = Gradients(setting, model)
    every = max(1, setting.steps // SAMPLES)
    for step in range(1, setting.steps + 1):
        gradients.next(step - 1)
        setting.step(trainer, step - 1)
        if (setting.steps - step) % every == 0:
            for state in (trainer.state[p] for p in gradients.matrices.values()):
                moments = state["exp_avg"], state["exp_avg_sq"]
                for (name, grain), tally in tallies.items():
                    add_moments(tally, code_of(name, grain), moments, step, betas)
    return tallies
