// SPDX-License-Identifier: Apache-2.0
// The step on the CPU over moments in `log`: decode, update (adam.h and its neighbours), encode, in
// one pass over memory.
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
// Included once per target, after step_blocks.h, so in the target's namespace.
#include <cstdint>

namespace zero8::ZERO8_TARGET {

// --- Rows: one item per moment -------------------------------------------------------------------

// Part<Code> for each moment of an algorithm: types differ where codes do.
template <class Algorithm, template <class Code> class Part, int k = 0,
          bool kIsEnd = k == kMomentsOf[Algorithm::kNumber].count>
struct Row {
  Part<CodeOf<Algorithm, InLog, k>> item;
  Row<Algorithm, Part, k + 1> rest;

  Row() {}
  // Each from (Number<k>, arguments), in order.
  template <class... Arguments>
  ZERO8_INLINE explicit Row(const Arguments&... arguments)
      : item(Number<k>(), arguments...), rest(arguments...) {}

  // Calls body(Number<k>, item) for each.
  template <class Body>
  ZERO8_INLINE void visit(Body&& body) {
    body(Number<k>(), item);
    rest.visit(body);
  }
  template <class Body>
  ZERO8_INLINE void visit(Body&& body) const {
    body(Number<k>(), item);
    rest.visit(body);
  }
  template <int kOther>
  const auto& at(Number<kOther>) const {
    if constexpr (kOther == k) {
      return item;
    } else {
      return rest.at(Number<kOther>());
    }
  }
};
template <class Algorithm, template <class Code> class Part, int k>
struct Row<Algorithm, Part, k, true> {
  template <class... Arguments>
  explicit Row(const Arguments&...) {}
  template <class Body>
  void visit(Body&&) const {}
};

// --- Decoding ------------------------------------------------------------------------------------

// A moment of a block as it is stored, times the algorithm's decay.
template <class Algorithm>
struct Sources {
  template <class C>
  struct Source {
    using Code = C;
    const uint8_t* codes;
    const float* scales;
    typename Code::Decoder decode;

    template <int k>
    Source(Number<k>, const Segment& seg, const StepScalars& s, const CodecMaps& maps,
           const Block& b)
        : codes(static_cast<const uint8_t*>(seg.moments[k].values) + b.begin),
          scales(seg.moments[k].scales + b.local * Code::kScales),
          decode(scales, Algorithm::decay(s, k), maps) {}

    template <class AnyVec, class Lanes>
    ZERO8_INLINE Vec::F read(AnyVec& vec, int i, Lanes lanes) const {
      return decode(vec, load_codes<Code>(codes + i, lanes));
    }
    ZERO8_INLINE bool has_finite_scales() const {
      return zero8::ZERO8_TARGET::has_finite_scales<Code>(scales);
    }
  };
};

// What the scales of a moment's block depend on.
template <class Code>
struct RangeOf : Range {
  RangeOf() : Range(Code::kSigned) {}
  ZERO8_INLINE void add(Vec::F x) { Range::add(Code::kSigned, x); }
};

// --- Encoding ------------------------------------------------------------------------------------

// Encodes a moment of a block, vector by vector.
template <class Algorithm>
struct Sinks {
  template <class C>
  struct Sink {
    using Code = C;
    uint8_t* codes;
    const float* values;
    typename Code::Encoder encode;
    Dither dither;

    Sink() : codes(nullptr), values(nullptr) {}
    // `ranges` is a Row of RangeOf.
    template <int k, class Ranges>
    Sink(Number<k>, const Segment& seg, const StepScalars& s, const CodecMaps& maps, const Block& b,
         const Buffer<Algorithm>& made, const Ranges& ranges)
        : codes(static_cast<uint8_t*>(seg.moments[k].values) + b.begin),
          values(made.row(k)),
          encode(ranges.at(Number<k>()), maps,
                 {ranges.at(Number<k>()).largest(), made.row(k), b.count, 0, b.count,
                  Algorithm::settling(s, k)},
                 seg.moments[k].scales + b.local * Code::kScales),
          dither(Code::dither(Thresholds(seg, b, seg.moments[k].phase).q)) {}

    ZERO8_INLINE void start() {
      if constexpr (Code::kIsDithered) dither.start();
    }
    ZERO8_INLINE void write_chunk(int i) {
      Vec::I threshold[4] = {Vec::seti(0), Vec::seti(0), Vec::seti(0), Vec::seti(0)};
      const auto take = [&](Dither& from) ZERO8_INLINE {
        for (int k = 0; k < 4; ++k) threshold[k] = from.next();
      };
      if constexpr (kHasTwoLevels<Code>) {
        if (encode.is_dithered) {
          Dither from = started(i);
          take(from);
          encode_four(encode.dithered(), values + i, threshold, codes + i);
          return;
        }
      }
      if constexpr (Code::kIsDithered) take(dither);
      encode_four(encode, values + i, threshold, codes + i);
    }
    template <class Lanes>
    ZERO8_INLINE void write(int i, Lanes lanes) {
      if constexpr (kHasTwoLevels<Code>) {
        if (encode.is_dithered) {
          const Vec::I threshold = started(i).next();
          store8(codes + i, encode_one(encode.dithered(), values + i, threshold), lanes);
          return;
        }
      }
      Vec::I threshold = Vec::seti(0);
      if constexpr (Code::kIsDithered) threshold = dither.next();
      store8(codes + i, encode_one(encode, values + i, threshold), lanes);
    }

