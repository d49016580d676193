// SPDX-License-Identifier: Apache-2.0
// The fused step on the CPU: decode, update (arithmetic.h), encode, in one pass over memory.
//
//     block b:    decode the moments -> the new ones, and what the parameter needs, to a buffer
//     block b:    scales of the moments
//     block b-1:  the new parameter, stored; encode the moments from the other buffer, store codes
//
// For Adam the first loop has the square root and the last one the division, so that neither waits
// for the divider alone; the scales are a chain of dependent operations, which the last loop over
// the block before hides.  The buffers of two blocks (24 bytes per element of a block) stay in the
// first-level cache.  Memory sees, per fp32 parameter, 16 bytes: p, g and two codes read, p and two
// codes written.
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
#include "packing.h"
// In terms of all these:
#include "arithmetic.h"
#include "block_walk.h"
#include "buffer.h"
#include "corrections.h"

namespace zero8 {
namespace ZERO8_TARGET {

template <bool kPairs, class Sink>
ZERO8_INLINE inline void encode_chunk(Sink& sink, int i) {
  using Code = typename Sink::Code;
  Vec::I threshold[4] = {Vec::seti(0), Vec::seti(0), Vec::seti(0), Vec::seti(0)};
  const auto take = [&](Dither& dither) ZERO8_INLINE {
    for (int k = 0; k < 4; ++k) threshold[k] = dither.next_of_two(k % 2);
  };
  if constexpr (kMayDither<Code>) {
    if (sink.encode.is_dithered) {
      Dither dither = sink.started(i, kPairs);
      take(dither);
      encode_four<kPairs>(sink.encode.dithered(), sink.values + i, threshold, sink.codes + i);
      return;
    }
  }
  if constexpr (Code::kIsDithered) take(sink.dither);
  encode_four<kPairs>(sink.encode, sink.values + i, threshold, sink.codes + i);
}

// --- Blocks --------------------------------------------------------------------------------------

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
  template <bool kPairs, bool kAsStored, class AnyVec>
  ZERO8_INLINE void two_gradients(AnyVec& vec, int i, Vec::F* x) const {
    load_two<kPairs>(g + i, x);
    if constexpr (!kAsStored) {
      for (int k = 0; k < 2; ++k) x[k] = s.template scaled<Product>(vec, x[k]);
      if (s.has_l2) {
        Vec::F p[2];
        param.template read_two<kPairs>(i, p);
        for (int k = 0; k < 2; ++k) x[k] = s.gradient(vec, p[k], x[k]);
      }
    }
  }
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

// A block whose moments are updated in a buffer, and nothing of it in memory.
template <class Algorithm, class Codec, class P, bool kPairs>
struct Pending {
  P param;
  Corrections<P> corrections;
  Row<Algorithm, Codec, Sinks<Algorithm>::template Sink> sinks;
  Buffer<Algorithm> buffer;
  int count = 0;

  // `codes` are those of the block's moments.
  ZERO8_INLINE void finish(const typename Algorithm::Scalars& s,
                           Row<Algorithm, Codec, BlockCodes>& codes) {
    corrections.around([&]() ZERO8_INLINE { write(s, codes); });
  }

