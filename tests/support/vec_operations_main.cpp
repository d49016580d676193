// SPDX-License-Identifier: Apache-2.0
// vec_operations.cpp as a program, for processors that are emulated.
#include <cstdio>

extern "C" const char* compared_operations();

int main() { std::fputs(compared_operations(), stdout); }
