# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any writer as tags of a folder, like DeepSpeed's: each is complete or invalid.

With torch.distributed.checkpoint, on all ranks, or in one process without torch.distributed:

    with tagged.saving(folder, "step400", keep=3) as tag:
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tag)

    if tag := tagged.newest(folder):
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tag)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zero8.environment.ranks import from_rank_0, raise_together
from zero8.files import tags
from zero8.files.manifest import paths_in


@contextmanager
def saving(folder: Path | str, name: str, keep: int = 0) -> Iterator[Path]:
    """Make a tag that becomes complete after the block has ended on all ranks.

    Rank 0 then reads its files once, writes their sizes and hashes into a manifest, and makes the
    folder's `latest` name the tag.  After an error or a kill the tag is incomplete and `latest`
    unchanged.  In the block, call `result()` of the future that `dcp.async_save` returns.

    Args:
        folder: the folder of the tags, shared by all ranks.
        name: the tag's name; an existing tag is replaced.
        keep: number of complete tags to keep, this one included; 0 keeps all.

    Raises:
        OSError, ValueError: on all ranks, if one of them has an error in the block; that rank
            raises its own.
        ValueError: on all ranks, if nothing or not everything was written; `latest` is unchanged.
            Before the block: if the tag is a symbolic link or contains one.
        OSError: on all ranks, before the block: if another job saves into the folder.
    """
    tag = Path(folder) / name
    with ExitStack() as stack:
        from_rank_0(lambda: _begin(tag, stack))
        error = None
        try:
            yield tag
        except Exception as raised:  # all ranks must raise
            error = raised
        raise_together(error, f"save {tag}")
        from_rank_0(lambda: _end(tag, keep))


def newest(folder: Path | str) -> Path | None:
    """Return the newest complete tag of a folder, the same on all ranks; None if it has none.

    Rank 0 reads the tag's files once.

    Raises:
        ValueError: on all ranks, if the tag is damaged: a file differs from its manifest.
    """
    return from_rank_0(lambda: _newest(Path(folder)))


def _begin(tag: Path, stack: ExitStack) -> None:
    tag.parent.mkdir(parents=True, exist_ok=True)
    stack.enter_context(tags.locked(tag.parent))
    tags.begin(tag, tags.next_sequence(tag.parent))


def _end(tag: Path, keep: int) -> None:
    _check_is_written(tag)
    tags.seal(tag, force=True)  # force: the tag has been marked as incomplete
    tags.write_latest(tag.parent, tag.name)
    if keep:
        tags.prune(tag.parent, keep)


def _check_is_written(tag: Path) -> None:
    paths = [tag / path for path in paths_in(tag)]
    # torch.distributed.checkpoint writes .metadata last.
    folders = {path.parent for path in paths if path.suffix == ".distcp"}
    under_way = sorted(str(one) for one in folders if not (one / ".metadata").is_file())
    if under_way or not paths:
        raise ValueError(
            f"saving {tag}: got {f'no .metadata in {under_way}' if paths else 'no files'} when the "
            "block ended, expected a complete checkpoint; in the block, call result() of the "
            "future that dcp.async_save returns"
        )


def _newest(folder: Path) -> Path | None:
    complete = tags.complete_tags(folder) if folder.is_dir() else []
    if not complete:
        return None
    tags.verify(folder / complete[-1].name)
    return folder / complete[-1].name
