# SPDX-License-Identifier: Apache-2.0
"""The source of an extension that compiles in a second; the header number.h has its number."""

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
