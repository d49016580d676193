# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT once, or compare two such runs; launch/local.sh starts it under torchrun."""

import argparse
import json
import logging
import os
import platform
import resource
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from tqdm import trange

from benchmarks.states import plain_tensors, state_bytes
from examples.gpt import engines
from examples.gpt.engines import TWINS
from examples.gpt.model import GPT, MODELS, load_text, train_batch, validation_windows
from zero8.environment import packages, ranks
from zero8.spec.codec import CODECS
from zero8.state.extent import local

# The formats of the weights of the linear layers; all other weights are float32.
FLOAT32, INT8 = "float32", "int8"
VALIDATION_EVERY = 50
VALIDATION_WINDOWS = 256
# The reported train loss is the mean of this many last steps: one batch's loss is noisy.
TRAIN_LOSS_STEPS = 20
# The first steps allocate the states and fill caches.
WARM_UP_STEPS = 5
# The table of two runs: header -> key of a run, format.
COLUMNS = {
    "optimizer": ("optimizer", "{}"),
    "weight bytes/param": ("weight_bytes_per_param", "{:.3f}"),
    "state bytes/param": ("state_bytes_per_param", "{:.3f}"),
    "state MiB": ("state_mib", "{:.2f}"),
    "host peak GiB": ("host_peak_gib", "{:.2f}"),
    "GPU peak GiB": ("gpu_peak_gib", "{:.2f}"),
    "train loss": ("train_loss", "{:.4f}"),
    "val loss": ("val_loss", "{:.4f}"),
    "iteration ms": ("iteration_ms", "{:.1f}"),
}


def main() -> None:
    """Parse the arguments, and train or compare."""
    made = argparse.ArgumentParser(
        prog="python -m torch.distributed.run --standalone -m examples.gpt", description=__doc__
    )
    add = made.add_argument
    add("--optimizer", choices=[*TWINS, *TWINS.values()], default="Adam8bitBlockwise")
    add("--weights", choices=(FLOAT32, INT8), default=FLOAT32, help="of the linear layers")
    add("--codec", choices=CODECS, help="of zero8's states; default: the config's")
    help_text = ".json for DeepSpeed, .toml for FSDP2; default: %(default)s"
    add("--config", type=Path, default=Path("configs/zero2_offload.json"), help=help_text)
    add("--model", choices=MODELS, default="demo", help="its size")
    add("--data", help="file or folder; default: Python's standard library")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/demo"), help="folder; default: %(default)s")
    add("--save-every", type=int, metavar="STEPS", help="between checkpoints; default: at the end")
    help_text = "go on from the newest complete checkpoint in OUT, of any number of ranks; without "
    help_text += "it, those of an earlier run of the optimizer there are deleted"
    add("--resume", action="store_true", help=help_text)
    add("--build", action="store_true", help="only compile what ranks would wait for")
    help_text = "only compare both runs in OUT, made by COMMAND: OUT/summary.json, OUT/loss.png"
    add("--report", metavar="COMMAND", help=help_text)
    arguments = made.parse_args()
    is_of_fsdp2 = arguments.config.suffix == ".toml"
    if arguments.weights == INT8 and not (is_of_fsdp2 and arguments.optimizer in TWINS):
        made.error(f"got {INT8} weights, expected {FLOAT32}: zero8's optimizers step them in FSDP2")
    with packages.explained("python -m examples.gpt"):
        if arguments.report is not None:
            report(arguments.out, arguments.optimizer, arguments.report)
            return
        config = engines.load_config(arguments.config, arguments.optimizer, arguments.codec)
        if arguments.build:
            engines.build(config)
            return
        if "LOCAL_RANK" not in os.environ:
            made.error("no LOCAL_RANK in the environment: start it with torchrun (see the usage)")
        if not is_of_fsdp2:
            import deepspeed  # noqa: F401 - makes a logger of its own
        log_warnings(arguments.out / f"{arguments.optimizer}.rank{os.environ['RANK']}.log")
        train(arguments, config)


