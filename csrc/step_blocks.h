// SPDX-License-Identifier: Apache-2.0
// The step on the CPU over blocks whose moments are floats, and what it has in common with that of
// step_log.h: the gradients of a block, and when a block can be stepped.
//
// Nothing of a block is written before its gradients and new moments are known to be finite.
//
// Where a QuickVec is not exact, a loop in which it saw a tiny result is made again with Vec.
//
// The caller has set flush to zero.  Included once per target; ZERO8_TARGET names the namespace,
// and nothing here is a template of the standard library, which the linker would merge across
// targets.
#include <cstdint>

#include "format.h"
#include "moments.h"
// In terms of moments.h:
#include "chunks.h"
// In terms of chunks.h:
#include "units.h"
// In terms of all these:
#include "buffer.h"
#include "corrections.h"
// In terms of buffer.h:
#include "block_codes.h"

namespace zero8::ZERO8_TARGET {

// The blocks of a segment in order, from number `local` on: what block_at says, but the divisions
// are done once.  They would stand in the way of every block's first loads.
class BlockWalk {
 public:
  BlockWalk(const Segment& seg, int64_t local)
      : numel_(seg.numel),
        row_length_(seg.row_length),
        block_size_(seg.block_size),
        block_(block_at(seg, local)) {
    const int64_t in_row = (seg.first + block_.begin + block_.count) % row_length_;
    left_of_row_ = in_row == 0 ? 0 : row_length_ - in_row;
  }
  const Block& block() const { return block_; }
  void advance() {
    const int64_t begin = block_.begin + block_.count;
    if (left_of_row_ == 0) left_of_row_ = row_length_;
    int64_t count = left_of_row_ < block_size_ ? left_of_row_ : block_size_;
    if (count > numel_ - begin) count = numel_ - begin;
    left_of_row_ -= count;
    block_ = {begin, block_.local + 1, static_cast<int>(count), 0};
  }

 private:
  int64_t numel_, row_length_, left_of_row_, block_size_;
  Block block_;
};

// The gradients of one block, and its parameters.
template <class Scalars, class P, class G>
struct Reader {
  using Product = typename P::template Product<G>;
  const Scalars& s;
  P param;
  const G* g;
  int count;

  Reader(const Segment& seg, const Scalars& scalars, const Block& b)
      : s(scalars), param(seg, b), g(static_cast<const G*>(seg.grad) + b.begin), count(b.count) {}

  // (R1)
  template <class AnyVec, class Lanes>
  ZERO8_INLINE Vec::F gradient(AnyVec& vec, int i, Lanes lanes) const {
    const Vec::F x = s.template scaled<Product>(vec, Vec::flushed(load(g + i, lanes)));
    return s.has_l2 ? s.gradient(vec, param.read(vec, i, lanes), x) : x;
  }