 private:
  ZERO8_INLINE void write(const typename Algorithm::Scalars& s,
                          Row<Algorithm, Codec, BlockCodes>& codes) {
    int i = 0;
    start(i, kPairs);
    for (; i + kChunk <= count; i += kChunk) {
      prefetch_chunk(param.p + i);
      for (int at = i; at < i + kChunk; at += 2 * Vec::kLanes) {
        QuickVec vec;
        Vec::F p[2];
        param.template read_two<kPairs>(at, p);
        for (int k = 0; k < 2; ++k) {
          buffer.keep_param(at + k * Vec::kLanes, p[k]);
          p[k] = buffer.param(vec, s, p[k], at + k * Vec::kLanes);
        }
        param.template write_two<kPairs>(at, p);
      }
      sinks.visit([&](auto, auto& sink) ZERO8_INLINE { encode_chunk<kPairs>(sink, i); });
      codes.visit([&](auto, auto& one) ZERO8_INLINE { one.store(i); });
    }
    if (i < count) {
      start(i, false);
      for_vectors(i, count, [&](int k, auto lanes) ZERO8_INLINE {
        step_param(s, buffer, param, k, lanes);
        sinks.visit([&](auto, auto& sink) ZERO8_INLINE { sink.write(k, lanes); });
      });
    }
    correct_params(s, buffer, param, count);
    codes.visit([](auto, auto& one) ZERO8_INLINE { one.store_rest(); });
  }
  ZERO8_INLINE void start(int i, bool pairs) {
    param.start(i, pairs);
    sinks.visit([&](auto, auto& sink) ZERO8_INLINE { sink.start(i, pairs); });
  }
};

// --- The step ------------------------------------------------------------------------------------

// A block stays as it is; its copy is made, which may have held anything.
template <class P>
void leave(const P& param, int count) {
  if constexpr (P::kIsCopied) {
    for_vectors(0, count, [&](int i, auto lanes) ZERO8_INLINE {
      param.copy(i, load(param.p + i, lanes), lanes);
    });
  }
}

// Whether a block with these largest patterns of new moments has finite gradients and moments.
template <class Algorithm, class P, class G>
ZERO8_INLINE inline bool can_step(const Reader<typename Algorithm::Scalars, P, G>& reader,
                                  const uint32_t* largest) {
  return are_moments<Algorithm>(largest) && (reader.s.proves_finite(largest) || reader.is_finite());
}

template <class Algorithm, class P, class G>
int64_t step_plain(const Segment& seg, const StepScalars& raw, int64_t begin, int64_t end) {
  using Buffer = Buffer<Algorithm>;
  constexpr int kMoments = Buffer::kMoments;
  const typename Algorithm::Scalars s(raw);
  // One block; its last vector may run over.
  alignas(64) float memory[Buffer::kRows * (kMaxBlockSize + Vec::kLanes)];
  const Buffer buffer{memory, seg.block_size + Vec::kLanes};
  Vec::F decay[kMoments];
  for (int k = 0; k < kMoments; ++k) decay[k] = Vec::set(Algorithm::decay(raw, k));
  int64_t skipped = 0;
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    const Corrections<P> corrections(seg, b);
    Reader<typename Algorithm::Scalars, P, G> reader(seg, s, b);
    float* values[kMoments];
    Vec::I patterns[kMoments];
    for (int k = 0; k < kMoments; ++k) {
      values[k] = static_cast<float*>(seg.moments[k].values) + b.begin;
    }
    quickly(buffer, [&](auto& vec) ZERO8_INLINE {
      for (Vec::I& pattern : patterns) pattern = Vec::seti(0);
      for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
        if (i % kChunk == 0) {
          // The processor's own prefetching does for the streams of moments.
          prefetch_chunk(reader.param.p + i);
          prefetch_chunk(reader.g + i);
        }
        Vec::F m[kMoments], carried[Algorithm::kCarried];
        for (int k = 0; k < kMoments; ++k) m[k] = vec.mul(load(values[k] + i, lanes), decay[k]);
        s.advance(vec, reader.gradient(vec, i, lanes), m, carried);
        buffer.put(i, m, carried);
        for (int k = 0; k < kMoments; ++k) {
          const bool is_signed = kMomentsOf[Algorithm::kNumber].is_signed[k];
          patterns[k] =
              Vec::maxu(patterns[k], is_signed ? Vec::magnitude_bits(m[k]) : Vec::as_int(m[k]));
        }
      });
    });
    uint32_t largest[kMoments];
    for (int k = 0; k < kMoments; ++k) largest[k] = Vec::reduce_maxu(patterns[k]);
    if (!can_step<Algorithm>(reader, largest)) {
      leave(reader.param, b.count);
      ++skipped;
      continue;
    }
    corrections.around([&]() ZERO8_INLINE {
      reader.param.start(0, false);
      for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
        step_param(s, buffer, reader.param, i, lanes);
        for (int k = 0; k < kMoments; ++k) {
          store(values[k] + i, Vec::load(buffer.row(k) + i), lanes);
        }
      });
      correct_params(s, buffer, reader.param, b.count);
    });
  }
  return skipped;
}

// The new moments of one block, in a buffer, and what their scales depend on.
template <class Algorithm, class Codec>
struct Advanced {
  static constexpr int kMoments = Buffer<Algorithm>::kMoments;
  Buffer<Algorithm> buffer;
  Row<Algorithm, Codec, RangeOf> ranges;

  // From the decoded ones of a vector.
  template <class AnyVec>
  ZERO8_INLINE void advance(AnyVec& vec, const typename Algorithm::Scalars& s, int i, Vec::F g,
                            Vec::F* m) {
    Vec::F carried[Algorithm::kCarried];
    s.advance(vec, g, m, carried);
    buffer.put(i, m, carried);
    ranges.visit([&](auto k, auto& range) ZERO8_INLINE { range.add(m[k.value]); });
  }
};

// Four vectors of a moment, of which two at a time are decoded.
template <class Code>
struct Chunk {
  typename Code::Decoder::Chunk decoded;

  template <int k, class AllSources>
  ZERO8_INLINE Chunk(Number<k>, const AllSources& sources, int i)
      : decoded(sources.at(Number<k>()).decode.chunk(sources.at(Number<k>()).codes + i)) {}
};

// The whole chunks of a block; returns where they end.  kAsStored: gradients are; instead of a
// question in the loop.
template <bool kPairs, bool kAsStored, class Algorithm, class Codec, class AllSources,
          class AnyReader>
