// SPDX-License-Identifier: Apache-2.0
// What programs that are emulated get through standard input: numbers, and segments whose addresses
// are places in bytes that follow.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace piped {

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> x(count);
  if (std::fread(x.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::abort();
  return x;
}

// An address in `memory`, of which the field has the place; 0 is none.
template <class T>
void locate(T*& field, std::vector<char>& memory) {
  const auto place = reinterpret_cast<uint64_t>(field);
  field = place ? reinterpret_cast<T*>(memory.data() + place) : nullptr;
}

}  // namespace piped
