# SPDX-License-Identifier: Apache-2.0
"""A test whose packages are missing is skipped outside CI, and fails in CI."""

import sys

import needs
import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from zero8.op import cuda_compile

NEEDS = {
    "nvcc": (needs.need_nvcc, "no nvcc"),
    "nvrtc": (needs.need_nvrtc, "no NVRTC"),
    "nvme": (needs.need_nvme, "libaio-dev"),
    "aarch64": (needs.need_aarch64, "qemu-user"),
}


@pytest.fixture
def bare(monkeypatch):
    """A machine without any of these, whose DeepSpeed must not be asked to build them."""
    monkeypatch.setattr(cuda_compile, "nvcc", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setattr(AsyncIOBuilder, "has_function", lambda *_: False)
    monkeypatch.setattr(AsyncIOBuilder, "jit_load", lambda *_: pytest.exit("built without libaio"))
    monkeypatch.setattr(needs, "AARCH64_EMULATOR", "no-emulator-of-that-name")


@pytest.mark.parametrize("ci", [None, "", "false"])
@pytest.mark.parametrize(("need", "reason"), NEEDS.values(), ids=NEEDS)
def test_outside_ci_what_is_missing_skips_the_test_with_the_reason(
    bare, monkeypatch, need, reason, ci
):
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match=reason):
        need()


@pytest.mark.parametrize(("need", "reason"), NEEDS.values(), ids=NEEDS)
def test_in_ci_what_is_missing_fails_the_test_with_the_reason(bare, monkeypatch, need, reason):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=reason):
        need()


@pytest.mark.parametrize("ci", ["", "true"])
def test_what_is_there_lets_the_test_run(monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    needs.need(None)
