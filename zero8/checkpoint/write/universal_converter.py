# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints by DeepSpeed's converter, completed for all stages.

A ZeRO checkpoint becomes one folder per parameter, with its master weight and its moments in
float32, which engines of any world size read under `"checkpoint": {"load_universal": true}`.
quantize(dequantize(q)) is q, so that no information is lost.

DeepSpeed's converter writes files for engines of the same stage.  For other stages this adds

    to stages 1 and 2   the name of stage 3's model-state files, and the step and the parameter
                        groups at stage 3's place
    to stage 3          the name of the others' model-state files, `step.pt` of every parameter,
                        weights and moments with their shapes, and the version of DeepSpeed

and removes rank 0's moments, which the converter leaves in stage 3's `optimizer_state.pt`.
"""

import contextlib
import math
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from zero8 import flock
from zero8.algorithms.adam import ADAM
from zero8.checkpoint.files.inside import is_folder, leads_out
from zero8.checkpoint.files.tags import LATEST_UNIVERSAL, write_latest
from zero8.checkpoint.read.safe_load import damage_in
from zero8.spec.shown import shown, shown_keys
from zero8.state.memory import new_memory
from zero8.zero.moment_tensor import moments_in, with_moments

LEADS_CONVERTER = "universal_checkpoint_info", "ds_autoep_layers", "autoep_layers"
"""Entries of model states that control DeepSpeed's converter."""
OPTIMIZER_FILES, MODEL_FILES = "*_optim_states.pt", "*_model_states.pt"
EXPERT_FILES = "layer_*_expert_*_model_states.pt"
STAGE3_MODEL = "zero_pp_rank_0_mp_rank_{}_model_states.pt"
STAGE12_MODEL = "mp_rank_{}_model_states.pt"


def convert(
    source: Path, target: Path, workers: int, copy: Callable[[Path, Path], None] | None = None
) -> dict:
    """Convert the folder of a ZeRO checkpoint's tag; return a summary.

    The target is written under another name and then renamed, so that it is never incomplete.
    DeepSpeed's converter can run code in the files that it reads.

    Args:
        source: the folder of the tag.
        target: the folder to make; `latest_universal` beside it will name it.
        workers: number of processes; each holds one rank's states.
        copy: makes safe copies of a tag's files in an empty folder, for the converter; None to
            trust the files of the tag, of which only those with 8-bit moments are copied.

    Raises:
        FileExistsError: if the target exists.
        RuntimeError: if DeepSpeed is missing, or its converter fails.
        ValueError: if the source cannot be converted.
    """
    try:
        from deepspeed.checkpoint import ds_to_universal
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"needs DeepSpeed, whose converter it calls (no module {error.name!r}); pip install "
            "'zero8[deepspeed]'"
        ) from error
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or name another folder by --out")
    _check_names(source)
    with _beside(target) as made:
        trusted = made.parent / "checked"
        trusted.mkdir()
        (copy or _link)(source, trusted)
        try:
            for path in trusted.glob(OPTIMIZER_FILES):
                _decode(path)
            found = check(source, trusted)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"{source}: damaged: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        options = Namespace(
            input_folder=str(trusted),
            output_folder=str(made),
            num_extract_workers=workers,
            num_merge_workers=workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # which only Megatron's clients save
        )
        try:
            ds_to_universal.main(options)
        except Exception as error:  # assertions, missing keys, dead workers: any class
            raise RuntimeError(f"DeepSpeed's converter failed: {error!r}") from error
        (_complete_stage3 if found["zero_stage"] == 3 else _complete_stage12)(made, workers)
        made.rename(target)
    write_latest(target.parent, target.name, LATEST_UNIVERSAL)
    return {
        "source": str(source),
        "target": str(target),
        **found,
        "parameters": len(list((target / "zero").glob("**/exp_avg.pt"))),
        "bytes": sum(path.stat().st_size for path in target.rglob("*") if path.is_file()),
    }


def _link(source: Path, target: Path) -> None:
    """Give the files of a folder the same names in another."""
    for path in source.glob("*.pt"):
        (target / path.name).symlink_to(path.absolute())


def _decode(path: Path) -> None:
    """Replace 8-bit moments in a file of states by float32 ones, which DeepSpeed's converter reads.

    Raises:
        ValueError: naming the file, if a moment is damaged.
    """
    content = _load(path)
    zero, is_ours = content.get("optimizer_state_dict") or {}, False
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        base = zero.get(key)
        states = base.get("state") if isinstance(base, dict) else None
        for number, state in (states or {}).items():
            with damage_in(path):
                decoded = with_moments(state)
            dense = {name: moment.dense() for name, moment in moments_in(decoded).items()}
            states[number] = decoded | dense
            is_ours |= bool(dense)
    if is_ours:
        _save(content, path)


