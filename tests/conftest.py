# SPDX-License-Identifier: Apache-2.0
"""What all tests share: hypothesis draws the same examples on every run and every machine."""

import fcntl
import os

import pytest
import torch
from doc_blocks import blocks_shown
from fake_cuda import FakeCuda
from forks import Forks
from host_kernel import Host
from hypothesis import settings
from places import TESTS
from ranks import ranks_of_sizes

settings.register_profile("zero8", derandomize=True, database=None, deadline=None)
settings.load_profile("zero8")


# Long files: a run ends with short ones, so that no core waits long for the other.
FIRST = ("fsdp", "kernel", "train", "zero")

# `make test-nightly` runs the slow tests of these: they compile or train for minutes, and what they
# guard changes seldom.
NIGHTLY = (
    "bench",
    "train",
    "checkpoint/test_mutations.py",
    "cuda/test_cuda_compile.py",
    "kernel/test_aarch64.py",
    "kernel/test_csrc.py",
    "kernel/test_sanitized.py",
    "kernel/test_thread_sanitizer.py",
    "package/test_doc_blocks.py",
    "package/test_examples.py",
    "package/test_numa.py",
    "package/test_wheel.py",
)


def pytest_collection_modifyitems(items):
    """Mark what is nightly or needs a GPU; put long files first."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
        path = item.path.relative_to(TESTS)
        if item.get_closest_marker("slow") and any(map(path.is_relative_to, NIGHTLY)):
            item.add_marker("nightly")
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in FIRST)


def pytest_generate_tests(metafunc):
    """Run a test that takes `block` for each block of the pages that its marks name."""
    if "block" in metafunc.fixturenames:
        blocks = blocks_shown(metafunc.definition)
        metafunc.parametrize("block", blocks, ids=lambda block: block.page)


@pytest.fixture
def blocks(request):
    """All blocks of the pages that a test's marks name."""
    return blocks_shown(request.node)


@pytest.fixture
def one_torch_thread():
    """Many small tensor operations are faster on one thread, on a busy machine above all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def standing_ranks(tmp_path_factory):
    """The ranks that all files share; see `ranks_of_sizes`."""
    with ranks_of_sizes(tmp_path_factory.mktemp) as of:
        yield of


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """A process that has imported torch, and therefore zero8, and nothing else; see `Forks`."""
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def host_kernel(tmp_path_factory):
    """The CUDA kernel, compiled for the host, once for all processes of the test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / "host_kernel.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Host(folder)


@pytest.fixture
def gpu(host_kernel, monkeypatch):
    """The CPU in the place of a GPU."""
    with FakeCuda(host_kernel.path, monkeypatch) as standin:
        yield standin
