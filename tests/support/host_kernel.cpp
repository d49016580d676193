// SPDX-License-Identifier: Apache-2.0
// The CUDA kernel on the host: its very source, every thread a fiber.
//
// Fibers run one at a time and stop where CUDA's threads meet (reductions over a warp, barriers),
// until all that have to be there are.  Threads that would wait forever on a GPU, or meet at
// different places, end the launch with an error.

// Some compilers define it by themselves: jumps to other stacks would then be errors.
#undef _FORTIFY_SOURCE

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __maxnreg__(count)

// By these CUDA moves bytes of any type.
struct __attribute__((may_alias)) uint2 {
  uint32_t x, y;
};
struct __attribute__((may_alias, aligned(16))) uint4 {
  uint32_t x, y, z, w;
};
struct uint3 {
  uint32_t x, y, z;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __int2float_rn(int32_t x) { return static_cast<float>(x); }
inline int32_t __float2int_rn(float x) { return static_cast<int32_t>(__builtin_rintf(x)); }
inline int32_t __float2int_rz(float x) { return x < 0x1p31f ? static_cast<int32_t>(x) : INT32_MAX; }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) {
  return (*p += x) - x;
}

namespace {

enum class Op { kNone, kMax, kMin, kAdd, kWarpBarrier, kNamedBarrier, kAllThreads };

// What a stopped fiber waits for: threads of its warp, or as many as come to the same barrier.
struct Meeting {
  Op op = Op::kNone;
  uint32_t mask_or_number = 0;
  uint32_t num_threads = 0;
  uint32_t value = 0;
};

// Runs a thread of one thread block after another.  `place` is where it goes on; one that has not
// begun, or has stopped before the end of a thread, begins at `start` with an empty stack.
struct Fiber {
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  uint3 index;
  Meeting meeting;
  bool begun = false, done = true;
};

constexpr size_t kStackBytes = 128 << 10;
constexpr int kWarp = 32;
constexpr int kMaxFibers = 1024;
jmp_buf scheduler;
std::vector<Fiber> fibers;
int num_fibers, running;
uint32_t at_barrier[16], in_warp[kMaxFibers / kWarp];  // fibers that wait there
void (*body)();

bool same(const Meeting& a, const Meeting& b) {
  return a.op == b.op && a.mask_or_number == b.mask_or_number && a.num_threads == b.num_threads;
}

// The fibers that meet where `self` does, those that are there already.
std::vector<int> present(int self) {
  const Meeting& meeting = fibers[self].meeting;
  const bool in_warp = meeting.op < Op::kNamedBarrier;
  const int begin = in_warp ? self / kWarp * kWarp : 0;
  const int end = in_warp ? begin + kWarp : num_fibers;
  std::vector<int> found;
  for (int i = begin; i < end && i < num_fibers; ++i) {
    const bool asked_for = !in_warp || meeting.mask_or_number >> (i - begin) & 1;
    if (asked_for && same(fibers[i].meeting, meeting)) found.push_back(i);
  }
  return found;
}

uint32_t combined(Op op, uint32_t a, uint32_t b) {
  if (op == Op::kMax) return a > b ? a : b;
  if (op == Op::kMin) return a < b ? a : b;
  return a + b;
}

// Goes on at `to`; returns when another jump goes on at `from`.  It leaves the mask of signals as
// it is: swapcontext calls the operating system for it, which takes longer than all else here.
void jump(jmp_buf& from, jmp_buf& to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

uint32_t meet(Meeting meeting) {
  const int self = running;
  fibers[self].meeting = meeting;
  // Only the last one to come looks who is there.
  uint32_t& come = meeting.op == Op::kAllThreads     ? at_barrier[0]
                   : meeting.op == Op::kNamedBarrier ? at_barrier[meeting.mask_or_number]
                                                     : in_warp[self / kWarp];
  ++come;
  std::vector<int> members;
  if (come >= meeting.num_threads) members = present(self);
  if (members.size() == meeting.num_threads && meeting.num_threads > 0) {
    come -= meeting.num_threads;
    uint32_t value = fibers[members[0]].meeting.value;
    for (size_t i = 1; i < members.size(); ++i) {
      value = combined(meeting.op, value, fibers[members[i]].meeting.value);
    }
    for (int i : members) fibers[i].meeting = {Op::kNone, 0, 0, value};
  } else {
    jump(fibers[self].place, scheduler);
  }
  return fibers[self].meeting.value;
}

uint32_t meet_in_warp(Op op, uint32_t mask, uint32_t value) {
  if (!(mask >> (running % kWarp) & 1)) {
    std::fprintf(stderr, "thread %d is not in its mask %08x\n", running, mask);
    std::abort();
  }
  return meet({op, mask, static_cast<uint32_t>(__builtin_popcount(mask)), value});
}

void start() {
  for (;;) {
    body();
    fibers[running].done = true;
    jump(fibers[running].place, scheduler);
  }
}

// Runs a fiber until it waits or is done.
void resume(Fiber& fiber) {
  if (fiber.begun) return jump(scheduler, fiber.place);
  fiber.begun = true;
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  ucontext_t context;
  getcontext(&context);
  context.uc_link = nullptr;
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, start, 0);
  if (_setjmp(scheduler) == 0) setcontext(&context);
}

}  // namespace

