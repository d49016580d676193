// SPDX-License-Identifier: Apache-2.0
// The numbers of the dither: zero8/spec/dither.py, equations (D1) and (D2).
#pragma once

#include <cstdint>

namespace zero8 {

constexpr uint32_t kElementStep = 0xC13FA9A9u;
constexpr uint32_t kInBlockStep = 32 * 1601u;
constexpr uint32_t kGoldenStep = 0x9E3779B9u;
constexpr int64_t kRunSteps = 32;
// Those of lowbias32.
constexpr uint32_t kHashFactor1 = 0x7FEB352Du, kHashFactor2 = 0x846CA68Bu;

}  // namespace zero8
