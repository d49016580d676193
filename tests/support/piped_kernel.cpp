// SPDX-License-Identifier: Apache-2.0
// The kernel as a program, for processors that are emulated and for the thread sanitizer: standard
// input has what it is called with, and standard output what has become of it.  piped_kernel.py is
// the other end.
//
//   piped_kernel step TARGET         a step
//   piped_kernel operations TARGET   the operations of Vec that round
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "flush_to_zero.h"
#include "isa.h"

#define ZERO8_TARGET scalar
#include "vec_scalar.h"
#undef ZERO8_TARGET
#if defined(__aarch64__)
#define ZERO8_TARGET vectors
#include "vec_neon.h"
#endif

namespace {

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

template <class T>
void write(const std::vector<T>& x) {
  if (std::fwrite(x.data(), sizeof(T), x.size(), stdout) != x.size()) std::abort();
}

// The operations of Vec that round, of all triples.
template <class Vec>
void operations() {
  const int64_t count = read<int64_t>(1)[0];
  const auto a = read<float>(count), b = read<float>(count), c = read<float>(count);
  const auto each = [&](auto operation) {
    std::vector<float> results(count);
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      const int64_t left = count - i;
      const int n = left < Vec::kLanes ? static_cast<int>(left) : Vec::kLanes;
      const auto load = [&](const std::vector<float>& x) { return Vec::load_n(&x[i], n); };
      Vec::store_n(&results[i], operation(load(a), load(b), load(c)), n);
    }
    return results;
  };
  using F = typename Vec::F;
  std::vector<std::vector<float>> all;
  {
    const zero8::FlushToZero mode;
    all.push_back(each([](F x, F y, F) { return Vec::mul(x, y); }));
    all.push_back(each([](F x, F y, F z) { return Vec::fma(x, y, z); }));
    all.push_back(each([](F x, F y, F z) { return Vec::fms(x, y, z); }));
    all.push_back(each([](F x, F y, F) { return Vec::div(x, y); }));
    all.push_back(each([](F x, F, F) { return Vec::sqrt(x); }));
  }
  for (const auto& results : all) write(results);
}

const zero8::Isa& isa_named(const char* name) {
  for (int i = 0; i < zero8::kNumIsas; ++i) {
    const zero8::Isa& isa = zero8::kIsas[i];
    if (std::strcmp(isa.name, name) == 0 && isa.is_supported()) return isa;
  }
  std::abort();
}

// One step over all segments, in `memory`.
void step(const zero8::Isa& isa) {
  const auto sizes = read<int64_t>(4);
  auto segments = read<zero8::Segment>(sizes[0]);
  const auto scalars = read<zero8::StepScalars>(sizes[1]);
  const auto maps = read<zero8::CodecMaps>(1);
  auto memory = read<char>(sizes[2]);
  for (zero8::Segment& s : segments) {
    locate(s.param, memory);
    locate(s.grad, memory);
    for (zero8::Moment& moment : s.moments) {
      locate(moment.values, memory);
      locate(moment.scales, memory);
    }
    locate(s.correction, memory);
    locate(s.weight_sums, memory);
    locate(s.copy, memory);
    locate(s.row_scales, memory);
  }
  zero8::step(segments.data(), sizes[0], scalars.data(), maps[0], static_cast<int>(sizes[3]), isa);
  write(segments);
  write(memory);
}

}  // namespace

int main(int, char** arguments) {
  const char* const target = arguments[2];
  if (std::strcmp(arguments[1], "step") == 0) {
    step(isa_named(target));
    return 0;
  }
#if defined(__aarch64__)
  if (std::strcmp(target, "neon") == 0) {
    operations<zero8::vectors::Vec>();
    return 0;
  }
#endif
  operations<zero8::scalar::Vec>();
}
