// SPDX-License-Identifier: Apache-2.0
// The kernel as a program, for processors that are emulated: standard input has what it is called
// with, and standard output what has become of it.  piped_kernel.py is the other end.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "flush_to_zero.h"
#include "isa.h"

#define ZERO8_TARGET operations
#include "vec_scalar.h"

namespace {

using Vec = zero8::operations::Vec;

template <class T>
std::vector<T> read(int64_t count) {
  std::vector<T> x(count);
  if (std::fread(x.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) std::abort();
  return x;
}

template <class T>
void write(const std::vector<T>& x) {
  if (std::fwrite(x.data(), sizeof(T), x.size(), stdout) != x.size()) std::abort();
}

// The operations of Vec that round, of all triples.
void operations() {
  const int64_t count = read<int64_t>(1)[0];
  const std::vector<float> a = read<float>(count), b = read<float>(count), c = read<float>(count);
  std::vector<float> product(count), sum(count), difference(count), quotient(count), root(count);
  {
    const zero8::FlushToZero mode;
    for (int64_t i = 0; i < count; ++i) {
      product[i] = Vec::mul(a[i], b[i]);
      sum[i] = Vec::fma(a[i], b[i], c[i]);
      difference[i] = Vec::fms(a[i], b[i], c[i]);
      quotient[i] = Vec::div(a[i], b[i]);
      root[i] = Vec::sqrt(a[i]);
    }
  }
  for (const auto* results : {&product, &sum, &difference, &quotient, &root}) write(*results);
}

// An address in `memory`, of which the field has the place; 0 is none.
template <class T>
void locate(T*& field, std::vector<char>& memory) {
  const auto place = reinterpret_cast<uint64_t>(field);
  field = place ? reinterpret_cast<T*>(memory.data() + place) : nullptr;
}

// One step over all segments, in `memory`, on the fastest instruction set.
void step() {
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
  }
  const zero8::Isa* isa = zero8::kIsas + zero8::kNumIsas - 1;
  while (!isa->is_supported()) --isa;
  zero8::step(segments.data(), sizes[0], scalars.data(), maps[0], static_cast<int>(sizes[3]), *isa);
  write(segments);
  write(memory);
}

}  // namespace

int main(int, char** arguments) { std::strcmp(arguments[1], "step") == 0 ? step() : operations(); }