ZERO8_INLINE inline int advance_chunks(QuickVec& vec, const AnyReader& reader,
                                       const AllSources& sources,
                                       Row<Algorithm, Codec, BlockCodes>& codes,
                                       Advanced<Algorithm, Codec>& to) {
  constexpr int kMoments = Buffer<Algorithm>::kMoments;
  int i = 0;
  for (; i + kChunk <= reader.count; i += kChunk) {
    prefetch_chunk(reader.g + i);
    codes.visit([&](auto, auto& one) ZERO8_INLINE { one.load(i); });
    const Row<Algorithm, Codec, Chunk> chunks(sources, i);
    for (int k = 0; k < 4; k += 2) {
      const int at = i + k * Vec::kLanes;
      Vec::F g[2], first[kMoments], second[kMoments];
      reader.template two_gradients<kPairs, kAsStored>(vec, at, g);
      chunks.visit([&](auto moment, const auto& chunk) ZERO8_INLINE {
        Vec::F x[2];
        chunk.decoded.template two<kPairs>(vec, k, x);
        first[moment.value] = x[0];
        second[moment.value] = x[1];
      });
      to.advance(vec, reader.s, at, g[0], first);
      to.advance(vec, reader.s, at + Vec::kLanes, g[1], second);
    }
  }
  return i;
}
// Where the QuickVec was not enough, vectors are made one by one.
template <bool kPairs, bool, class Algorithm, class Codec, class AllSources, class AnyReader>
int advance_chunks(Vec&, const AnyReader&, const AllSources&, Row<Algorithm, Codec, BlockCodes>&,
                   Advanced<Algorithm, Codec>&) {
  static_assert(!kPairs, "vectors are made in order");
  return 0;
}

template <class Algorithm, class Codec, class P, class G>
int64_t step_quantized(const Segment& seg, const StepScalars& raw, const CodecMaps& maps,
                       int64_t begin, int64_t end) {
  using Scalars = typename Algorithm::Scalars;
  using AllSources = Row<Algorithm, Codec, Sources<Algorithm>::template Source>;
  using AllSinks = Row<Algorithm, Codec, Sinks<Algorithm>::template Sink>;
  constexpr int kMoments = Buffer<Algorithm>::kMoments, kRows = Buffer<Algorithm>::kRows;
  // Values lie in the buffer as they come: the whole chunks perhaps as pairs, the tail in order.
  constexpr bool kPairs =
      Vec::kHasPairs && Codec::kHasPairs && P::kHasPairs && sizeof(G) == sizeof(uint16_t);
  const Scalars s(raw);
  // Two blocks, one behind the other; the last vector of a block may run over.
  alignas(64) float memory[2 * kRows * (kMaxBlockSize + Vec::kLanes)];
  const int stride = seg.block_size + Vec::kLanes;
  Pending<Algorithm, Codec, P, kPairs> pending;
  Row<Algorithm, Codec, BlockCodes> codes(seg, begin);
  int64_t skipped = 0;
  int half = 0;
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    const Corrections<P> corrections(seg, b);
    const Reader<Scalars, P, G> reader(seg, s, b);
    const AllSources sources(seg, raw, maps, b, &codes);
    Advanced<Algorithm, Codec> to{{memory + half * kRows * stride, stride}, {}};
    quickly(to.buffer, [&](auto& vec) ZERO8_INLINE {
      to.ranges = {};
      const int whole = s.are_as_stored()
                            ? advance_chunks<kPairs, true>(vec, reader, sources, codes, to)
                            : advance_chunks<kPairs, false>(vec, reader, sources, codes, to);
      for_vectors(whole, b.count, [&](int i, auto lanes) ZERO8_INLINE {
        Vec::F m[kMoments];
        sources.visit([&](auto k, auto& source)
                          ZERO8_INLINE { m[k.value] = source.read(vec, i, lanes); });
        to.advance(vec, s, i, reader.gradient(vec, i, lanes), m);
      });
    });
    bool has_finite_scales = true;
    uint32_t largest[kMoments];
    sources.visit([&](auto, auto& source)
                      ZERO8_INLINE { has_finite_scales &= source.has_finite_scales(); });
    to.ranges.visit([&](auto k, auto& range) ZERO8_INLINE { largest[k.value] = range.largest(); });
    if (!has_finite_scales || !can_step<Algorithm>(reader, largest)) {
      leave(reader.param, b.count);
      ++skipped;
      continue;
    }
    const NewValues made{to.buffer.values, stride, b.count, 0, b.count};
    const AllSinks sinks(seg, raw, maps, b, made, to.ranges, &codes);
    pending.finish(s, codes);
    codes.visit([&](auto, auto& one) ZERO8_INLINE { one.keep(b); });
    pending = {reader.param, corrections, sinks, to.buffer, b.count};
    half = 1 - half;
  }
  pending.finish(s, codes);
  return skipped;
}

}  // namespace ZERO8_TARGET
}  // namespace zero8
