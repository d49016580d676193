// SPDX-License-Identifier: Apache-2.0
// Teams of torch's own threads.
//
// A team is asked of the OpenMP runtime that torch has loaded, by the function that GCC makes of
// `#pragma omp parallel`, which LLVM's and Intel's runtimes have too.  With the pragma the op would
// need a runtime of its own, of a compiler's choice: a second pool of threads beside torch's.
#pragma once

extern "C" {
// Weak: null in a process without such a runtime.
__attribute__((weak)) void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads,
                                         unsigned flags);
__attribute__((weak)) int omp_get_thread_num();
__attribute__((weak)) int omp_get_num_threads();
}

namespace zero8 {

inline bool has_threads() { return GOMP_parallel && omp_get_thread_num && omp_get_num_threads; }

// Calls body(thread, threads) on each thread of a team, of which the runtime may grant fewer than
// `num_threads`; on this thread alone without a runtime.  The body must not throw.
template <class Body>
void parallel(int num_threads, const Body& body) {
  if (num_threads <= 1 || !has_threads()) {
    body(0, 1);
    return;
  }
  const auto of_thread = [](void* data) {
    (*static_cast<const Body*>(data))(omp_get_thread_num(), omp_get_num_threads());
  };
  GOMP_parallel(of_thread, const_cast<Body*>(&body), static_cast<unsigned>(num_threads), 0);
}

}  // namespace zero8