def check_content(content: object) -> None:
    """Raise ValueError if the content of a file could misuse DeepSpeed's converter.

    The converter makes folders named after parameters, reads files of experts at paths in the file,
    and searches names by regular expressions in the file.

    Args:
        content: of a file of the optimizer's or the model's states.
    """
    found = _dict("a file", content)
    for key in LEADS_CONVERTER:
        if found.get(key):
            raise ValueError(
                f"got {key}, which controls DeepSpeed's converter; if you trust the file's author, "
                "--trust lets DeepSpeed read it"
            )
    states = found.get("optimizer_state_dict")
    states = {} if states is None else _dict("optimizer_state_dict", states)
    for key, groups in (
        ("param_slice_mappings", states.get("param_slice_mappings")),
        ("param_shapes", found.get("param_shapes")),
        ("module", [found.get("module") or {}]),
        ("frozen_param_shapes", [found.get("frozen_param_shapes") or {}]),
    ):
        if groups is not None and not isinstance(groups, list):
            raise ValueError(f"got {key} that is not a list")
        for group in groups or ():
            for name in _dict(key, group):
                if not isinstance(name, str) or leads_out(name):
                    raise ValueError(
                        f"got a parameter called {shown(name)}, which cannot name a folder"
                    )


def _dict(name: str, found: object) -> dict:
    if not isinstance(found, dict):
        raise ValueError(f"got {name} that is not a dict")
    return found


def _check_names(source: Path) -> None:
    """Raise ValueError if the folder's file names show that it cannot be converted."""
    if (source / "zero").is_dir():
        raise ValueError(f"{source} is a universal checkpoint already")
    if not any(source.glob(OPTIMIZER_FILES)):
        raise ValueError(
            f"{source}: got no files {OPTIMIZER_FILES}, expected a checkpoint that "
            "engine.save_checkpoint saved under ZeRO stage 1, 2 or 3"
        )
    if (source / "offloaded_tensors").is_dir():
        raise ValueError(
            f"{source}: its optimizer states are in swap files of NVMe, not in {OPTIMIZER_FILES}, "
            "which DeepSpeed converts; it loads at the world size that it was saved with"
        )
    if not set(source.glob(MODEL_FILES)) - set(source.glob(EXPERT_FILES)):
        raise ValueError(f"{source}: got no files {MODEL_FILES}; it is incomplete")


def check(source: Path, trusted: Path) -> dict:
    """Return a tag's `zero_stage`, number of `ranks`, and entries of states that are `not_carried`.

    Args:
        source: the folder of the tag, for messages.
        trusted: the folder with its files, or with copies of them.

    Raises:
        ValueError: if it cannot be converted.
    """
    files = sorted(trusted.glob(OPTIMIZER_FILES), key=_numbers)
    states = _load(files[0]).get("optimizer_state_dict") or {}
    stage = int(states.get("zero_stage", 1))  # BF16_Optimizer saves none
    kept = "base_optimizer_state" if stage < 3 else "optimizer_state_dict"
    if kept not in states:
        raise ValueError(f"{source}: got {files[0].name} without {kept}: not saved under ZeRO")
    base = states[kept]
    _check_moments(source, base)
    experts = set(trusted.glob(EXPERT_FILES))
    model = _load(min(set(trusted.glob(MODEL_FILES)) - experts, key=_numbers))
    if experts and not model.get("ds_autoep_layers"):
        raise ValueError(
            f"{source}: got files {EXPERT_FILES}, experts of DeepSpeed's MoE, which its converter "
            "leaves out; it loads at the world size that it was saved with"
        )
    sizes = [model.get(key, 1) for key in ("dp_world_size", "mp_world_size")]
    if not all(type(size) is int for size in sizes):
        raise ValueError(f"{source}: damaged: got a world size that is not a number")
    expected = math.prod(sizes)
    if len(files) != expected and not experts:
        raise ValueError(
            f"{source}: got {len(files)} files {OPTIMIZER_FILES}, expected those of {expected} "
            "ranks; it is incomplete"
        )
    if stage < 3 and _is_round_robin(model):
        _check_order(source, files, model["param_shapes"])
    entries = {entry for state in base["state"].values() for entry in state}
    return {
        "zero_stage": stage,
        "ranks": len(files),
        "not_carried": sorted(entries - {"step", *new_memory(ADAM), *ADAM.moment_names}),
    }


def _check_moments(source: Path, base: object) -> None:
    """Raise ValueError unless the states of a base optimizer are Adam's."""
    if not isinstance(base, dict):
        raise ValueError(
            f"{source}: was saved with elastic_checkpoint, which DeepSpeed does not convert"
        )
    if not base["state"]:
        raise ValueError(f"{source}: was saved before the first step: it has no moments to convert")
    for state in base["state"].values():
        if missing := [name for name in ADAM.moment_names if name not in _dict("a state", state)]:
            raise ValueError(
                f"{source}: got states {shown_keys(state)}, without {missing}; DeepSpeed converts "
                "only Adam's: zero8 checkpoint convert DIR OUT --to zero does others"
            )


def _is_round_robin(model: dict) -> bool:
    section = (model.get("ds_config") or {}).get("zero_optimization", {})
    return bool(section.get("round_robin_gradients"))


