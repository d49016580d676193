# SPDX-License-Identifier: Apache-2.0
"""The source of an op that compiles in seconds; the header number.h has its number."""

SOURCE = """
#include <Python.h>
#include "number.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_zero8_kernel() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "number", NUMBER);
  return module;
}
"""