uint3 threadIdx, blockIdx, blockDim, gridDim;

inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
  return meet_in_warp(Op::kMax, mask, x);
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t x) {
  return meet_in_warp(Op::kMin, mask, x);
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t x) {
  return meet_in_warp(Op::kAdd, mask, x);
}
inline void __syncwarp(uint32_t mask) { meet_in_warp(Op::kWarpBarrier, mask, 0); }
inline void __syncthreads() { meet({Op::kAllThreads, 0, static_cast<uint32_t>(num_fibers), 0}); }

#include "cuda/step_kernel.h"

void zero8::cuda::named_barrier(uint32_t number, uint32_t num_threads) {
  meet({Op::kNamedBarrier, number, num_threads, 0});
}

namespace {

// Runs one thread block; false if its threads wait for each other in vain.
bool run_block(bool backwards) {
  for (int left = num_fibers; left > 0;) {
    bool moved = false;
    for (int k = 0; k < num_fibers; ++k) {
      running = backwards ? num_fibers - 1 - k : k;
      Fiber& fiber = fibers[running];
      if (fiber.done || fiber.meeting.op != Op::kNone) continue;
      threadIdx = fiber.index;
      resume(fiber);
      moved = true;
      left -= fiber.done;
    }
    if (!moved) return false;
  }
  return true;
}

struct Arguments {
  const zero8::Segment* segments;
  const int64_t* first_blocks;
  int64_t num_segments;
  const zero8::StepScalars* scalars;
  const zero8::CodecMaps* maps;
  unsigned long long* nonfinite_blocks;
} arguments;

struct Kernel {
  zero8::Algorithm algorithm;
  const char* name;
  decltype(zero8_step_adam)* run;
};
const Kernel kernels[] = {{zero8::kAdam, "zero8_step_adam", zero8_step_adam},
                          {zero8::kLion, "zero8_step_lion", zero8_step_lion},
                          {zero8::kSgd, "zero8_step_sgd", zero8_step_sgd},
                          {zero8::kAdemamix, "zero8_step_ademamix", zero8_step_ademamix}};
const Kernel* kernel;

void kernel_body() {
  const Arguments& a = arguments;
  kernel->run(a.segments, a.first_blocks, a.num_segments, a.scalars, a.maps, a.nonfinite_blocks);
}

}  // namespace

