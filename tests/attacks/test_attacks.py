# SPDX-License-Identifier: Apache-2.0
"""Hostile folders, commands on them, and the answers that zero8 gives.

Each attack begins with the same scene: a folder `outside`, which no command may change; `tags` with
two sealed tags; `loose/t1`, a checkpoint without a manifest.  A command runs in a fork: a crash or
a hang is the fork's alone.  It must not print a traceback.

A pickle can stand before the zip, or in a record DATA.PKL beside data.pkl: torch decides by the
first four bytes whether a file is a zip, and looks up records without regard to case.  Whoever
opens a pipe that nobody writes to waits for ever, and /dev/zero has no end.  Names of files that
zero8 is about to write are known beforehand, so whoever may write in a shared folder can plant a
link there to a file of another user.  A manifest with any sequence number is easily written: a tag
that is not whole must not count among those to keep, and without a readable `latest` nobody knows
what may be deleted.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import xxhash
from crafted import CHUNK, FILES, GOOD_FILES, METADATA, STEP, Call, metadata, rezipped
from forks import Forks
from places import GOLDEN

from zero8.files.atomic import TEMPORARY
from zero8.files.manifest import MANIFEST, MARKER, File, Manifest
from zero8.files.tags import LOCK, seal

IMPORTS = """
import torch
from zero8 import cli
from zero8.checkpoint.commands import command
from zero8.files import tagged
torch.set_num_threads(1)  # a pool of threads would not survive a fork
"""
RUN = """
import os, sys
from zero8 import cli
os.chdir(sys.argv.pop(1))
sys.exit(cli.main(["checkpoint", *sys.argv[1:]]))
"""
IN_BLOCK = "in the block of saving"
SAVE = f"""
import os, sys
from zero8.files import tagged
os.chdir(sys.argv[1])
try:
    with tagged.saving("tags", sys.argv[3], keep=1) as tag:
        print({IN_BLOCK!r}, flush=True)
        (tag / "states").write_bytes(b"new")
except (OSError, ValueError) as error:
    sys.exit(f"Error: {{error}}")
