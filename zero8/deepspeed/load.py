# SPDX-License-Identifier: Apache-2.0
"""Loading through DeepSpeed's engine: verified first, and on all ranks or on none.

Before anything in the engine changes, the ranks agree on a tag, and each verifies its share of the
files.  That is one read of the checkpoint, which then is in the page cache.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import distributed

from zero8.deepspeed.layout import is_part, loads_states, reads
from zero8.deepspeed.mapped import MappedFiles
from zero8.deepspeed.parameters import compared
from zero8.deepspeed.save import reason_not_covered, tell_not_covered
from zero8.deepspeed.seam import replaced
from zero8.deepspeed.settings import SECTION, EngineSettings
from zero8.environment.ranks import from_rank_0, gathered, raise_together
from zero8.files import tags
from zero8.files.manifest import Damage, Manifest
from zero8.state.entries import param_states
from zero8.state.tell import logger, tell_once


@dataclass(frozen=True)
class _Choice:
    """A candidate for loading."""

    tag: str | None  # None if there is nothing to load
    manifest: Manifest | None = None  # if it is complete
    sequence: int = 0  # 0 if unknown
    problem: str = ""  # why it cannot be loaded, if a reason is known
    missing: bool = False


def load(engine, original: Callable, options: dict) -> tuple:
    """Load a checkpoint by the engine's own method; every rank must call it.

    Raises on all ranks, and has changed nothing then: ValueError for damaged or missing files,
    naming each and the rank that wrote it, for an incomplete tag, and for one of another world size
    or of other parameters; FileNotFoundError if there is no such tag.  After a load from a tag
    without a manifest ValueError says that the ranks have loaded different steps.
    """
    reason = reason_not_covered(engine)
    if not reason and len(set(gathered(options.get("tag")))) > 1:
        reason = f"ranks load different tags, {options.get('tag')!r} among them"
    if reason:
        tell_not_covered(reason)
        with compared(engine, options):
            return original(engine, **options)
    options = options | {"tag": _agreed_tag(engine, options)}
    with _weights_of_zero3(engine, options):
        return _load_together(engine, original, options)


@contextmanager
def _weights_of_zero3(engine, options: dict) -> Iterator[None]:
    """Have DeepSpeed load weights without states under ZeRO-3.

    It loads none with `load_module_only` alone, and without optimizer states it loads those of the
    tag that `latest` names.
    """
    from deepspeed.runtime import engine as engines

    read = engines.get_fp32_state_dict_from_zero_checkpoint
    is_zero3 = engine.zero_optimization_partition_weights() and not engine.has_moe_layers
    if is_zero3 and not loads_states(engine, options):
        options["load_optimizer_states"] = False
        engines.get_fp32_state_dict_from_zero_checkpoint = partial(read, tag=options["tag"])
    try:
        yield
    finally:
        engines.get_fp32_state_dict_from_zero_checkpoint = read


def _agreed_tag(engine, options: dict) -> str | None:
    """Return the tag to load, None if there is nothing to load."""
    load_dir, asked = Path(options["load_dir"]), options.get("tag")
    is_universal = engine.load_universal_checkpoint()
    latest = tags.LATEST_UNIVERSAL if is_universal else tags.LATEST
    settings = EngineSettings.of(engine._config._param_dict)
    may_replace = settings.load_previous_if_damaged and asked is None and not is_universal
    choice = from_rank_0(partial(_first_choice, load_dir, asked, latest))
    refused: list[_Choice] = []
    while True:
        _check_world_size(engine, load_dir, choice, options)
        problem = choice.problem or _damages(engine, load_dir, choice, options)
        if not problem:
            break
        refused.append(replace(choice, problem=problem))
        following = from_rank_0(partial(_choice_before, load_dir, refused)) if may_replace else None
        if following is None:
            raise _error(load_dir, refused, from_rank_0(partial(_others, load_dir, refused)))
        choice = following
    if refused and distributed.get_rank() == 0:
        problems = "\n".join(old.problem for old in refused)
        logger.warning("loading the checkpoint %s instead: %s", load_dir / choice.tag, problems)
    return choice.tag


def _first_choice(load_dir: Path, asked: str | None, latest: str) -> _Choice:
    tag = asked
    if asked is None:
        try:
            tag = tags.read_latest(load_dir, latest)
        except ValueError as error:
            return _Choice(None, problem=str(error))
    if tag is None:
        return _without_latest(load_dir, latest)
    return _choice_of(load_dir, str(tag))


def _without_latest(load_dir: Path, latest: str) -> _Choice:
    """Choose the newest complete tag of a folder that has no file `latest`."""
    found = tags.tags_in(load_dir) if load_dir.is_dir() and latest == tags.LATEST else []
    complete = [tag.name for tag in found if tag.state == tags.COMPLETE]
    if complete:
        tell_once(f"{load_dir} has no file '{latest}'; loading the newest complete, {complete[-1]}")
        return _choice_of(load_dir, complete[-1])
    for tag in found:
        if tag.state == tags.INCOMPLETE:
            logger.warning("%s is incomplete: saving it was interrupted", load_dir / tag.name)
    return _Choice(None)  # DeepSpeed reports that it is missing


def _choice_of(load_dir: Path, name: str) -> _Choice:
    folder = load_dir / name
    if not folder.is_dir():
        return _Choice(name, problem=f"{folder}: there is no such checkpoint", missing=True)
    tag = tags.tag_at(folder)
    choice = _Choice(name, sequence=tag.sequence)
    if tag.state == tags.INCOMPLETE:
        return replace(choice, problem=f"{folder} is incomplete: saving it was interrupted")
    if tag.state == tags.DAMAGED:
        return replace(choice, problem=f"{tag.problem} (written by rank 0)")
    if tag.state == tags.UNVERIFIED:
        is_universal = (folder / "zero").is_dir()
        why = "universal checkpoints have none" if is_universal else "it was saved without zero8"
        tell_once(f"{folder} is not verified: it has no manifest, as {why}")
        return choice
    return replace(choice, manifest=Manifest.read(folder))


def _choice_before(load_dir: Path, refused: list[_Choice]) -> _Choice | None:
    """Return the newest complete tag older than all refused ones."""
    oldest = min((old.sequence for old in refused if old.sequence), default=None)
    found = [
        name
        for name in _others(load_dir, refused)
        if oldest is None or tags.tag_at(load_dir / name).sequence <= oldest
    ]
    return _choice_of(load_dir, found[-1]) if found else None


def _others(load_dir: Path, refused: list[_Choice]) -> list[str]:
    names = {old.tag for old in refused}
    found = tags.complete_tags(load_dir) if load_dir.is_dir() else []
    return [tag.name for tag in found if tag.name not in names]


def _check_world_size(engine, load_dir: Path, choice: _Choice, options: dict) -> None:
    """Raise ValueError if optimizer states would be loaded that another world size saved."""
    if choice.manifest is None or not choice.manifest.world_size:
        return
    loads_parts = loads_states(engine, options) and engine.zero_optimization()
    if engine.load_universal_checkpoint():
        loads_parts = False
    saved_by, ranks = choice.manifest.world_size, distributed.get_world_size()
    if loads_parts and saved_by != ranks:
        raise ValueError(
            f"load_checkpoint: {load_dir / choice.tag} was saved by {saved_by} rank(s), this run "
            f"has {ranks}; for another number of ranks: "
            "zero8 checkpoint convert DIR OUT --to zero"
        )


def _damages(engine, load_dir: Path, choice: _Choice, options: dict) -> str:
    """Return the damages of a tag that all ranks together find, "" if there are none."""
    if choice.manifest is None:
        return ""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    folder, manifest = load_dir / choice.tag, choice.manifest
    try:
        is_read = partial(reads, engine, options)
        found = manifest.check(folder, (rank, ranks), is_part=is_part, is_read=is_read)
    except Exception as error:  # raising it on this rank alone would hang the others
        found = [Damage(".", rank, f"{type(error).__name__}: {error}")]
    damages = [damage for of_rank in gathered(found) for damage in of_rank]
    return f"{folder} is damaged:\n{tags.lines(damages)}" if damages else ""


def _error(load_dir: Path, refused: list[_Choice], others: list[str]) -> Exception:
    problems = "\n".join(old.problem for old in refused)
    remedy = "restore the files, or load another tag"
    if others:
        remedy += (
            f"; complete tags: {', '.join(others)}. To load the previous one automatically, set "
            f'"{SECTION}": {{"load_previous_if_damaged": true}} in the DeepSpeed config'
        )
    kind = FileNotFoundError if refused[0].missing else ValueError
    return kind(f"load_checkpoint: {problems}\nNothing has been loaded; {remedy}")


def _load_together(engine, original: Callable, options: dict) -> tuple:
    """Load; an error of one rank raises on all, before the load's collectives."""
    before = engine._optimizer_has_ckpt_event_epilogue
    what = f"load {Path(options['load_dir'])}, tag {options['tag']}"
    has_agreed = False

    def agree(error: Exception | None) -> None:
        nonlocal has_agreed
        if not has_agreed:
            has_agreed = True
            raise_together(error, f"{what} (the engine may hold a part of it: make a new one)")

    def asked() -> bool:
        agree(None)
        return before()

    files, mapped = engine.checkpoint_engine, MappedFiles()
    with (
        ExitStack() as stack,
        replaced(files, "load", partial(mapped.load, files.load)),
        replaced(engine, "_optimizer_has_ckpt_event_epilogue", asked),
        compared(engine, options),
    ):
        for kind in engine.basic_optimizer.kinds:
            adopted = partial(mapped.adopted, kind.adopted)
            stack.enter_context(replaced(kind, "adopted", adopted))
        try:
            result = original(engine, **options)
        except Exception as error:
            agree(error)
            raise
        agree(None)  # DeepSpeed returns early if it finds nothing to load
    _check_steps(engine, what)
    return result


def _check_steps(engine, what: str) -> None:
    """Raise ValueError on all ranks if they have loaded different steps.

    Without a manifest only this detects a file of another tag.
    """
    states = param_states(engine.basic_optimizer.state).values()
    own = [int(state["step"]) for state in states if "step" in state]
    steps = gathered(max(own, default=None))  # None on a rank that holds only padding
    if len(set(steps) - {None}) > 1:
        raise ValueError(
            f"{what}: the ranks have loaded different steps, rank by rank {steps}: some files are "
            "of another checkpoint. Load a tag whose files are all of one save, in a new engine"
        )
