// SPDX-License-Identifier: Apache-2.0
// All of GCC's OpenMP runtime that the kernels call, made of std::thread.
//
// The thread sanitizer does not see the futexes by which libgomp's threads wait for each other, and
// would report races where there are none.  It does see how a std::thread begins and ends.
#include <omp.h>

#include <thread>
#include <vector>

namespace {

struct Member {
  int number, team_size;
};
thread_local Member self = {0, 1};

}  // namespace

extern "C" {

int omp_get_thread_num() noexcept { return self.number; }
int omp_get_num_threads() noexcept { return self.team_size; }

// What GCC makes of `#pragma omp parallel num_threads(n)`.  Not nested, and n is not 0.
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned) {
  const int team_size = static_cast<int>(num_threads);
  std::vector<std::thread> others;
  for (int number = 1; number < team_size; ++number) {
    others.emplace_back([=] {
      self = {number, team_size};
      body(data);
    });
  }
  self.team_size = team_size;
  body(data);
  self.team_size = 1;
  for (std::thread& other : others) other.join();
}
}
