// Weights of 8, 6, 5 and 4 bits, of the values of GGML's blocks: for the 32 outputs of a panel, 32 or 256 inputs that share scales
#pragma once
#include "vectors.h"

namespace {

constexpr int BLOCK = 32;  // inputs

#if defined(__aarch64__)
typedef __fp16 float16;  // g++ has _Float16 there since version 13
#else
typedef _Float16 float16;
#endif

// GCC would convert one number after the other
#if defined(__AVX512F__)
inline vec wide(const float16* p) {
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vec wide(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline vec wide(const float16* p) {
    const __m128i* eights = reinterpret_cast<const __m128i*>(p);
    return {(floats8)_mm256_cvtph_ps(_mm_loadu_si128(eights)), (floats8)_mm256_cvtph_ps(_mm_loadu_si128(eights + 1))};
}
inline vec wide(const int8_t* p) {
    const ints8 low = (ints8)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const ints8 high = (ints8)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + LANES / 2)));
    return to_floats({low, high});
}
#else
template <class Number>
inline vec wide(const Number* p) {
    vec wide;
    for (int i = 0; i < LANES; ++i) wide[i] = p[i];
    return wide;
}
#endif

// BITS of each of 32 inputs for 16 outputs, counted from 0 on. Each of a word's four bytes has an input of each group of four
// consecutive inputs that share the word; the first group is in the lowest bits
template <int BITS>
struct Packed {
    static constexpr int GROUPS = 8 / BITS, MASK = (1 << BITS) - 1;
    uint32_t held[BITS][LANES];
    words word(int input) const { return load_words(held[input / 4 / GROUPS]); }
    static constexpr int place(int input) { return 8 * (input % 4) + BITS * (input / 4 % GROUPS); }
    words lowest(int input) const { return word(input) >> place(input); }
    // a group's numbers, each in its byte, times two to the `raised`
    words bytes(int group, int raised = 0) const {
        const words held = word(4 * group);
        const int shift = place(4 * group) - raised;
        return (shift < 0 ? held << -shift : held >> shift) & (uint32_t(MASK << raised) * 0x01010101u);
    }
};