   private:
    // The thresholds from element i on, where the code may dither: of each chunk by themselves, so
    // that a step without them keeps none in registers.
    ZERO8_INLINE Dither started(int i) const {
      Dither from = dither;
      from.start(i);
      return from;
    }
  };
};

// --- Blocks --------------------------------------------------------------------------------------

// A block whose moments are updated in a buffer, and nothing of it in memory.
template <class Algorithm, class P>
struct Pending {
  P param;
  Corrections<P> corrections;
  Row<Algorithm, Sinks<Algorithm>::template Sink> sinks;
  Buffer<Algorithm> buffer;
  int count = 0;

  ZERO8_INLINE void finish(const typename Algorithm::Scalars& s) {
    corrections.around([&]() ZERO8_INLINE { write(s); });
  }

 private:
  ZERO8_INLINE void write(const typename Algorithm::Scalars& s) {
    // Copies, whose thresholds stay in registers.
    P param = this->param;
    auto sinks = this->sinks;
    param.start();
    sinks.visit([&](auto, auto& sink) ZERO8_INLINE { sink.start(); });
    int i = 0;
    for (; i + kChunk <= count; i += kChunk) {
      prefetch_chunk(param.p + i);
      // Two by two, so that one's operations fill the gaps between the other's.
      for (int at = i; at < i + kChunk; at += 2 * Vec::kLanes) {
        QuickVec vec;
        Vec::F p[2];
        for (int k = 0; k < 2; ++k) p[k] = param.read(vec, at + k * Vec::kLanes, All());
        for (int k = 0; k < 2; ++k) {
          buffer.keep_param(at + k * Vec::kLanes, p[k]);
          p[k] = buffer.param(vec, s, p[k], at + k * Vec::kLanes);
        }
        // The larger magnitudes, as patterns.
        const Vec::I largest = Vec::maxu(Vec::magnitude_bits(p[0]), Vec::magnitude_bits(p[1]));
        const bool is_extreme = any_extreme(Vec::as_float(largest));
        for (int k = 0; k < 2; ++k) param.write(at + k * Vec::kLanes, p[k], All(), is_extreme);
      }
      sinks.visit([&](auto, auto& sink) ZERO8_INLINE { sink.write_chunk(i); });
    }
    for_vectors(i, count, [&](int k, auto lanes) ZERO8_INLINE {
      step_param(s, buffer, param, k, lanes);
      sinks.visit([&](auto, auto& sink) ZERO8_INLINE { sink.write(k, lanes); });
    });
    correct_params(s, buffer, param, count);
  }
};

template <class Algorithm, class P, class G>
int64_t step_log(const Segment& seg, const StepScalars& raw, const CodecMaps& maps, int64_t begin,
                 int64_t end) {
  using Scalars = typename Algorithm::Scalars;
  using AllSources = Row<Algorithm, Sources<Algorithm>::template Source>;
  using AllSinks = Row<Algorithm, Sinks<Algorithm>::template Sink>;
  constexpr int kMoments = Buffer<Algorithm>::kMoments, kRows = Buffer<Algorithm>::kRows;
  const Scalars s(raw);
  // Two blocks, one behind the other; the last vector of a block may run over.
  alignas(64) float memory[2 * kRows * (kMaxBlockSize + Vec::kLanes)];
  const int stride = seg.block_size + Vec::kLanes;
  Pending<Algorithm, P> pending;
  int64_t skipped = 0;
  int half = 0;
  BlockWalk walk(seg, begin);
  for (int64_t local = begin; local < end; ++local, walk.advance()) {
    const Block b = walk.block();
    const Corrections<P> corrections(seg, b);
    const Reader<Scalars, P, G> reader(seg, s, b);
    const AllSources sources(seg, raw, maps, b);
    const Buffer<Algorithm> buffer{memory + half * kRows * stride, stride};
    Row<Algorithm, RangeOf> ranges;
    quickly(buffer.values, [&](auto& vec) ZERO8_INLINE {
      ranges = {};
      for_vectors(0, b.count, [&](int i, auto lanes) ZERO8_INLINE {
        if (i % kChunk == 0) {
          prefetch_chunk(reader.g + i);
          sources.visit([&](auto, const auto& one) ZERO8_INLINE { prefetch_chunk(one.codes + i); });
        }
        Vec::F m[kMoments], carried[Algorithm::kCarried];
        sources.visit([&](auto k, auto& source)
                          ZERO8_INLINE { m[k.value] = source.read(vec, i, lanes); });
        s.advance(vec, reader.gradient(vec, i, lanes), m, carried);
        buffer.put(i, m, carried);
        ranges.visit([&](auto k, auto& range) ZERO8_INLINE { range.add(m[k.value]); });
      });
    });
    bool can = true;
    uint32_t largest[kMoments];
    sources.visit([&](auto, auto& source) ZERO8_INLINE { can &= source.has_finite_scales(); });
    ranges.visit([&](auto k, auto& range) ZERO8_INLINE { largest[k.value] = range.largest(); });
    if (!can || !can_step<Algorithm>(reader, largest)) {
      ++skipped;
      continue;
    }
    const AllSinks sinks(seg, raw, maps, b, buffer, ranges);
    pending.finish(s);
    pending = {reader.param, corrections, sinks, buffer, b.count};
    half = 1 - half;
  }
  pending.finish(s);
  return skipped;
}

}  // namespace zero8::ZERO8_TARGET
