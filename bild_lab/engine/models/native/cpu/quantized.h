// Weights of 8 and 4 bits: blocks of 32 inputs for the 32 outputs of a panel, with a scale for each output
#pragma once
#include "vectors.h"

namespace {

constexpr int BLOCK = 32;  // inputs that share a scale
typedef _Float16 scales __attribute__((vector_size(32), aligned(2)));

inline vec scale_of(const _Float16* p) { return __builtin_convertvector(*reinterpret_cast<const scales*>(p), vec); }

// The values of GGML's Q8_0: whole numbers from -127 to 127
struct Block8 {
    _Float16 scale[PANEL];
    int8_t numbers[2][BLOCK][LANES];  // [half of the panel][input][output]
    vec weights(int half, int input) const {
        const int8_t* p = numbers[half][input];
#if defined(__AVX512F__)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
        vec wide;
        for (int i = 0; i < LANES; ++i) wide[i] = p[i];
        return wide;
#endif
    }
};

// The values of GGML's Q4_0: whole numbers from -8 to 7, each stored plus 8
struct Block4 {
    _Float16 scale[PANEL];
    uint32_t numbers[2][BLOCK / 8][LANES];  // [half of the panel][eight inputs, the first in the lowest bits][output]
    vec weights(int half, int input) const {
        const words eight = *reinterpret_cast<const loose_words*>(numbers[half][input / 8]) >> (4 * (input % 8));
#if defined(__AVX512F__)
        const vec values{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        return (vec)_mm512_permutexvar_ps((__m512i)eight, (__m512)values);  // by the lowest four bits
#else
        return __builtin_convertvector((ints)(eight & 15), vec) - 8.0f;
#endif
    }
};

template <class T>
constexpr bool QUANTIZED = std::is_same_v<T, Block8> || std::is_same_v<T, Block4>;

}  // namespace
