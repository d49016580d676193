# SPDX-License-Identifier: Apache-2.0
import os
import re
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
    ("target", "expected"),
    [
        ("train", "launch/local.sh"),
        ("bench", "-m benchmarks.step --json runs/bench_step.json"),
        ("fidelity", "-m benchmarks.fidelity --quick --json runs/fidelity_quick.json"),
        ("maps", "-m benchmarks.maps --json runs/maps.json"),
        ("gpu-check", "-m benchmarks.gpu_check"),
        ("test", '-m pytest -m "not slow and not multinode and not integrations"'),
        ("test-full", '-m pytest -m "slow and not nightly"'),
        ("test-full", "-m pytest tests/multinode -m multinode"),
        ("test-full", "-m pytest tests/integrations -m integrations"),
        ("lint", "ruff check"),
        ("lint", "ruff format --check"),
        ("lint", "-m mypy"),
        ("lint", "clang-format"),
        ("lint", "clang-tidy"),
        ("docs", "-m mkdocs build --strict"),
    ],
)
def test_target_dry_run_names_its_command(target, expected):
    done = make("-n", target)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.parametrize("target", ["bench", "fidelity", "maps"])
def test_measurement_writes_where_out_says(target):
    assert "--json there.json" in make("-n", target, OUT="there.json").stdout


def test_fidelity_with_full_runs_the_full_measurement():
    printed = make("-n", "fidelity", FULL="1").stdout
    assert "-m benchmarks.fidelity --json runs/fidelity_full.json" in printed


def test_gpu_check_installs_the_peers_or_with_a_python_that_has_all_nothing(checkout):
    assert ".[peers]" in make("-n", "gpu-check", folder=checkout).stdout
    done = make("-n", "gpu-check", "GPU_PYTHON=python3", folder=checkout)
    # Under another make there are lines on folders around it.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    assert lines == ["python3 -m benchmarks.gpu_check"]


def test_train_installs_torchao_for_int8_weights_alone(checkout):
    assert ".[torchao]" not in make("-n", "train", folder=checkout).stdout
    printed = make("-n", "train", "WEIGHTS=int8", folder=checkout).stdout
    places = [printed.index(x) for x in (".[train]", ".[torchao]", "launch/local.sh")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("target", "extra", "command"),
    [
        ("train", "train", "launch/local.sh"),
        ("test", "test", "-m pytest"),
        ("bench", "bench", "-m benchmarks.step"),
        ("fidelity", "bench", "-m benchmarks.fidelity"),
        ("maps", "bench", "-m benchmarks.maps"),
        ("lint", "dev", "ruff check"),
        ("docs", "docs", "mkdocs build"),
    ],
)
def test_target_in_a_fresh_checkout_installs_what_it_needs_first(checkout, target, extra, command):
    printed = make("-n", target, folder=checkout).stdout
    places = [printed.index(x) for x in ("-m venv .venv", f"-e '.[{extra}]'", command)]
    assert places == sorted(places)
    assert printed.count("-e '.[") == 1


def packages(key):
    """Return the names in one list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    content = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)[1]
    return {re.match(r"[\w-]+(\[\w+\])?", item)[0] for item in re.findall(r'"(.*?)"', content)}


def test_training_installs_no_tools_and_no_cuda():
    needed = {"torch", "numpy", "ninja", "packaging", "tabulate", "tqdm", "xxhash"}
    assert packages("dependencies") == needed
    assert packages("deepspeed") == {"deepspeed"}
    assert packages("train") == {"zero8[deepspeed]", "matplotlib", "py-cpuinfo", "tomli"}


def mark_installed(checkout, *extras):
    (checkout / ".venv").mkdir()
    for name in ("torch", *extras):
        (checkout / ".venv" / f".{name}").touch()


def test_setup_with_a_current_stamp_does_nothing(checkout):
    mark_installed(checkout, "dev")
    assert "pip install" not in make("-n", "lint", folder=checkout).stdout
    assert "pip install" in make("-n", "train", folder=checkout).stdout
    os.utime(checkout / "constraints.txt", (2**31 - 1, 2**31 - 1))
    assert "pip install" in make("-n", "lint", folder=checkout).stdout


def test_setup_serves_every_target_but_one(checkout):
    """CI installs once, and last of all what slows down whatever imports DeepSpeed."""
    mark_installed(checkout)
    done = make("setup", "VENV_PYTHON=true", folder=checkout)
    assert done.returncode == 0, done.stderr
    targets = "train", "test", "test-slow", "test-multinode", "bench", "fidelity", "maps", "lint"
    for target in (*targets, "docs"):
        assert "pip install" not in make("-n", target, folder=checkout).stdout, target
    assert "pip install" in make("-n", "test-integrations", folder=checkout).stdout


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
    assert done.stderr.startswith("zero8: expected Python 3.10 or newer")


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


def test_setup_asks_for_no_libaio():
    """Only NVMe needs it."""
    assert "libaio" not in (ROOT / "Makefile").read_text()


def test_setup_python_too_old_says_which_it_was(checkout, machine):
    machine.python3_that_refuses("version_info")
    done = make("setup", folder=checkout, PATH=machine.path)
    assert done.returncode != 0
    assert "expected Python 3.10 or newer, got Python 3." in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_path_with_a_space_is_refused_before_anything_is_installed(checkout):
    moved = checkout.rename(checkout.with_name("check out"))
    done = make("setup", folder=moved, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "got a path with a space" in done.stderr
    assert not (moved / ".venv").exists()