"""
PRUNE, SEAL = "prune tags --keep 1", "seal loose/t1"
BOTH = ("tags/t1", "tags/t2")
TAG = "step3"
RANK, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"
CODE = pickle.dumps(Call(os.system, "touch outside/ran"), 2)


class Attack(NamedTuple):
    """What is planted in the scene, a command there, its status, what it says and what stays."""

    name: str
    plant: Callable[[Path], object]
    command: str
    status: int
    says: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()


# --- The scene, and what is planted --------------------------------------------------------------


def scene(at: Path) -> None:
    write("outside/precious", b"precious\n")(at)
    files = {".metadata": metadata(), "__0_0.distcp": CHUNK, "step.distcp": STEP}
    for tag in ("tags/t1", "tags/t2", "loose/t1"):
        for name, data in files.items():
            write(f"{tag}/{name}", data)(at)
    seal(at / "tags" / "t1")
    seal(at / "tags" / "t2")


def write(path: str, data: bytes):
    def plant(at: Path) -> None:
        (at / path).parent.mkdir(parents=True, exist_ok=True)
        (at / path).write_bytes(data)

    return plant


def instead(path: str, make: Callable[[Path], object]):
    """Return what puts something in the place of a file."""

    def plant(at: Path) -> None:
        (at / path).parent.mkdir(exist_ok=True)
        (at / path).unlink(missing_ok=True)
        make(at / path)

    return plant


def link(path: str, make=os.symlink):
    """Return what plants a link to a precious file."""
    return lambda at: make(at / "outside" / "precious", at / path)


def pipe(path: str):
    return instead(path, os.mkfifo)


def both(*plants):
    return lambda at: [plant(at) for plant in plants]


def listing(file: File, plant=lambda at: None):
    """Return what lists one more file in the manifest of t1."""

    def listed(at: Path) -> None:
        tag = at / "tags" / "t1"
        plant(at)
        Manifest.of(1, 0, [*Manifest.read(tag).files, file]).write(tag)

    return listed


def moved_outside(path: str):
    """Return what moves something outside, and leaves a link to it."""

    def plant(at: Path) -> None:
        (at / path).rename(at / "outside" / "moved")
        (at / path).symlink_to(at / "outside" / "moved")

    return plant


def newest(spoil):
    """Return what plants a tag that is newer than all others, and spoiled."""

    def plant(at: Path) -> None:
        shutil.copytree(at / "tags" / "t1", planted := at / "tags" / "planted")
        Manifest.of(99, 0, Manifest.read(planted).files).write(planted)
        spoil(planted / "__0_0.distcp")

    return plant


def of_no_files(at: Path) -> None:
    (at / "tags" / "planted").mkdir()
    Manifest.of(2**52, 0, []).write(at / "tags" / "planted")


def zero(at: Path) -> None:
    shutil.copytree(GOLDEN / "zero2_checkpoint", at / "zero")


def with_code(name: str, spoiled: Callable[[bytes], bytes]):
    """Return what spoils a file of a checkpoint of ZeRO-2."""

    def plant(at: Path) -> None:
        zero(at)
        path = at / "zero" / TAG / name
        path.write_bytes(spoiled(path.read_bytes()))

    return plant


def spoiled_record(name: str):
    return lambda data: rezipped(data, {name: CODE})


def behind_a_link(at: Path) -> None:
    zero(at)
    (at / "zero" / TAG).rename(at / "outside" / TAG)
    (at / "zero" / "in").symlink_to(at / "outside")
    (at / "zero" / "latest").write_text(f"in/{TAG}")


def parameter_called(name: str):
    """Return what saves a parameter; a universal checkpoint has a folder that is called as it."""

    def plant(at: Path) -> None:
        moments = {which: torch.ones(4, 64) for which in ("exp_avg", "exp_avg_sq")}
        group = {"params": [0], "param_names": [name]}
        optimizer = {"state": {0: {"step": 1, **moments}}, "param_groups": [group]}
        torch.save({"model": {name: torch.ones(4, 64)}, "optimizer": optimizer}, at / "crafted")

    return plant


INTERRUPTED = both(
    write(f"loose/t1/{MARKER}", b'{"sequence": 1, "note": ""}'),
    lambda at: (at / "loose/t1/__0_0.distcp").unlink(),
)
HASH_OF_NOTHING, LONG = xxhash.xxh3_128_hexdigest(b""), "x" * 300
PRECIOUS = File("sub/precious", 9, xxhash.xxh3_128_hexdigest(b"precious\n"), 0)


# --- The table -----------------------------------------------------------------------------------

OF_COMMANDS_THAT_WRITE = [
    Attack("link as the new manifest", link(f"loose/t1/.{MANIFEST}{TEMPORARY}"), SEAL, 0),
    Attack("link as the new marker", link(f"tags/t1/.{MARKER}{TEMPORARY}"), PRUNE, 0),
    Attack("link as the new latest", link(f"tags/.latest{TEMPORARY}"), "save t3", 0),
    *(
        Attack(
            f"{make.__name__} for lock, {line}", link(f"tags/{LOCK}", make), line, status, (LOCK,)
        )
        for make in (os.symlink, os.link)
        for line, status in ((PRUNE, 2), ("save t3", 1))
    ),
    Attack(
        "listed file behind a link",
        listing(PRECIOUS, lambda at: (at / "tags/t1/sub").symlink_to(at / "outside")),
        "save t1",
        1,
        ("sub",),
    ),
    Attack("tag that is a link", moved_outside("tags/t1"), "save t1", 1, ("t1",)),
    Attack(
        "unsealed tag that is a link",
        both(lambda at: (at / "tags/t1" / MANIFEST).unlink(), moved_outside("tags/t1")),
        "save t1",
        1,
        ("t1",),
    ),
    *(
        Attack(f"planted tag, {name}", newest(spoil), PRUNE, 0, stays=("tags/t2",))
        for name, spoil in (
            ("without its file", Path.unlink),
            ("with a short file", lambda path: path.write_bytes(b"short")),
        )
    ),
    Attack(
        "planted tag of no files",
        of_no_files,
        "prune tags --keep 2",
        0,
        ("deleted nothing",),
        BOTH,
    ),
    *(
        Attack(f"latest of {text!r}", write("tags/latest", text), PRUNE, status, says, BOTH)
        for texts, status, says in (
            ((b"t1/", b"./t1"), 0, ()),
            ((b"\xff", b"../x", b"", b"t1\0"), 2, ("latest", "damaged")),
        )
        for text in texts
    ),
    # With a manifest it would pass as complete, and prune would delete whole tags for it.
    Attack("interrupted save", INTERRUPTED, SEAL, 2, ("incomplete", "--force"), ("loose/t1",)),
    Attack("interrupted save, by force", INTERRUPTED, "seal --force loose/t1", 0),
    Attack("pipe in a folder to seal", pipe("loose/t1/a_pipe"), SEAL, 2, ("a_pipe",)),
    Attack("pipe as a manifest beside", pipe(f"loose/planted/{MANIFEST}"), SEAL, 0),
]
OF_COMMANDS_THAT_READ = [
    *(
        Attack(
            f"code in {name} {where}",
            with_code(name, spoiled),
            "convert zero made --to zero",
            2 * is_refused,
            (name,) if is_refused else (),
        )
        for name, where, spoiled, is_refused in (
            *((name, "before the zip", lambda data: CODE + data, True) for name in (RANK, MODEL)),
            *((name, "in its place", spoiled_record("data.pkl"), True) for name in (RANK, MODEL)),
            (RANK, "in other letters", spoiled_record("DATA.PKL"), False),
            (MODEL, "in other letters", spoiled_record("DATA.PKL"), True),
        )
    ),
    *(
        Attack(
            f"parameter {name}",
            parameter_called(name),
            "convert crafted made --to zero",
            2,
            ("which cannot name a folder",),
        )
        for name in ("../../../../outside/evil", "/tmp/evil", "..")
    ),
    Attack("tag behind a link", behind_a_link, "convert zero made --to zero", 2, (f"in/{TAG}",)),
    *(
        Attack(
            f"{name} as manifest",
            instead(f"tags/t1/{MANIFEST}", make),
            "verify tags/t1",
            1,
            (MANIFEST,),
        )
        for name, make in (
            ("folder", Path.mkdir),
            ("link to itself", lambda path: path.symlink_to(MANIFEST)),
            ("link to a device", lambda path: path.symlink_to("/dev/zero")),
        )
    ),
    *(
        Attack(f"listed {name}", plant, "verify tags/t1", 1, says)
        for name, plant, says in (
            ("name of 300 letters", listing(File(LONG, 1, "0" * 32, 0)), (LONG[:100],)),
            ("link", moved_outside("tags/t1/__0_0.distcp"), ("__0_0.distcp", "link")),
            ("pipe", pipe("tags/t1/__0_0.distcp"), ("__0_0.distcp",)),
            (
                "pipe of 0 bytes",
                listing(File("pipe", 0, HASH_OF_NOTHING, 0), pipe("tags/t1/pipe")),
                ("pipe",),
            ),
        )
    ),
    *(
        Attack(f"pipe as {name}", pipe(f"loose/t1/{name}"), "verify loose/t1", 1, says)
        for name, says in ((MANIFEST, (MANIFEST,)), (MARKER, ()), (".metadata", (".metadata",)))
    ),
    *(  # which are looked for where there is no .metadata
        Attack(f"pipe as {name}", pipe(f"pipes/{name}"), "verify pipes", 1, (name,))
        for name in ("latest", RANK)
    ),
    Attack(
        "tags for ever",
        both(write("ever/latest", b"tag"), lambda at: (at / "ever/tag").symlink_to(".")),
        "convert ever made --to plain",
        2,
        ("ever",),
    ),
    *(
        Attack(
            f"file: {name}",
            lambda at, make=make: write("crafted", make())(at),
            "convert crafted made --to plain",
            2 * (name not in GOOD_FILES),
            () if name in GOOD_FILES else ("crafted",),
        )
        for name, make in (FILES | GOOD_FILES | {"code": lambda: CODE}).items()
    ),
    *(
        Attack(
            f"metadata: {name}",
            lambda at, make=make: both(pipe("loose/t1/pipe"), write("loose/t1/.metadata", make()))(
                at
            ),
            "verify loose/t1",
            int(name != "good"),
            ("loose/t1",),
        )
        for name, make in (METADATA | {"good": metadata, "code": lambda: CODE}).items()
    ),
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    forks = Forks(tmp_path_factory.mktemp("attacks"), before=IMPORTS)
    forks.run("")  # the imports are not in the first attack's time limit
    yield forks
    forks.close()


def contents(path: Path) -> dict[str, object]:
    """Return what there is at a path: folders, links, and files with their contents."""
    found: dict[str, object] = {}
    for one in [path, *sorted(path.rglob("*"))]:
        name = str(one.relative_to(path))
        if one.is_symlink():
            found[name] = one.readlink()
        elif one.is_file():
            found[name] = one.read_bytes()
        else:
            found[name] = "another kind" if one.exists() and not one.is_dir() else one.is_dir()
    return found


@pytest.mark.parametrize(
    "attack", OF_COMMANDS_THAT_WRITE + OF_COMMANDS_THAT_READ, ids=lambda attack: attack.name
)
def test_hostile_folder_gets_the_expected_answer(attack, commands, tmp_path):
    scene(tmp_path)
    attack.plant(tmp_path)
    before = {name: contents(tmp_path / name) for name in ("outside", *attack.stays)}
    words = attack.command.split()
    done = commands.run(SAVE if words[0] == "save" else RUN, str(tmp_path), *words, seconds=10)
    text = done.stdout + done.stderr
    assert {name: contents(tmp_path / name) for name in before} == before, text
    assert done.returncode == attack.status and "Traceback" not in text, text
    assert all(part in text for part in attack.says), text
    assert (IN_BLOCK in text) == (words[0] == "save" and attack.status == 0)
