// SPDX-License-Identifier: Apache-2.0
// The encoders of the dynamic maps over all floats, against their thresholds one after another.
//
// -DTARGET says which vectors, whose header is -DHEADER.
#define ZERO8_TARGET TARGET
#include "flush_to_zero.h"
#include "isa.h"
#include HEADER
#include "step_blocks.h"

namespace zero8 {
namespace TARGET {

// The nearest entry of one number after the other, of which none is nearer to 0 than the last.
class Walk {
 public:
  Walk(const DynamicMap& map, uint32_t zero_code) : map_(map), code_(zero_code) {}
  uint32_t code_of(float x) {
    while (x >= map_.thresholds[code_]) ++code_;
    while (x < 0.0f && code_ > 0 && x < map_.thresholds[code_ - 1]) --code_;
    return code_;
  }

 private:
  const DynamicMap& map_;
  uint32_t code_;
};

// How many of the floats with patterns begin .. end - 1, and a sign, do not get the code of the
// nearest entry; for second moments that are not 0, of the nearest one that is not.
template <bool kSigned>
int64_t count_wrong(const CodecMaps& maps, uint32_t sign, uint32_t begin, uint32_t end) {
  using Code = Dynamic<kSigned>;
  Range range(kSigned);
  range.add(kSigned, Vec::set(1.0f));
  float scale;
  const typename Code::Encoder encode(range, maps, {range.largest(), nullptr, 0, 0, 0, 1.0f},
                                      &scale);
  int64_t wrong = scale != 1.0f;
  Walk walk(Code::map_of(maps), Code::kZeroCode);
  const auto nearest = [&](uint32_t pattern) {
    const uint32_t code = walk.code_of(float_of(pattern | sign));
    return !kSigned && pattern > 0 && code == 0 ? 1 : code;
  };
  for (uint32_t first = begin; first < end; first += Vec::kLanes) {
    const Vec::F x = Vec::as_float(Vec::ramp(first | sign, 1));
    const Vec::I got = completed<Code::Encoder::kLeft>(encode(x, Vec::seti(0)), x);
    float wanted[Vec::kLanes];
    for (int k = 0; k < Vec::kLanes; ++k) wanted[k] = float_of(nearest(first + k));
    wrong += Vec::kLanes - Vec::count(Vec::equal(got, Vec::as_int(Vec::load(wanted))));
  }
  return wrong;
}

}  // namespace TARGET
}  // namespace zero8

// In both maps; `begin` and `end` are multiples of the number of lanes.
extern "C" int64_t count_wrong(const zero8::CodecMaps* maps, uint32_t begin, uint32_t end) {
  using namespace zero8::TARGET;
  const zero8::FlushToZero flush;
  return count_wrong<true>(*maps, 0, begin, end) + count_wrong<true>(*maps, kSignBit, begin, end) +
         count_wrong<false>(*maps, 0, begin, end);
}
