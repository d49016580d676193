# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.arm`: loops in traces, llvm-mca's numbers, the tables; on made-up input."""

import json

import pytest

from benchmarks.arm import command, measured, models, traces
from benchmarks.arm.machines import AVX2, NEON
from benchmarks.arm.report import markdown
from benchmarks.arm.targets import checks
from benchmarks.arm.traces import Trace
from zero8.bench.usage import UsageError

ARM_LISTING = """
0000000000400600 <_ZN5zero84neon4stepEv>:
  400600:      \tldr\tq0, [x0], #0x10
  400604:      \tfsqrt\tv1.4s, v0.4s
  400608:      \tmov\tx1, #0x4                // =4
  40060c:      \tb.ne\t0x400600 <_ZN5zero84neon4stepEv>
  400610:      \tfsqrt\ts1, s0
  400614:      \tret
"""
X86_LISTING = """
0000000000401000 <_ZN5zero84avx24stepEv>:
  401000:      \tvsqrtps\t%ymm0, %ymm1
  401004:      \tvmulps\t0x1000(%rip), %ymm1, %ymm2 # 0x402000 <_ZL1c>
  40100c:      \tvdivps\t%ymm1, %ymm0, %ymm2
  401010:      \tjne\t0x401000 <_ZN5zero84avx24stepEv>
  401012:      \tretq
"""
LOG = """
Trace 0: 0x7f0000000100 [0000000000000000/0000000000401fff/1040c0b3/00000201] main
Trace 0: 0x7f0000000140 [0000000000000000/0000000000401000/1040c0b3/00000201] step
Trace 0: 0x7f0000000180 [0000000000000000/0000000000401012/1040c0b3/00000201] step
cpu_io_recompile: something else
Trace 0: 0x7f00000001c0 [0000000000000000/0000000000402000/1040c0b3/00000201] main
"""


def test_arm_instructions_are_as_an_assembler_reads_them():
    arm, x86 = map(traces.instructions, (ARM_LISTING, X86_LISTING))
    assert list(arm.values()) == [
        "ldr q0, [x0], #0x10",
        "fsqrt v1.4s, v0.4s",
        "mov x1, #0x4",
        "b.ne label",
        "fsqrt s1, s0",
        "ret",
    ]
    assert x86[0x401004] == "vmulps 0x1000(%rip), %ymm1, %ymm2"
    assert x86[0x401010] == "jne label"


def test_arm_trace_of_a_step_ends_where_it_returns():
    executed = traces.executed_addresses(LOG.splitlines())
    assert executed == [0x401FFF, 0x401000, 0x401012, 0x402000]
    caller = range(0x401FF0, 0x402010)
    assert traces.of_function(executed, 0x401000, caller) == [0x401000, 0x401012]


@pytest.mark.parametrize(
    ("listing", "machine", "loop"),
    [(ARM_LISTING, NEON, range(0x400600, 0x400610, 4)),
     (X86_LISTING, AVX2, (0x401000, 0x401004, 0x40100C, 0x401010))],
)  # fmt: skip
def test_arm_loop_is_what_occurs_most_often_between_every_fourth_root(listing, machine, loop):
    texts = traces.instructions(listing)
    others = [pc for pc in texts if pc not in loop]
    # Chunks of four vectors; after the fourth one something else comes in.
    trace = Trace([*others, *4 * (4 * list(loop)), *others, *3 * (4 * list(loop))], texts)
    found = trace.loop(machine.root)
    assert len(found.addresses) == 4 * len(loop)
    assert set(found.addresses) == set(loop)
    assert found.share == pytest.approx(5 / 6)
    assert [text for text in trace.lines(found.addresses) if machine.root.match(text)] == 4 * [
        texts[found.addresses[0]]
    ]


def test_arm_loop_that_a_trace_does_not_have_is_an_error():
    texts = traces.instructions(ARM_LISTING)
    with pytest.raises(ValueError, match="expected 5 instructions like fdiv"):
        Trace(list(texts), texts).loop(NEON.division)


