# SPDX-License-Identifier: Apache-2.0
"""Measures what `zero8.StableEmbedding` changes in the demonstration's GPT.

The gradients of its tied token embedding before the first step, and trainings at the
demonstration's learning rate and at 10 times that, without clipping, with fp32 and 8-bit states.
Writes OUT (JSON) and tables (.md) beside it.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.fidelity.text import TextTask
from benchmarks.fidelity.training import Recipe, TrainingRun
from examples.gpt.model import VOCABULARY
from zero8 import Adam8bitBlockwise, StableEmbedding

LR = 2e-3
"""The learning rate of `make train`, whose betas and weight decay are used, too."""
FACTORS = (1, 10)
BETA2 = 0.95
WEIGHT_DECAY = 0.1
SETTLED = 50
"""Steps after which the largest loss of a training is looked for."""

OPTIMIZERS = {
    "fp32": torch.optim.AdamW,
    "8-bit": Adam8bitBlockwise,
}


@dataclass(frozen=True)
class EmbeddingTask(TextTask):
    """The text of the fidelity bench, predicted by a GPT whose embeddings start as `start` says."""

    start: str = "nn.Embedding, N(0, 0.02)"

    def make_model(self) -> nn.Module:
        """Return the GPT; all but its embeddings depends on the seed alone."""
        model = super().make_model()
        STARTS[self.start](model)
        return model


def embed_as_torch(model: nn.Module) -> None:
    """Start the token embedding as torch does."""
    nn.init.normal_(model.token_embedding.weight)


def embed_stably(model: nn.Module) -> None:
    """Replace the token embedding, which is the output layer's weight, too."""
    model.token_embedding = StableEmbedding(VOCABULARY, model.config.width)


def embed_stably_beside_large_positions(model: nn.Module) -> None:
    """Also start the position embedding at the token embedding's variance, 1."""
    embed_stably(model)
    nn.init.normal_(model.position_embedding.weight)


STARTS = {
    "nn.Embedding, N(0, 1)": embed_as_torch,
    "nn.Embedding, N(0, 0.02)": lambda model: None,
    "StableEmbedding": embed_stably,
    "StableEmbedding, positions N(0, 1)": embed_stably_beside_large_positions,
}
"""What is changed in the demonstration's GPT, both of whose embeddings start at N(0, 0.02)."""


def recipe_of(start: str, factor: int, steps: int, seed: int) -> Recipe:
    """Return the training run of a start at `factor` times the learning rate."""
    task, rate = EmbeddingTask(start=start), factor * LR
    return Recipe(steps, BETA2, seed=seed, task=task, peak_lr=rate, weight_decay=WEIGHT_DECAY)


def gradients(start: str, seed: int) -> dict[str, dict[str, float]]:
    """Return statistics of a token embedding before the first step.

    Returns:
        Of the output; of the weight's gradient through the lookup; of its whole gradient, which
        also comes from the output layer, whose weight it is.
    """
    model = TrainingRun(recipe := recipe_of(start, 1, 1, seed)).model
    (windows,) = recipe.task.batch(seed, 0)
    layer, outputs = model.token_embedding, []
    hook = layer.register_forward_hook(lambda _, inputs, output: outputs.append(output))
    loss = model(windows)
    hook.remove()
    of_output, whole = torch.autograd.grad(loss, (outputs[0], layer.weight))
    (looked_up,) = torch.autograd.grad(layer(windows[:, :-1]), layer.weight, of_output)
    found = {"output": outputs[0].detach(), "lookup": looked_up, "whole": whole}
    return {what: statistics(x) for what, x in found.items()}


def statistics(x: Tensor) -> dict[str, float]:
    """Return the largest magnitude and the variance of a tensor."""
    return {"largest": x.abs().max().item(), "variance": x.var(correction=0).item()}


def trained(start: str, optimizer: str, factor: int, steps: int, seed: int) -> dict[str, float]:
    """Train, and return losses, and the variance of the embedding's output at the end."""
    run = TrainingRun(recipe := recipe_of(start, factor, steps, seed))
    made = OPTIMIZERS[optimizer](
        run.model.named_parameters(),
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    losses = []
    for step in range(steps):
        loss = run.model(*recipe.task.batch(seed, step))
        loss.backward()
        run.update(made, step)
        made.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        tokens = recipe.task.batch(seed, steps)[0]
        variance = run.model.token_embedding(tokens).var(correction=0).item()
    return {
        "validation": recipe.task.validation_loss(run.model),
        "largest": max(losses[SETTLED:]),
        "variance": variance,
    }


def measure(steps: int, seeds: int) -> dict[str, Any]:
    """Return the statistics and the trainings, an entry per seed each."""
    trainings = []
    for start in STARTS:
        for optimizer in OPTIMIZERS:
            for factor in FACTORS:
                runs = [trained(start, optimizer, factor, steps, seed) for seed in range(seeds)]
                case = {"start": start, "optimizer": optimizer, "factor": factor}
                trainings.append({**case, "runs": runs})
                print(case, runs, flush=True)
    return {
        "gradients": {start: [gradients(start, seed) for seed in range(seeds)] for start in STARTS},
        "trainings": trainings,
    }


def markdown(result: dict) -> str:
    """Return the tables of a result."""
    at_start = [
        [start, *(f"{value:.2g}" for value in averages(found))]
        for start, found in result["gradients"].items()
    ]
    trainings = [
        [entry["start"], entry["optimizer"], f"{entry['factor']}", *ranges(entry["runs"])]
        for entry in result["trainings"]
    ]
    parts = ("output", "gradient by lookup", "whole gradient")
    columns = [f"{part}, {what}" for part in parts for what in ("largest", "variance")]
    headers = ["start", "states", "learning rate / 0.002"]
    headers += ["validation loss", f"largest loss after step {SETTLED}", "variance of output"]
    lines = [
        "# StableEmbedding in the demonstration's GPT",
        "",
        f"`{result['command']}`, commit {result['commit'] or 'unknown'}; {result['cpu']}, "
        f"{result['machine']['cores']} cores, {result['seconds']:.0f} s; torch "
        f"{result['versions']['torch']}.",
        "",
        "Before the first step, means over the seeds:",
        "",
        *record.table_lines(["start", *columns], at_start),
        "",
        f"After {result['steps']} steps of AdamW without clipping, lowest to highest of "
        f"{result['seeds']} seeds:",
        "",
        *record.table_lines(headers, trainings),
    ]
    return "\n".join(lines) + "\n"


def averages(found: list[dict[str, dict[str, float]]]) -> list[float]:
    """Return the means over seeds of `gradients`, in the order of its entries."""
    keys = [(part, what) for part in found[0] for what in found[0][part]]
    return [mean(one[part][what] for one in found) for part, what in keys]


def ranges(runs: list[dict[str, float]]) -> list[str]:
    """Return lowest and highest of each entry of `trained`."""
    return [f"{min(r[k] for r in runs):.3g} to {max(r[k] for r in runs):.3g}" for k in runs[0]]


def main() -> None:
    """Measure and write both files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stable_embedding", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    arguments = parser.parse_args()
    machine, began = record.machine(), time.monotonic()
    options = f"--steps {arguments.steps} --seeds {arguments.seeds} --json {arguments.json}"
    result = {
        **measure(arguments.steps, arguments.seeds),
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "command": f"python -m benchmarks.stable_embedding {options}",
        "commit": record.commit(),
        "cpu": record.cpu(),
        "machine": machine,
        "seconds": time.monotonic() - began,
        "versions": record.versions(),
    }
    print(*record.write(result, arguments.json, markdown))


if __name__ == "__main__":
    main()