  // Whether every gradient is finite and small enough to be squared.
  bool is_finite() const {
    Vec::I largest = Vec::seti(0);
    int i = 0;
    if (s.are_as_stored()) {
      for (; i + kChunk <= count; i += kChunk)
        largest = Vec::maxu(largest, largest_of_chunk(g + i));
    }
    for_vectors(i, count, [&](int k, auto lanes) ZERO8_INLINE {
      Vec vec;
      largest = Vec::maxu(largest, Vec::magnitude_bits(gradient(vec, k, lanes)));
    });
    return Vec::reduce_maxu(largest) < kGradientLimitBits;
  }
};

// Whether a block with these largest patterns of new moments has finite gradients and moments.
template <class Algorithm, class P, class G>
ZERO8_INLINE inline bool can_step(const Reader<typename Algorithm::Scalars, P, G>& reader,
                                  const uint32_t* largest) {
  return are_moments<Algorithm>(largest) && (reader.s.proves_finite(largest) || reader.is_finite());
}

// Makes the new moments of a block, and what the parameters need, in a buffer; and the range of
// each moment, in which NaN counts as a large magnitude.
template <class AnyVec, class Algorithm, class P, class G>
ZERO8_INLINE inline void advance(AnyVec& vec,
                                 const Reader<typename Algorithm::Scalars, P, G>& reader,
                                 float* const* values, const float* decay,
                                 const Buffer<Algorithm>& buffer, Range* ranges) {
  constexpr int kMoments = Buffer<Algorithm>::kMoments;
  // Whose address is known here alone, so that they stay in registers.
  Range local[kMoments];
  for (int k = 0; k < kMoments; ++k) local[k] = Range(is_signed<Algorithm>(k));
  for_vectors(0, reader.count, [&](int i, auto lanes) ZERO8_INLINE {
    // The processor's own prefetching does for moments that are floats in memory.
    if (i % kChunk == 0) prefetch_chunk(reader.g + i);
    Vec::F m[kMoments], carried[Algorithm::kCarried];
    for (int k = 0; k < kMoments; ++k) {
      m[k] = vec.mul(load(values[k] + i, lanes), Vec::set(decay[k]));
    }
    reader.s.advance(vec, reader.gradient(vec, i, lanes), m, carried);
    buffer.put(i, m, carried);
    for (int k = 0; k < kMoments; ++k) {
      const Vec::I bits = is_signed<Algorithm>(k) ? Vec::magnitude_bits(m[k]) : Vec::as_int(m[k]);
      local[k].high = Vec::maxu(local[k].high, bits);
      local[k].add_other(is_signed<Algorithm>(k), m[k]);
    }
  });
  for (int k = 0; k < kMoments; ++k) ranges[k] = local[k];
}

// Steps over blocks whose moments are floats in memory, or are made floats and codes again: loops
// that know no codec.
template <class Algorithm, class P, class G>
int64_t step_floats(const Segment& seg, const StepScalars& raw, const CodecMaps& maps,
                    int64_t begin, int64_t end) {
  using Buffer = Buffer<Algorithm>;
  constexpr int kMoments = Buffer::kMoments;
  const typename Algorithm::Scalars s(raw);
  // One block, whose last vector may run over, and its decoded moments.
  alignas(64) float memory[(Buffer::kRows + kMoments) * (kMaxBlockSize + Vec::kLanes)];
  const int stride = seg.block_size + Vec::kLanes;
  const Buffer buffer{memory, stride};
  const bool is_coded = seg.moments[0].codec != kFloat32;
  BlockCode codes[kMoments] = {};
  float gain[kMoments], decay[kMoments];  // while codes are decoded, and of floats in memory
  for (int k = 0; k < kMoments; ++k) {
    if (is_coded) codes[k] = block_code<Algorithm>(seg.moments[k].codec, k);
    gain[k] = is_coded ? Algorithm::decay(raw, k) : 1.0f;
    decay[k] = is_coded ? 1.0f : Algorithm::decay(raw, k);
  }
  int64_t skipped = 0;
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    const Corrections<P> corrections(seg, b);
    Reader<typename Algorithm::Scalars, P, G> reader(seg, s, b);
    float* values[kMoments];
    bool can = true;
    for (int k = 0; k < kMoments; ++k) {
      values[k] = is_coded ? memory + (Buffer::kRows + k) * stride
                           : static_cast<float*>(seg.moments[k].values) + b.begin;
      if (is_coded) can &= codes[k].decode(seg, k, b, gain[k], maps, values[k]);
    }
    Range ranges[kMoments];
    quickly(buffer.values,
            [&](auto& vec) ZERO8_INLINE { advance(vec, reader, values, decay, buffer, ranges); });
    uint32_t largest[kMoments];
    for (int k = 0; k < kMoments; ++k) largest[k] = ranges[k].largest();
    if (!can || !can_step<Algorithm>(reader, largest)) {
      ++skipped;
      continue;
    }
    corrections.around([&]() ZERO8_INLINE {
      reader.param.start();
      for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
        if (i % kChunk == 0) prefetch_chunk(reader.param.p + i);
        step_param(s, buffer, reader.param, i, lanes);
        for (int k = 0; k < kMoments && !is_coded; ++k) {
          store(values[k] + i, Vec::load(buffer.row(k) + i), lanes);
        }
      });
      correct_params(s, buffer, reader.param, b.count);
    });
    // Last, so that the divisions of the parameters hide those of the scales.
    for (int k = 0; k < kMoments && is_coded; ++k) {
      const BlockValues values{largest[k], buffer.row(k), b.count,
                               0,          b.count,       Algorithm::settling(raw, k)};
      codes[k].encode(seg, k, b, values, maps, ranges[k]);
    }
  }
  return skipped;
}

}  // namespace zero8::ZERO8_TARGET
