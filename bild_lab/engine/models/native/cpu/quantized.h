// Weights of 8, 6 and 4 bits, of the values of GGML's blocks: for the 32 outputs of a panel, 32 or 256 inputs that share scales
#pragma once
#include "vectors.h"

namespace {

constexpr int BLOCK = 32;  // inputs

// GCC would convert one number after the other
#if defined(__AVX512F__)
inline vec wide(const _Float16* p) {
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vec wide(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__) && defined(__F16C__)
inline vec wide(const _Float16* p) {
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

// BITS of each of 32 inputs for 16 outputs, the first inputs in a word's lowest bits
template <int BITS>
struct Packed {
    uint32_t held[BITS][LANES];
    // the numbers of an input, which count from FIRST on in steps
    template <int FIRST, int STEP>
    vec numbers(int input) const {
        constexpr int each = 32 / BITS, mask = (1 << BITS) - 1;
        const words lowest = load_words(held[input / each]) >> (BITS * (input % each));
#if defined(__AVX512F__)
        const ints counted{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const vec values = to_floats((counted & mask) * STEP + FIRST);
        return (vec)_mm512_permutexvar_ps((__m512i)lowest, (__m512)values);  // by the lowest four bits
#else
        vec values = to_floats((ints)(lowest & mask));
        if constexpr (STEP != 1) values = values * float(STEP);
        if constexpr (FIRST != 0) values = values + float(FIRST);  // an addition of 0 would take its time
        return values;
#endif
    }
};

// A block of INPUTS gives the weights of each 32 of them, its `part`, for each half of the panel

struct OneScale {
    static constexpr int INPUTS = 32;
    _Float16 scale[PANEL];
    struct Scales { vec factor[2]; };
    Scales scales(int) const { return {{wide(scale), wide(scale + LANES)}}; }
};

struct Block8 : OneScale {  // Q8_0: whole numbers from -127 to 127
    int8_t numbers[2][BLOCK][LANES];
    vec weights(int, int half, int input, const Scales& s) const { return wide(numbers[half][input]) * s.factor[half]; }
};

struct Block4 : OneScale {  // Q4_0: whole numbers from -8 to 7
    Packed<4> numbers[2];
    vec weights(int, int half, int input, const Scales& s) const {
        return numbers[half].numbers<-8, 1>(input) * s.factor[half];
    }
};

struct Block4K {  // Q4_K: from 0 to 15, with a scale and a minimum for 32 inputs. Scale times number is exact in float32
    static constexpr int INPUTS = 256;
    _Float16 scale[PANEL], least[PANEL];
    int8_t steps[8][PANEL], minima[8][PANEL];
    Packed<4> numbers[8][2];
    struct Scales { vec factor[2], least[2]; };
    Scales scales(int part) const {
        Scales s;
        for (int half = 0, at = 0; half < 2; ++half, at += LANES) {
            s.factor[half] = wide(scale + at) * wide(steps[part] + at);
            s.least[half] = wide(least + at) * wide(minima[part] + at);
#if defined(__AVX512F__)
            asm("" : "+v"(s.least[half]));  // or GCC multiplies again for each weight
#endif
        }
        return s;
    }
    vec weights(int part, int half, int input, const Scales& s) const {
        return numbers[part][half].numbers<0, 1>(input) * s.factor[half] - s.least[half];
    }
};

struct Block6K {  // Q6_K: from -32 to 31, with a scale for 16 inputs
    static constexpr int INPUTS = 256;
    _Float16 scale[PANEL];
    int8_t steps[16][PANEL];
    Packed<4> low[8][2];
    Packed<2> high[8][2];
    struct Scales { vec factor[2][2]; };  // [which 16 of the 32][half]
    Scales scales(int part) const {
        Scales s;
        for (int half = 0, at = 0; half < 2; ++half, at += LANES)
            for (int sixteen = 0; sixteen < 2; ++sixteen)
                s.factor[sixteen][half] = wide(scale + at) * wide(steps[2 * part + sixteen] + at);
        return s;
    }
    vec weights(int part, int half, int input, const Scales& s) const {
        return (low[part][half].numbers<0, 1>(input) + high[part][half].numbers<-32, 16>(input)) * s.factor[input / 16][half];
    }
};

// `work<B>()` for the blocks of this type of GGML; false: for none
template <class Work>
inline bool by_blocks(int type, Work work) {
    switch (type) {
        case 2: work.template operator()<Block4>(); return true;
        case 8: work.template operator()<Block8>(); return true;
        case 12: work.template operator()<Block4K>(); return true;
        case 14: work.template operator()<Block6K>(); return true;
        default: return false;
    }
}

}  // namespace
