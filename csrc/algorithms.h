// SPDX-License-Identifier: Apache-2.0
// The algorithms: what kernels know of each before they step.  The arithmetic is in adam.h and its
// neighbours, zero8/spec/ has the same in Python.
#pragma once

#include <cstdint>

#include "format.h"

namespace zero8 {

enum Algorithm : int32_t {
  kAdam = 1,
  kLion = 2,
  kSgd = 3,
  kAdemamix = 4,
  // Not algorithms, but what convert.h does with one moment.
  kReadSigned = 5,
  kReadUnsigned = 6,
  kWriteSigned = 7,
  kWriteDithered = 8,
  kWriteUnsigned = 9,
};

// Calls the macro X(target, algorithm) for each, in the order of their numbers, with the name of
// the struct that has its arithmetic.
#define ZERO8_ALGORITHMS(X, target) \
  X(target, Adam) X(target, Lion) X(target, Sgd) X(target, Ademamix)

// The same of conversions: with their functions' names and numbers.
#define ZERO8_CONVERSIONS(X, target) \
  X(target, read, kReadSigned)       \
  X(target, read, kReadUnsigned)     \
  X(target, write, kWriteSigned) X(target, write, kWriteDithered) X(target, write, kWriteUnsigned)

// The moments of an algorithm, in order: whether each one can be negative, and whether the dither
// rounds its codes.
struct MomentsOf {
  int count;
  bool is_signed[kMaxMoments], is_dithered[kMaxMoments];
};
constexpr MomentsOf kMomentsOf[] = {
    {0, {}, {}},
    {2, {true, false}, {false, true}},
    {1, {true}, {true}},
    {1, {true}, {true}},
    {3, {true, true, false}, {false, true, true}},
    {1, {true}, {false}},
    {1, {false}, {true}},
    {1, {true}, {false}},
    {1, {true}, {true}},
    {1, {false}, {true}},
};
constexpr int kNumAlgorithms = sizeof kMomentsOf / sizeof kMomentsOf[0];  // and one more, 0

struct AdamScalars {
  float beta1, beta2;
  float one_minus_beta1, sqrt_one_minus_beta2;
  float inverse_sqrt_correction2, eps, max_ratio;
  float step_size, decay, l2, grad_sign;
  float settling, grad_factor;
};

struct LionScalars {
  float beta1, beta2;
  float one_minus_beta1, one_minus_beta2;
  float lr, decay, l2, grad_sign, grad_factor;
};

struct SgdScalars {
  float momentum, grad_share, update_of_moment, update_of_grad;
  float lr, decay, l2, grad_sign, grad_factor;
};

struct AdemamixScalars {
  float beta1, beta3, beta2;
  float one_minus_beta1, one_minus_beta3, sqrt_one_minus_beta2;
  float inverse_sqrt_correction2, eps, inverse_correction1, alpha, max_ratio;
  float lr, decay, l2, grad_sign;
  float settling, grad_factor;
};

// One step's scalars, those of the segment's algorithm.
union StepScalars {
  AdamScalars adam;
  LionScalars lion;
  SgdScalars sgd;
  AdemamixScalars ademamix;
};

}  // namespace zero8