def log_warnings(path: Path) -> None:
    """Send warnings of this process to a new file; errors still show on the screen, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, screen = logging.FileHandler(path, mode="w"), logging.StreamHandler()
    screen.setLevel(logging.ERROR)
    for name in ("py.warnings", "DeepSpeed", "torchao"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [file, screen]
        logger.propagate = False
    logging.captureWarnings(True)


def train(arguments: argparse.Namespace, config: dict) -> dict | None:
    """Train on every rank, unless that was done, and write what was measured."""
    name, steps = arguments.optimizer, arguments.steps
    text = load_text(arguments.data)
    torch.manual_seed(arguments.seed)
    gpt = GPT(MODELS[arguments.model])
    parameters = sum(p.numel() for p in gpt.parameters())  # before ZeRO-3 takes them away
    if arguments.weights == INT8:
        engines.make_int8(gpt)
    checkpoint = arguments.out / f"{name}.checkpoint"
    kind = engines.ENGINES[arguments.config.suffix]
    engine = kind(gpt, config, steps, checkpoint if arguments.resume else None)
    is_first = dist.get_rank() == 0
    if is_first and not arguments.resume:  # not before there is an engine to make another
        shutil.rmtree(checkpoint, ignore_errors=True)
    if is_first:
        print("data:", ", ".join(f"{key} {value}" for key, value in text.about.items()))
        print(f"warnings of each rank: {arguments.out / name}.rank*.log")
        where = f"step {engine.steps_done} of {steps}" if engine.steps_done else "the start"
        print(f"{name}: {dist.get_world_size()} rank(s) go on from {where}", flush=True)
    if engine.steps_done >= steps:
        return None
    row = {key: getattr(arguments, key) for key in ("optimizer", "weights", "steps", "seed")}
    row |= {"config": str(arguments.config), "parameters": parameters, "data": text.about}
    row |= fit(engine, text, arguments, checkpoint)
    if is_first:
        (arguments.out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    return row


def fit(engine, text, arguments: argparse.Namespace, checkpoint: Path) -> dict:
    """Train, with validation and checkpoints on the way and at the end; return measurements."""
    context = MODELS[arguments.model].context
    windows = validation_windows(text.validation, VALIDATION_WINDOWS, context)
    steps, save_every = arguments.steps, arguments.save_every or arguments.steps
    train, validation, iteration_ms = [], [], []
    settings = {"desc": arguments.optimizer, "initial": engine.steps_done, "total": steps}
    settings |= {"unit": "step", "disable": dist.get_rank() != 0}
    progress = trange(engine.steps_done, steps, **settings)
    for step in progress:
        started = time.perf_counter()
        place = {"seed": arguments.seed, "step": step, "rank": dist.get_rank()}
        batch = train_batch(text.train, engine.batch_size, context, **place)
        losses = engine.step(batch.to(engine.device))
        train.append(mean_over_ranks(sum(losses), len(losses)))
        iteration_ms.append(1e3 * (time.perf_counter() - started))
        progress.set_postfix_str(f"loss {train[-1]:.3f} nats/byte", refresh=False)
        if (step + 1) % VALIDATION_EVERY == 0 or step + 1 == steps:
            validation.append((step + 1, validate(engine, windows)))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            engine.save(checkpoint, step + 1)
    settings = getattr(engine.optimizer, "settings", None)
    return {
        "first_step": engine.steps_done,
        "codec": settings and settings.codec.name,
        "val_loss": validation[-1][1],
        "train_loss": statistics.mean(train[-TRAIN_LOSS_STEPS:]),
        **memory(engine.optimizer, engine.device),
        # Rank 0's; the ranks wait for one another.
        "iteration_ms": statistics.median(iteration_ms[WARM_UP_STEPS:] or iteration_ms),
        "device": engine.device.type,
        "ranks": dist.get_world_size(),
        "train_curve": train,
        "val_curve": validation,
    }


@torch.no_grad()
def validate(engine, windows: torch.Tensor) -> float:
    """Return the mean loss over the windows, nats per byte; each rank takes an equal share."""
    share = max(1, len(windows) // dist.get_world_size())
    mine = windows.roll(-share * dist.get_rank(), 0)[:share]
    engine.module.eval()
    batches = mine.split(engine.micro_batch_size)
    total = sum(engine.module(one.to(engine.device)).item() * len(one) for one in batches)
    engine.module.train()
    return mean_over_ranks(total, share)


def memory(optimizer: torch.optim.Optimizer, device: torch.device) -> dict:
    """Return the bytes of states and of stepped weights over all ranks, and the peaks of memory."""
    stepped = [p for p, state in optimizer.state.items() if state]
    stepped_numel = sum(local(p).numel() for p in stepped)
    if hasattr(optimizer, "memory_report"):
        rows = [(r.state_bytes, r.numel, r.bits < 32) for r in optimizer.memory_report().rows]
    else:
        rows = [(state_bytes(optimizer), stepped_numel, True)]
    in_few_bits = [row for row in rows if row[2]]
    sums = [sum(row[column] for row in some) for some in (in_few_bits, rows) for column in (0, 1)]
    sums += [sum(t.nbytes for t in plain_tensors(stepped)), stepped_numel]
    sums += [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    totals = (ranks.total(one, [None]) for one in sums)
    own, own_numel, size, numel, weight, weight_numel, peak = totals
    on_gpu = device.type == "cuda"
    return {
        "weight_bytes_per_param": weight / weight_numel if weight_numel else None,
        "state_bytes_per_param": own / own_numel if own_numel else None,
        "state_bytes": size,
        "state_numel": numel,
        "host_peak_gib": peak / 2**30,
        "gpu_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else None,
    }


def mean_over_ranks(total: float, count: int) -> float:
    """Return the mean of values of which each rank holds a sum, and as many."""
    return ranks.total(total, [None]) / (count * dist.get_world_size())


def report(out: Path, optimizer: str, command: str) -> dict:
    """Write OUT/summary.json and OUT/loss.png, print the table, and return the summary."""
    from benchmarks import record  # of zero8[train]

    runs = [json.loads((out / f"{n}.json").read_text()) for n in (TWINS[optimizer], optimizer)]
    rows = [{k: v for k, v in run.items() if not k.endswith("_curve")} for run in runs]
    place = {"platform": platform.platform(), "cpu": record.cpu()}
    summary = {key: value for key, value in rows[0].items() if rows[1][key] == value}
    summary |= {"command": command, "versions": record.versions() | place, "runs": rows}
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(runs, out / "loss.png")
    columns = dict(COLUMNS)
    if summary["device"] != "cuda":
        del columns["GPU peak GiB"]
    if runs[0]["weight_bytes_per_param"] == runs[1]["weight_bytes_per_param"]:
        del columns["weight bytes/param"]
    cells = [
        ["-" if run[key] is None else form.format(run[key]) for key, form in columns.values()]
        for run in ({**run, "state_mib": run["state_bytes"] / 2**20} for run in runs)
    ]
    print(tabulate(cells, [*columns], "plain", disable_numparse=True, stralign="right"))
    gap = 100 * (runs[1]["val_loss"] / runs[0]["val_loss"] - 1)
    print(f"validation loss of {optimizer} against {TWINS[optimizer]}: {gap:+.2f} %")
    print(f"codec of {optimizer}: {runs[1]['codec']}")
    print(f"wrote {out / 'summary.json'} and {out / 'loss.png'}")
    return summary


def plot(runs: list[dict], path: Path) -> None:
    """Draw both runs' train and validation losses over the steps."""
    from matplotlib.figure import Figure  # of zero8[train]

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, color, line in zip(runs, ("tab:blue", "tab:orange"), ("o-", "o--"), strict=True):
        weights, train = f"{run['weights']} weights", run["train_curve"]
        name = ", ".join(filter(None, [run["optimizer"], run["codec"], weights]))
        axes.plot(range(1, len(train) + 1), train, color=color, alpha=0.3, label=f"{name}, train")
        name += f", validation ({run['val_loss']:.4f} at the end)"
        axes.plot(*zip(*run["val_curve"], strict=True), line, color=color, ms=4, label=name)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)")
    size, config = f"{runs[0]['parameters'] / 1e6:.2f} M", Path(runs[0]["config"]).name
    axes.set(title=f"Byte-level GPT, {size} parameters, {config}")
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