def _check_order(source: Path, files: list[Path], shapes: list[dict]) -> None:
    """Raise ValueError if a checkpoint's map of its partitions is in the wrong order.

    Under `round_robin_gradients` the order of parameters differs from the order in DeepSpeed's map,
    which its converter uses; engines with zero8's optimizers save a correct map.
    """
    maps = [_load(path)["optimizer_state_dict"]["param_slice_mappings"] for path in files]
    for group, shape_of in enumerate(shapes):
        names = []
        for of_rank in maps:
            names += sorted(of_rank[group], key=lambda name: of_rank[group][name].start)
        if list(dict.fromkeys(names)) != list(shape_of):
            raise ValueError(
                f"{source}: was saved under round_robin_gradients, where DeepSpeed's map of the "
                "partitions is in the wrong order: its converter would mix up parameters.  Load it "
                "with Adam8bitBlockwise at the same world size, and save it again"
            )


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a path for a folder that becomes `target`; clean up before and afterwards.

    Raises:
        RuntimeError: if another process is making the same target.
    """
    folder = target.with_name(f".{target.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    if not is_folder(folder):
        raise ValueError(f"{folder}: got a symbolic link, expected a folder; remove it")
    with flock.opened(folder / "lock") as lock:
        if not (flock.take_where_possible(lock) and _is_at(folder / "lock", lock)):
            raise RuntimeError(f"another process is making {target}")
        try:
            for left in set(folder.iterdir()) - {folder / "lock"}:  # of a killed process
                shutil.rmtree(left) if is_folder(left) else left.unlink()
            yield folder / target.name
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_at(path: Path, file: FileIO) -> bool:
    """Return whether a path still is that of an open file, and not of a newer one."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _complete_stage12(made: Path, _: int) -> None:
    """Add the files and entries for engines of stage 3."""
    for path in made.glob(STAGE12_MODEL.format("*")):
        _alias(path, STAGE3_MODEL)
    steps = {int(torch.load(path)) for path in (made / "zero").glob("**/step.pt")}
    if len(steps) != 1:
        raise ValueError(f"got steps {sorted(steps)}, expected one for all parameters")
    common = _load(made / "zero" / "optimizer_state.pt")
    groups = common["param_groups"]
    common["optimizer_state_dict"] = {"state": {0: {"step": steps.pop()}}, "param_groups": groups}
    _save(common, made / "zero" / "optimizer_state.pt")


def _complete_stage3(made: Path, workers: int) -> None:
    """Add the files and entries for engines of stages 1 and 2, and remove rank 0's moments."""
    for path in made.glob(STAGE3_MODEL.format("*")):
        _alias(path, STAGE12_MODEL)
    model = _load(min(made.glob(MODEL_FILES), key=_numbers))
    common = _load(made / "zero" / "optimizer_state.pt")
    base = common["optimizer_state_dict"]
    steps = {number: {"step": state["step"]} for number, state in base["state"].items()}
    common["optimizer_state_dict"] = {"state": steps, "param_groups": base["param_groups"]}
    del common["fp32_flat_groups"]
    common["ds_version"] = model["ds_version"]
    _save(common, made / "zero" / "optimizer_state.pt")
    parameters = [
        (made / "zero" / name, tuple(shape), steps[number]["step"])
        for number, shape_of in enumerate(model["param_shapes"])
        for name, shape in shape_of.items()
    ]
    if workers == 1:
        list(map(_add_shapes_and_step, parameters))
    else:
        with ProcessPoolExecutor(max_workers=workers) as pool:
            list(pool.map(_add_shapes_and_step, parameters))


def _add_shapes_and_step(parameter: tuple[Path, tuple[int, ...], int]) -> None:
    """Rewrite a parameter's files of stage 3 in the form of the other stages."""
    folder, shape, step = parameter
    for name in ("fp32", *ADAM.moment_names):
        values = torch.load(folder / f"{name}.pt", weights_only=False)
        if isinstance(values, Tensor):  # with tensor parallelism it has that form already
            torch.save({"param": values.view(shape)}, folder / f"{name}.pt")
    torch.save(step, folder / "step.pt")


def _alias(path: Path, pattern: str) -> None:
    """Give a model-state file a second name: another stage's."""
    rank = re.search(r"mp_rank_(.+)_model_states", path.name).group(1)
    try:
        os.link(path, path.with_name(pattern.format(rank)))
    except OSError:  # a file system without links
        shutil.copy2(path, path.with_name(pattern.format(rank)))


def _load(path: Path) -> dict:
    """Return the content of a trusted file; tensors are mapped."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _save(entries: dict, path: Path) -> None:
    """Replace a file; tensors may still be mapped from the old one."""
    part = path.with_suffix(".part")
    torch.save(entries, part)
    part.replace(path)


def _numbers(path: Path) -> list:
    """Return a key that sorts numbers in names numerically, as DeepSpeed does."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]
