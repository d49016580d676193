# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed op builder for our op, which gives it a row in ds_report."""

from deepspeed.ops.op_builder.builder import OpBuilder

from zero8.op import build, kernel


class Zero8AdamBuilder(OpBuilder):
    """The `zero8_adam` row of ds_report: the fused 8-bit step.

    `load` returns the binary of zero8's wheel, as DeepSpeed's builders do with ops that were
    compiled ahead (DS_BUILD_OPS), and else compiles it as `zero8.op.build` says.

    The CUDA kernel is not part of it: the first step on a GPU compiles that.  So training with
    offload needs no nvcc.
    """

    NAME = "zero8_adam"
    BUILD_VAR = "DS_BUILD_ZERO8_ADAM"

    def __init__(self):
        """Register under `NAME`."""
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        """Return the name of the module in a wheel."""
        return f"zero8.op.{build.NAME}"

    def sources(self) -> list[str]:
        """Return the absolute paths of the C++ sources."""
        return [str(path) for path in build.sources()]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the op is there or can be built; if not, `error_log` says why."""
        if build.library().is_file() or build.compiler():
            return True
        self.error_log = "zero8: no binary and no C++ compiler: install a wheel, or g++"
        if verbose:
            self.warning(self.error_log)
        return False

    def load(self, verbose: bool = False):
        """Return the op's module; raises as `zero8.op.build.load`."""
        return kernel.module()