def said(iterations: int, cycles: int) -> dict:
    """Return what llvm-mca says of two instructions, of which a unit has a NUL in its name."""
    usage = [(0, 0, 4.5), (1, 1, 0.5), (2, 0, 4.5), (2, 1, 0.5)]
    return {
        "CodeRegions": [
            {
                "Instructions": ["fsqrt v0.4s, v1.4s", "fmul v2.4s, v0.4s, v1.4s"],
                "ResourcePressureView": {
                    "ResourcePressureInfo": [
                        dict(InstructionIndex=i, ResourceIndex=unit, ResourceUsage=used)
                        for i, unit, used in usage
                    ]
                },
                "SummaryView": {
                    "BlockRThroughput": 4.5,
                    "Instructions": 2 * iterations,
                    "Iterations": iterations,
                    "TotalCycles": cycles,
                    "TotaluOps": 3 * iterations,
                },
            }
        ],
        "TargetInfo": {"Resources": ["V2UnitV.\x000", "V2UnitV1"]},
    }


def test_arm_cycles_are_those_of_the_steady_state():
    found = models.of_results(said(100, 510), said(200, 1010))
    assert found == models.Modelled(
        instructions=2, uops=3.0, cycles=5.0, least_cycles=4.5, busiest="V2UnitV.0", busy=0.9
    )


@pytest.mark.parametrize("version", ["Debian LLVM version 14.0.6", "something else"])
def test_arm_models_need_a_release_that_has_them(tmp_path, monkeypatch, version):
    tool = tmp_path / "llvm-mca"
    tool.write_text(f"#!/bin/sh\necho '{version}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("benchmarks.arm.machines.LLVM", "none")
    with pytest.raises(UsageError, match="expected at least 17.*neoverse-v2.*apt-get install"):
        models.check_models([NEON])


def made_up() -> dict:
    """Return a result of one codec and variant."""
    case = {"codec": "log", "variant": "fp32"}
    cycles = {"avx2": {"znver4": 2.0}, "neon": {"neoverse-v2": 4.0, "ampere1": 5.0}}
    modelled = dict(instructions=32, uops=32.0, least_cycles=8.0, busiest="V", busy=0.5, share=1.0)
    return {
        "command": "c", "seconds": 1.0, "cpu_seconds": 1.0, "commit": None, "cpu": "Zen",
        "versions": {}, "llvm": "LLVM 19", "clock": measured.CLOCK_METHOD,
        "traced": [{**case, "target": t, "instructions_per_param": 7.5} for t in cycles],
        "loops": [
            {**case, **modelled, "target": t, "model": model, "part": part, "params": 16,
             "cycles": 16 * each, "cycles_per_param": each}
            for t, of_models in cycles.items()
            for model, each in of_models.items()
            for part in ("square roots", "divisions", "block")
        ],
        "measured": [{**case, "ghz": 3.5, "ns_per_param": 1.0, "cycles_per_param": 3.5}],
    }  # fmt: skip


def test_arm_report_says_what_is_modelled_and_what_is_measured():
    result = made_up()
    result["checks"] = checks(result)
    assert [(check["value"], check["met"]) for check in result["checks"]] == [
        (2.0, True),
        (2.5, False),
    ]
    text = markdown(json.loads(json.dumps(result)))
    assert "| codec | params | instructions, avx2, emulated" in text
    assert "| log | fp32 | 7.5 | 7.5 | 2.00 | 4.00 | 5.00 | 3.50 | 1.000 |" in text
    assert "| log | fp32 | neon | divisions | ampere1 | 32 / 16 | 2.00 | 80.0 | 5.00 |" in text
    assert "| log | fp32 | neoverse-v2 | 2.00 | 1.14 | yes |" in text
    assert "| log | fp32 | ampere1 | 2.50 | 1.43 | **no** |" in text


@pytest.mark.parametrize("words", [["--codec", "lag"], ["--codec", ""]])
def test_arm_command_names_what_is_valid(tmp_path, capsys, words):
    with pytest.raises(SystemExit):
        command.main(["--json", str(tmp_path / "out.json"), *words])
    assert "--codec: got" in capsys.readouterr().err


def test_arm_command_refuses_scalar_code_that_has_no_model(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--json", str(tmp_path / "out.json"), "--scalar"])
    assert "--scalar: GCC makes vectors of the scalar loops" in capsys.readouterr().err