#if defined(__AVX512F__)
// the numbers of an input, which count from FIRST on in steps, looked up by their bits
template <int FIRST, int STEP, int BITS>
inline vec looked_up(const Packed<BITS>& packed, int input) {
    const ints counted{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec values = to_floats((counted & packed.MASK) * STEP + FIRST);
    return (vec)_mm512_permutexvar_ps((__m512i)packed.lowest(input), (__m512)values);  // by the lowest four bits
}
#else
constexpr int MANTISSA = 23, LOWERED = 12;  // bits
// where BITS that a word has at `place` fit into a float's mantissa: there, or LOWERED
constexpr int in_mantissa(int place, int bits) { return place + bits <= MANTISSA ? place : place - LOWERED; }
// Whole numbers whose bits begin at `place`, counted from `first` on. They become the mantissas of floats with the exponent by
// which a bit at `place` counts 1: that takes fewer instructions than a shift and a conversion
inline vec from_mantissa(words bits, int place, int first) {
    const float above = float(1 << (MANTISSA - place));
    uint32_t exponent;
    std::memcpy(&exponent, &above, 4);
    return (vec)(bits | exponent) - (above - float(first));
}
#endif

// whole numbers of four bits, from FIRST on
template <int FIRST>
inline vec four_bits(const Packed<4>& packed, int input) {
#if defined(__AVX512F__)
    return looked_up<FIRST, 1>(packed, input);
#else
    if (FIRST == 0) return to_floats((ints)(packed.lowest(input) & packed.MASK));
    const int stored = packed.place(input), place = in_mantissa(stored, 4);
    return from_mantissa((packed.word(input) >> (stored - place)) & (15u << place), place, FIRST);
#endif
}

// whole numbers of eight bits, from -128 on
inline vec eight_bits(const Packed<8>& packed, int input) {
#if defined(__AVX512F__)
    return to_floats((ints)(packed.lowest(input) & packed.MASK)) - 128.0f;
#else
    const int stored = packed.place(input), place = in_mantissa(stored, 8);
    return from_mantissa((packed.word(input) >> (stored - place)) & (255u << place), place, -128);
#endif
}

// whole numbers of five or six bits, around 0: the lower four, and the UPPER above them
template <int UPPER>
inline vec more_bits(const Packed<4>& lower, const Packed<UPPER>& upper, int input) {
    constexpr int FIRST = -(8 << UPPER);
#if defined(__AVX512F__)
    return looked_up<0, 1>(lower, input) + looked_up<FIRST, 16>(upper, input);
#else
    const int stored = lower.place(input), place = in_mantissa(stored, 4 + UPPER);
    const int raised = place + 4 - upper.place(input);  // the upper bits follow the lower ones
    const words above = raised < 0 ? upper.word(input) >> -raised : upper.word(input) << raised;
    const words bits = ((lower.word(input) >> (stored - place)) & (15u << place)) |
                       (above & (uint32_t(upper.MASK) << (place + 4)));
    return from_mantissa(bits, place, FIRST);
#endif
}

// A block of INPUTS gives the scales of each 32 of them, its `part`, for each half of the panel. `weights`: those of an input, as
// floats. `bytes`: the numbers of a group of four inputs, of BITS, counted from 0 on. `scaled`: the sum of products of weights and
// other whole numbers over RUN inputs that share a scale; `sum` is that of products with `bytes`, `total` that of the others

struct OneScale {
    static constexpr int INPUTS = 32, RUN = 32;
    float16 scale[PANEL];
    struct Scales { vec factor; };
    Scales scales(int, int half) const { return {wide(scale + half * LANES)}; }
};

struct Block8 : OneScale {  // Q8_0: whole numbers from -128 to 127
    static constexpr int BITS = 8;
    Packed<8> numbers[2];
    vec weights(int, int half, int input, const Scales& s) const { return eight_bits(numbers[half], input) * s.factor; }
    words bytes(int, int half, int group) const { return numbers[half].bytes(group); }
    static vec scaled(const Scales& s, int, vec sum, float total) { return (sum - 128.0f * total) * s.factor; }
};

struct Block4 : OneScale {  // Q4_0: whole numbers from -8 to 7
    static constexpr int BITS = 4;
    Packed<4> numbers[2];
    vec weights(int, int half, int input, const Scales& s) const {
        return four_bits<-8>(numbers[half], input) * s.factor;
    }
    words bytes(int, int half, int group) const { return numbers[half].bytes(group); }
    static vec scaled(const Scales& s, int, vec sum, float total) { return (sum - 8.0f * total) * s.factor; }
};

struct Block5 : OneScale {  // Q5_0: whole numbers from -16 to 15
    static constexpr int BITS = 5;
    Packed<4> low[2];
    Packed<1> high[2];
    vec weights(int, int half, int input, const Scales& s) const {
        return more_bits(low[half], high[half], input) * s.factor;
    }
    words bytes(int, int half, int group) const { return low[half].bytes(group) | high[half].bytes(group, 4); }
    static vec scaled(const Scales& s, int, vec sum, float total) { return (sum - 16.0f * total) * s.factor; }
};

struct Block4K {  // Q4_K: from 0 to 15, with a scale and a minimum for 32 inputs. Scale times number is exact in float32
    static constexpr int BITS = 4, INPUTS = 256, RUN = 32;
    float16 scale[PANEL], least[PANEL];
    int8_t steps[8][PANEL], minima[8][PANEL];
    Packed<4> numbers[8][2];
    struct Scales { vec factor, least; };
    Scales scales(int part, int half) const {
        const int at = half * LANES;
        Scales s{wide(scale + at) * wide(steps[part] + at), wide(least + at) * wide(minima[part] + at)};
        compute_now(s.least);
        return s;
    }
    vec weights(int part, int half, int input, const Scales& s) const {
        return four_bits<0>(numbers[part][half], input) * s.factor - s.least;
    }
    words bytes(int part, int half, int group) const { return numbers[part][half].bytes(group); }
    static vec scaled(const Scales& s, int, vec sum, float total) {
        vec products = sum * s.factor;
        compute_now(products);
        return products - s.least * total;
    }
};

struct Block6K {  // Q6_K: from -32 to 31, with a scale for 16 inputs
    static constexpr int BITS = 6, INPUTS = 256, RUN = 16;
    float16 scale[PANEL];
    int8_t steps[16][PANEL];
    Packed<4> low[8][2];
    Packed<2> high[8][2];
    struct Scales { vec factor[2]; };  // of the first 16 of the 32, and of the others
    Scales scales(int part, int half) const {
        const int at = half * LANES;
        const vec whole = wide(scale + at);
        return {{whole * wide(steps[2 * part] + at), whole * wide(steps[2 * part + 1] + at)}};
    }
    vec weights(int part, int half, int input, const Scales& s) const {
        return more_bits(low[part][half], high[part][half], input) * s.factor[input / 16];
    }
    words bytes(int part, int half, int group) const {
        return low[part][half].bytes(group) | high[part][half].bytes(group, 4);
    }
    static vec scaled(const Scales& s, int run, vec sum, float total) { return (sum - 32.0f * total) * s.factor[run]; }
};

// `work<B>()` for the blocks of this type of GGML; false: for none
template <class Work>
inline bool by_blocks(int type, Work work) {
    switch (type) {
        case 2: work.template operator()<Block4>(); return true;
        case 6: work.template operator()<Block5>(); return true;
        case 8: work.template operator()<Block8>(); return true;
        case 12: work.template operator()<Block4K>(); return true;
        case 14: work.template operator()<Block6K>(); return true;
        default: return false;
    }
}

constexpr int AHEAD = 16384;  // bytes
// asks memory for the weights that far on, while rows are multiplied by these: a core waits for memory less
template <int BYTES>
inline void ask_for(const void* w) {
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(static_cast<const char*>(w) + i + AHEAD, 0, 2);
}

// `work(k, block, part)` for each 32 inputs of a panel of blocks, k the first
template <class B, class Work>
inline void by_parts(const B* w, int inputs, Work work) {
    constexpr int bytes = sizeof(B) * BLOCK / B::INPUTS;
    for (int k = 0; k < inputs; k += BLOCK) {
        const B& block = w[k / B::INPUTS];
        const int part = k % B::INPUTS / BLOCK;
        ask_for<bytes>(reinterpret_cast<const char*>(&block) + part * bytes);
        work(k, block, part);
    }
}

}  // namespace
