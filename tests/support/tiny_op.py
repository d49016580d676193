# SPDX-License-Identifier: Apache-2.0
"""An op of DeepSpeed's kind that compiles in a second.

As a script: `tiny_op.py FOLDER` loads it from the sources in a folder and prints its number.
"""

import sys

from deepspeed.ops.op_builder.builder import OpBuilder

import zero8  # noqa: F401 - fits into DeepSpeed

SOURCE = """
#include <Python.h>
#include "number.h"
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "number", NUMBER);
  return module;
}
"""


class TinyBuilder(OpBuilder):
    """Builds `SOURCE`, from the file tiny.cpp."""

    BUILD_VAR, NAME = "DS_BUILD_TINY", "tiny"
    flags = ()

    def __init__(self, folder):
        super().__init__(name=self.NAME)
        self.folder = folder

    def absolute_name(self):
        return "deepspeed.ops.tiny_op"

    def sources(self):
        return [f"{self.folder}/tiny.cpp"]

    def include_paths(self):
        return [self.folder]

    def cxx_args(self):
        return list(self.flags)


if __name__ == "__main__":
    print(TinyBuilder(sys.argv[1]).load().number)
