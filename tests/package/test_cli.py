# SPDX-License-Identifier: Apache-2.0
import functools
import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from needs import need_nvcc, need_nvrtc

from zero8 import cli, doctor
from zero8.deepspeed import seams
from zero8.op import cuda_compile


@pytest.fixture
def zero8(forks):
    """Return a function that runs zero8's command line in a process of its own."""
    code = "import sys; from zero8 import cli; sys.exit(cli.main())"
    # Builds may compile for all instruction sets.
    return functools.partial(forks.run, code, seconds=280)


def test_command_whose_reader_stops_says_nothing_of_it():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zero8", "plan", "--parameters", "1B"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_json_on_a_good_machine_prints_one_object_and_exits_0(zero8):
    done = zero8("doctor", "--json", CXX=None, TORCH_DEVICE_BACKEND_AUTOLOAD=None)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["usable"] is True
    assert report["problems"] == []
    assert report["versions"]["deepspeed"]["fits"] is True
    assert report["op"]["used"] == report["op"]["instruction_sets"][-1]
    assert report["op"]["threads"] >= 1
    assert list(report["deepspeed"]["seams"]) == [
        seam.label for seam in seams.SEAMS if seam.without
    ]
    assert set(report["deepspeed"]["seams"].values()) == {"installed"}
    assert report["autoload"] == {"active": True, "reason": None}
    assert report["build_tools"]["compiler"].endswith("c++")


def test_doctor_without_compiler_exits_1_with_the_reason(zero8, tmp_path):
    done = zero8("doctor", PATH=str(tmp_path), CXX=None, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 1
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["usable"] == "no"
    assert "apt-get install g++" in lines["problem"]
    assert lines["compiler"] == "not found"


def test_doctor_autoload_switched_off_says_so(monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    report = doctor.examine()
    assert report["usable"] is True
    assert report["autoload"]["active"] is False
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in doctor.as_text(report)


def test_doctor_seam_missing_is_a_problem_and_the_others_are_left_alone(monkeypatch):
    supported = [torch.optim.Adam]
    monkeypatch.setattr("deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS", supported)
    monkeypatch.delattr("deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check")
    report = doctor.examine()
    assert report["usable"] is False
    assert report["deepspeed"]["seams"]["DeepSpeedEngine._do_optimizer_sanity_check"] == "missing"
    assert report["deepspeed"]["seams"]["ZERO_SUPPORTED_OPTIMIZERS"] == "present"
    assert report["deepspeed"]["seams"]["ALL_OPS"] == "installed"  # by the import of deepspeed
    assert any("_do_optimizer_sanity_check" in problem for problem in report["problems"])
    counted, line = seam_lines(doctor.as_text(report))
    count = len(report["deepspeed"]["seams"])
    assert counted.startswith(f"{count - 1} of {count} fit")
    assert "sanity_check: missing" in line
    assert line.endswith(f"(DeepSpeed {report['versions']['deepspeed']['installed']})")


def seam_lines(text):
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("seam")]


def test_doctor_counts_seams_and_lists_all_of_them_with_verbose(capsys):
    report = doctor.examine()
    count = len(report["deepspeed"]["seams"])
    (line,) = seam_lines(doctor.as_text(report))
    assert line.startswith(f"{count} of {count} fit DeepSpeed ")
    assert cli.main(["doctor", "--verbose"]) == 0
    printed = capsys.readouterr().out.splitlines()
    listed = [line.split(maxsplit=1)[1] for line in printed if line.startswith(doctor.FITTING)]
    assert [text.split(":")[0] for text in listed] == list(report["deepspeed"]["seams"])


def test_doctor_broken_deepspeed_is_a_problem_and_not_called_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # the import names deepspeed: absent
    assert doctor.examine()["problems"] == []
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", None)
    report = doctor.examine()
    (problem,) = report["problems"]
    assert problem.startswith("deepspeed: ModuleNotFoundError: import of deepspeed.accelerator")
    assert "not installed" not in doctor.as_text(report)


@pytest.mark.parametrize("found", [True, False])
def test_doctor_has_a_line_about_libaio_where_it_is_missing(monkeypatch, found):
    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self, verbose: found)
    report = doctor.examine()
    assert (report["usable"], report["deepspeed"]["libaio"]) == (True, found)
    lines = [line for line in doctor.as_text(report).splitlines() if "libaio" in line]
    assert [line.split()[0] for line in lines] == ([] if found else ["nvme"])


def test_doctor_untested_version_is_a_warning(monkeypatch):
    real = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "0.21.0" if name == "deepspeed" else real(name)
    )
    report = doctor.examine()
    assert report["usable"] is True
    assert report["versions"]["deepspeed"]["fits"] is False
    assert "0.21.0" in report["warnings"][0]
    assert "UNTESTED" in doctor.as_text(report)


def test_doctor_says_what_the_cuda_kernel_is_compiled_with_and_why(monkeypatch):
    need_nvcc()
    need_nvrtc()

    def line():
        text = doctor.as_text(doctor.examine())
        (found,) = [x for x in text.splitlines() if x.startswith("cuda kernel")]
        return found

    assert re.search(r"nvcc \d+\.\d+ compiles it .*\(nvcc comes before nvrtc\)", line())
    assert "Build" not in line()
    monkeypatch.setattr(cuda_compile, "nvcc", lambda: None)
    assert "nvrtc 13." in line() and "there is no nvcc" in line()
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert "cannot be compiled" in line() and "pip install 'zero8[cuda]'" in line()
    assert doctor.examine()["usable"] is True


def test_doctor_names_the_backend_that_the_environment_asks_for(monkeypatch):
    need_nvrtc()
    monkeypatch.setenv("ZERO8_CUDA_BACKEND", "nvrtc")
    assert doctor.examine()["cuda_kernel"]["reason"] == "ZERO8_CUDA_BACKEND selects it"
    monkeypatch.setenv("ZERO8_CUDA_BACKEND", "hip")
    found = doctor.examine()["cuda_kernel"]
    assert found["backend"] is None and "got 'hip', expected one of" in found["reason"]


@pytest.fixture
def two_gpus(monkeypatch):
    """A GPU that the kernel serves, and one that is too old."""
    found = [types.SimpleNamespace(name=f"GPU {k}", major=k, minor=0) for k in (9, 7)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)


def test_doctor_lists_gpus_and_warns_where_they_cannot_step(monkeypatch, two_gpus):
    lines = doctor.as_text(doctor.examine()).splitlines()
    assert [" ".join(line.split()) for line in lines if line.startswith("gpu")] == [
        "gpu GPU 9, compute capability 9.0",
        "gpu GPU 7, compute capability 7.0: NOT SERVED, keep parameters on the CPU",
    ]
    monkeypatch.setattr(cuda_compile, "nvcc", lambda: None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    report = doctor.examine()
    assert report["usable"] is True
    assert any("parameters on a GPU cannot step" in text for text in report["warnings"])


def test_doctor_part_that_fails_leaves_the_others(monkeypatch):
    def fail(report):
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_op", fail)
    report = doctor.examine()
    assert report["problems"] == ["op: OSError: no such thing"]
    assert report["deepspeed"]["accelerator"] is not None


def test_command_unknown_exits_2(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["nonsense"])
    assert caught.value.code == 2
    assert "usage: zero8" in capsys.readouterr().err
