# SPDX-License-Identifier: Apache-2.0
"""Saving through DeepSpeed's engine, so that an incomplete checkpoint can be recognized.

The tag is marked incomplete first.  DeepSpeed writes its files; every rank records, syncs and
hashes its own; then rank 0 writes the manifest and then `latest`.  A failure of one rank raises
OSError on all, and `latest` is unchanged.
"""

import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from torch import distributed

from zero8.deepspeed.layout import is_part
from zero8.deepspeed.seam import replaced
from zero8.deepspeed.settings import EngineSettings
from zero8.environment.ranks import from_rank_0, gathered
from zero8.files import tags
from zero8.files.atomic import sync_folder
from zero8.files.manifest import File, Manifest
from zero8.state.tell import logger, tell_once

VISIBLE_WITHIN_S = 5.0
"""How long a file of rank 0 may take to become visible to others on a shared file system."""


def reason_not_covered(engine) -> str:
    """Return why an engine's checkpoints get no manifest, "" if they do."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    if engine.use_node_local_storage():
        return "they are on disks of single nodes (use_node_local_storage)"
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        return f"{type(engine.checkpoint_engine).__name__} writes them in another way"
    return ""


def tell_not_covered(reason: str) -> None:
    """Log once that checkpoints have no manifest, and why."""
    tell_once(f"DeepSpeed saves and loads checkpoints without a manifest: {reason}")


def save(engine, original: Callable, options: dict) -> bool:
    """Save a checkpoint by the engine's own method; every rank must call it.

    Raises on all ranks: OSError, naming file and rank, if one could not write, or if another
    process saves into the folder; ValueError if two of them have written the same file.
    """
    tag = options.get("tag")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    reason = reason_not_covered(engine)
    if not reason and len(set(gathered(tag))) > 1:
        reason = f"ranks save different tags, '{tag}' among them"
    if reason:
        tell_not_covered(reason)
        return original(engine, **options)
    save_dir = Path(options["save_dir"])
    folder = save_dir / tag
    with ExitStack() as stack:
        sequence, token = from_rank_0(partial(_begin, stack, save_dir, tag))
        if not all(gathered(_sees(folder, token))):
            tell_not_covered(f"not all ranks see the files of rank 0 in {folder}")
            from_rank_0(partial(tags.abandon, folder))
            return original(engine, **options)
        record = _Record(engine, folder)
        record.run(original, options | {"tag": tag, "save_latest": False})
        _write_manifest(folder, sequence, record)
        if options.get("save_latest", True):
            from_rank_0(partial(tags.write_latest, save_dir, tag))
        from_rank_0(partial(_prune, engine, save_dir))
    return True


class _Record:
    """The files that a rank has written during a save, and its first error."""

    def __init__(self, engine, folder: Path):
        self.error: Exception | None = None
        self.text = ""
        self._engine, self._folder, self._paths = engine, folder, set()
        self._has_written = False

    def run(self, original: Callable, options: dict) -> None:
        """Have DeepSpeed save; a rank that fails still takes part in the save's collectives."""
        engine, write = self._engine, self._engine.checkpoint_engine.save
        before = engine._optimizer_has_ckpt_event_epilogue

        def asked() -> bool:
            self._has_written = True
            return before()

        with (
            replaced(engine.checkpoint_engine, "save", self._wrapped(write)),
            replaced(engine, "_optimizer_has_ckpt_event_epilogue", asked),
        ):
            try:
                original(engine, **options)
            except Exception as error:
                if self._has_written:
                    raise  # collectives follow, whose errors all ranks get
                self._fail(error, self._folder)
                if before():
                    engine.optimizer.checkpoint_event_epilogue()
                distributed.barrier()

    def entries(self) -> list[File]:
        """Sync this rank's files to the disk; return their entries in the manifest."""
        rank, found, path = distributed.get_rank(), [], ""
        try:
            for path in sorted(self._paths):
                found.append(tags.file_entry(self._folder, path, rank))
            for parent in {Path(self._folder, path).parent for path in self._paths}:
                sync_folder(parent)
        except OSError as error:
            self._fail(error, self._folder / path)
        return found

    def _wrapped(self, save: Callable) -> Callable:
        def saved(state_dict, path):
            if self.error is not None:
                return
            try:
                save(state_dict, path)
            except Exception as error:  # for a full disk, torch's writer raises no OSError
                self._fail(error, Path(path))
                return
            if Path(path).is_relative_to(self._folder):
                self._paths.add(Path(path).relative_to(self._folder).as_posix())

        return saved

    def _fail(self, error: Exception, path: Path) -> None:
        if self.error is not None:
            return
        self.error = error
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, shutil.Error):  # of copytree: a list of (source, target, reason)
            _, path, reason = error.args[0][0]
        elif isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        self.text = f"{path}: {reason}"
        with suppress(OSError):
            self.text += f" ({shutil.disk_usage(self._folder).free:,} bytes are free there)"


def _begin(stack: ExitStack, save_dir: Path, tag: str) -> tuple[int, str]:
    """Take the lock and mark the tag incomplete; return its sequence number and a unique note."""
    save_dir.mkdir(parents=True, exist_ok=True)
    stack.enter_context(tags.locked(save_dir))
    sequence, token = tags.next_sequence(save_dir), uuid.uuid4().hex
    tags.begin(save_dir / tag, sequence, token, is_part)
    return sequence, token


def _sees(folder: Path, token: str) -> bool:
    """Return whether this rank sees the marker of rank 0: whether they share the folder."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while tags.note_of(folder) != token:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _write_manifest(folder: Path, sequence: int, record: _Record) -> None:
    """Make the tag complete, or raise on all ranks."""
    entries = record.entries()
    answers = gathered((entries, record.text))
    failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]
    if failed:
        message = f"save_checkpoint: {folder} is incomplete: " + "; ".join(failed)
        raise OSError(f"{message}; 'latest' is unchanged") from record.error

    files = [file for of_rank, _ in answers for file in of_rank]
    if len({file.path for file in files}) < len(files):
        raise ValueError(
            f"save_checkpoint: {folder} is incomplete: several ranks have written the same file. "
            "DeepSpeed numbers files by data-parallel rank: for sequence parallelism give "
            "`initialize` no mesh_param and no sequence_parallel_size, but an mpu, as "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp"
        )

    def complete() -> None:
        tags.end(folder, Manifest.of(sequence, len(answers), files))

    from_rank_0(complete)


def _prune(engine, save_dir: Path) -> None:
    keep = EngineSettings.of(engine._config._param_dict).keep_checkpoints
    if not keep:
        return
    try:
        deleted = tags.prune(save_dir, keep)
    except (OSError, ValueError) as error:  # the save itself has succeeded
        logger.warning("%s: cannot delete old checkpoints: %s", save_dir, error)
    else:
        if deleted:
            logger.info("%s: deleted old checkpoints %s", save_dir, ", ".join(deleted))