// Runs the kernel of the segments; the stream stands for the order in which threads run.  Returns 1
// if they wait for each other in vain.
extern "C" int zero8_step_launch(const zero8::Segment* segments, const int64_t* first_blocks,
                                 int64_t num_segments, const zero8::StepScalars* scalars,
                                 const zero8::CodecMaps* maps, unsigned long long* nonfinite_blocks,
                                 int team_threads, int teams, int grid, void* stream) {
  arguments = {segments, first_blocks, num_segments, scalars, maps, nonfinite_blocks};
  kernel = kernels;
  while (num_segments > 0 && kernel->algorithm != segments[0].algorithm) ++kernel;
  body = kernel_body;
  num_fibers = team_threads * teams;
  blockDim = {static_cast<uint32_t>(team_threads), static_cast<uint32_t>(teams), 1};
  gridDim = {static_cast<uint32_t>(grid), 1, 1};
  if (fibers.size() < static_cast<size_t>(num_fibers)) fibers.resize(num_fibers);
  for (int block = 0; block < grid; ++block) {
    blockIdx = {static_cast<uint32_t>(block), 0, 0};
    std::fill(std::begin(at_barrier), std::end(at_barrier), 0);
    std::fill(std::begin(in_warp), std::end(in_warp), 0);
    for (int i = 0; i < num_fibers; ++i) {
      Fiber& fiber = fibers[i];
      fiber.index = {static_cast<uint32_t>(i % team_threads),
                     static_cast<uint32_t>(i / team_threads), 0};
      fiber.meeting = {};
      fiber.begun &= fiber.done;
      fiber.done = false;
    }
    if (!run_block(stream != nullptr)) return 1;
  }
  return 0;
}

// --- The driver ----------------------------------------------------------------------------------
//
// The calls of zero8/op/cuda.py.  A module is anything that begins like machine code.

extern "C" int cuModuleLoadData(void** module, const char* code) {
  if (__builtin_memcmp(code, "\177ELF", 4) != 0) return 200;
  *module = &arguments;
  return 0;
}
extern "C" int cuModuleGetFunction(void** function, void* module, const char* name) {
  for (const Kernel& one : kernels) {
    if (module != &arguments || __builtin_strcmp(name, one.name) != 0) continue;
    *function = const_cast<Kernel*>(&one);
    return 0;
  }
  return 500;
}
static bool is_kernel(const void* function) {
  return std::any_of(std::begin(kernels), std::end(kernels),
                     [=](const Kernel& one) { return &one == function; });
}
extern "C" int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int threads,
                                                           size_t shared_bytes) {
  if (!is_kernel(function) || shared_bytes != 0) return 1;
  *count = 640 / threads;
  return 0;
}
extern "C" int cuLaunchKernel(void* function, uint32_t grid, uint32_t grid_y, uint32_t grid_z,
                              uint32_t team_threads, uint32_t teams, uint32_t block_z,
                              uint32_t shared_bytes, void* stream, void** values, void** extra) {
  const bool flat = grid_y == 1 && grid_z == 1 && block_z == 1;
  if (!is_kernel(function) || !flat || shared_bytes != 0 || extra) return 1;
  if (grid == 0 || team_threads * teams > 512) return 1;
  const auto argument = [=](int i) { return *static_cast<uint64_t*>(values[i]); };
  const auto* segments = reinterpret_cast<zero8::Segment*>(argument(0));
  const auto algorithm = static_cast<const Kernel*>(function)->algorithm;
  if (argument(2) > 0 && segments[0].algorithm != algorithm) return 1;
  return zero8_step_launch(
      segments, reinterpret_cast<int64_t*>(argument(1)), static_cast<int64_t>(argument(2)),
      reinterpret_cast<zero8::StepScalars*>(argument(3)),
      reinterpret_cast<zero8::CodecMaps*>(argument(4)),
      reinterpret_cast<unsigned long long*>(argument(5)), static_cast<int>(team_threads),
      static_cast<int>(teams), static_cast<int>(grid), stream);
}
extern "C" int cuGetErrorString(int status, const char** text) {
  *text = status == 200 ? "no machine code" : "invalid";
  return 0;
}

// --- Single operations ---------------------------------------------------------------------------

// Of each of `count` triples the product, the quotient and a * b + c, as the kernel makes them.
extern "C" void zero8_operations(const float* a, const float* b, const float* c, int64_t count,
                                 float* product, float* quotient, float* sum) {
  using Vec = zero8::cuda::Vec;
  for (int64_t i = 0; i + Vec::kLanes <= count; i += Vec::kLanes) {
    const Vec::F x = Vec::flushed(Vec::load(a + i)), y = Vec::flushed(Vec::load(b + i)),
                 z = Vec::flushed(Vec::load(c + i));
    Vec::store(product + i, Vec::mul(x, y));
    Vec::store(quotient + i, Vec::div(x, y));
    Vec::store(sum + i, Vec::fma(x, y, z));
  }
}
