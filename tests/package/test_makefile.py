# SPDX-License-Identifier: Apache-2.0
import os
import shutil
import subprocess
import sys

import pytest
from places import ROOT


def make(*arguments, folder=ROOT, **env):
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=os.environ | {"MAKEFLAGS": ""} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path):
    """What the set-up reads, and no .venv."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


class Machine:
    """Commands that take the place of this machine's; apt-get notes its arguments and fails."""

    def __init__(self, folder):
        self.folder, self.path = folder, f"{folder}:{os.environ['PATH']}"
        self.apt_log = folder / "apt.log"
        self.command("apt-get", f'echo "$*" >> "{self.apt_log}"; exit 1')

    def command(self, name, script):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def python3_that_refuses(self, code):
        """Make python3 this one, except that it fails at code that contains `code`."""
        self.command("python3", f'case "$*" in *{code}*) exit 1;; esac\nexec {sys.executable} "$@"')

    def apt_get_that_installs_a_compiler(self):
        script = f'echo "$*" >> "{self.apt_log}"\ncase "$*" in *g++*) '
        self.command("apt-get", f"{script}ln -sf /bin/true {self.folder}/no-such-c++;; esac")

    def user(self, number, sudo):
        """Be the user of this number, with a sudo that needs no password, or one that fails."""
        self.command("id", f"echo {number}")
        self.command("sudo", '[ "$1" = -n ] && shift && exec "$@"' if sudo else "exit 1")


@pytest.fixture
def machine(tmp_path):
    folder = tmp_path / "commands"
    folder.mkdir()
    return Machine(folder)


@pytest.mark.parametrize(
    ("refused", "package"), [("ensurepip", "python3-venv"), ("Python.h", "python3-dev")]
)
def test_setup_python_that_lacks_a_part_names_the_package(checkout, machine, refused, package):
    machine.python3_that_refuses(refused)
    done = make("setup", folder=checkout, PATH=machine.path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].endswith(f"apt-get install {package}")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(("user", "sudo"), [(0, False), (1000, True)])
def test_setup_installs_what_is_missing_and_says_so(checkout, machine, user, sudo):
    machine.user(user, sudo)
    machine.apt_get_that_installs_a_compiler()
    machine.python3_that_refuses("version_info")  # so that make stops after it
    done = make("setup", folder=checkout, CXX="no-such-c++", PATH=machine.path)
    assert "missing on this machine, now installed: g++" in done.stdout
    update, install = machine.apt_log.read_text().splitlines()
    assert update.startswith("update") and install.endswith("--no-install-recommends g++")
    assert done.stderr.startswith("zero8: expected Python 3.11 or newer")


def test_setup_by_a_user_who_may_not_install_names_the_package(checkout, machine):
    machine.user(1000, sudo=False)
    machine.apt_get_that_installs_a_compiler()
    done = make("setup", folder=checkout, CXX="no-such-c++", PATH=machine.path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].endswith("as root: apt-get install g++")
    assert not machine.apt_log.exists()


def test_setup_where_installing_fails_names_the_package(checkout, machine):
    machine.user(0, sudo=False)
    done = make("setup", folder=checkout, CXX="no-such-c++", PATH=machine.path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].endswith("as root: apt-get install g++")
    assert machine.apt_log.exists()


def test_setup_python_too_old_says_which_it_was(checkout, machine):
    machine.python3_that_refuses("version_info")
    done = make("setup", folder=checkout, PATH=machine.path)
    assert done.returncode != 0
    assert "expected Python 3.11 or newer, got Python 3." in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_path_with_a_space_is_refused_before_anything_is_installed(checkout):
    moved = checkout.rename(checkout.with_name("check out"))
    done = make("setup", folder=moved, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "got a path with a space" in done.stderr
    assert not (moved / ".venv").exists()
