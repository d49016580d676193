# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed op builder for our op, which gives it a row in ds_report."""

from deepspeed.ops.op_builder.builder import OpBuilder

from zero8.op import build, kernel


class Zero8AdamBuilder(OpBuilder):
    """The `zero8_adam` row of ds_report: the fused 8-bit step.

    `zero8.op.build` builds and loads the op, as without DeepSpeed.  DS_BUILD_* do not apply: they
    choose ops that are compiled into DeepSpeed's own package.  `zero8 build --into` builds ahead.

    The CUDA kernel is not part of it: the first step on a GPU compiles that.  So training with
    offload needs no nvcc.
    """

    NAME = "zero8_adam"
    BUILD_VAR = "DS_BUILD_ZERO8_ADAM"

    def __init__(self):
        """Register under `NAME`."""
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        """Return the name of a prebuilt module, which does not exist."""
        return f"zero8.op.{self.NAME}"

    def sources(self) -> list[str]:
        """Return the absolute paths of the C++ sources."""
        return [str(path) for path in build.sources()]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the op is built or can be; if not, `error_log` says what to install."""
        try:
            build.check_loadable()
        except RuntimeError as error:
            self.error_log = str(error)
            if verbose:
                self.warning(self.error_log)
            return False
        return True

    def load(self, verbose: bool = False):
        """Return the op's module, built on first use; raises as `zero8.op.build.load`."""
        return kernel.module()
