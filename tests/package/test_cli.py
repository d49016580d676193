# SPDX-License-Identifier: Apache-2.0
import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from zero8 import doctor
from zero8.deepspeed import seams


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
    patched = dict.fromkeys(seam.label for seam in seams.SEAMS if seam.without)
    assert list(report["deepspeed"]["seams"]) == list(patched)
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


def test_doctor_seam_missing_is_a_problem_and_the_others_are_left_alone(monkeypatch):
    supported = [torch.optim.Adam]
    monkeypatch.setattr("deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS", supported)
    monkeypatch.delattr("deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check")
    report = doctor.examine()
    assert report["usable"] is False
    assert report["deepspeed"]["seams"]["DeepSpeedEngine._do_optimizer_sanity_check"] == "missing"
    assert report["deepspeed"]["seams"]["ZERO_SUPPORTED_OPTIMIZERS"] == "present"
    assert report["deepspeed"]["seams"]["ALL_OPS"] == "installed"  # by the import of deepspeed
    assert "_do_optimizer_sanity_check" in doctor.as_text(report)


def test_doctor_broken_deepspeed_is_a_problem_and_not_called_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # the import names deepspeed: absent
    assert doctor.examine()["problems"] == []
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", None)
    report = doctor.examine()
    (problem,) = report["problems"]
    assert problem.startswith("deepspeed: ModuleNotFoundError: import of deepspeed.accelerator")
    assert "not installed" not in doctor.as_text(report)


@pytest.mark.parametrize(
    ("offload", "conf", "found"),
    [
        ({"device": "cpu"}, "", {"max_round_mib": None}),
        ({"device": "cpu"}, "pinned_max_round_threshold_mb:64", {"max_round_mib": 64}),
        ({"device": "cpu", "pin_memory": False}, "", None),
        ({"device": "none"}, "", None),
    ],
)
def test_doctor_of_a_config_warns_where_torch_rounds_up_what_it_page_locks(
    tmp_path, monkeypatch, offload, conf, found
):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", conf)
    section = {"zero_optimization": {"offload_optimizer": offload}}
    (config := tmp_path / "ds.json").write_text(json.dumps(section))
    report = doctor.examine(config)
    assert report["page_locked"] == found
    warned = [text for text in report["warnings"] if "PYTORCH_ALLOC_CONF" in text]
    assert len(warned) == (found == {"max_round_mib": None})
