// Rows rounded to whole numbers of 8 bits, times weights in blocks. Sums of products of whole numbers are exact, and take a third
// of the instructions that floats take. GGML multiplies such weights much the same way
#pragma once
#include "quantized.h"

namespace {

// 32 inputs of a row, each about `step` times a number
struct Rounded {
    int8_t numbers[BLOCK];
    float step, total, half_total[2];  // total: the numbers' sum. half_total: that of the first 16, and of the others

    void round(const float* x) {
        const vec inputs[2] = {load(x), load(x + LANES)};
        const float most = largest(inputs[0], inputs[1]);
        const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
        // NaN where an input is none or infinite
        const float wrong = sum((inputs[0] - inputs[0]) + (inputs[1] - inputs[1]));
        step = most / 127.0f + wrong;
        for (int half = 0; half < 2; ++half) {
            const vec nearest = inputs[half] * inverse + TO_WHOLE - TO_WHOLE;
            half_total[half] = sum(nearest);
            store_bytes(numbers + half * LANES, to_ints(nearest));
        }
        total = half_total[0] + half_total[1];
    }
    uint32_t group(int at) const {  // four of the numbers
        uint32_t four;
        std::memcpy(&four, numbers + 4 * at, 4);
        return four;
    }
    template <int RUN>
    float total_of(int run) const { return RUN == BLOCK ? total : half_total[run]; }
};

// `rows` rows of `inputs`, a multiple of 32
inline void round_to_bytes(const float* x, int stride, int rows, int inputs, Rounded* to) {
    for (int row = 0; row < rows; ++row)
        for (int k = 0; k < inputs; k += BLOCK) (to++)->round(x + int64_t(row) * stride + k);
}

#if defined(__AVX512VNNI__)
constexpr int ROUNDED_ROWS = 8;  // that share a panel's registers

// Adds to 16 sums the products of the four bytes of each word of `weights`, of BITS from 0 on, with the four of `x`, from -127
// on; then those of others
template <int BITS>
inline ints add_products(ints sums, words weights, uint32_t x, words others, uint32_t other_x) {
    sums = (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(int(x)));
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)others, _mm512_set1_epi32(int(other_x)));
}
#else
constexpr int ROUNDED_ROWS = 3;

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#if defined(__AVX512BW__)
typedef int16_t shorts __attribute__((vector_size(64)));
inline shorts products_of_pairs(words weights, uint32_t x) {
    return (shorts)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(int(x)));
}
inline ints sums_of_pairs(shorts products) {
    return (ints)_mm512_madd_epi16((__m512i)products, _mm512_set1_epi16(1));
}
#else
typedef int16_t shorts16 __attribute__((vector_size(32)));
typedef Sixteen<int16_t, shorts16> shorts;
inline shorts products_of_pairs(words weights, uint32_t x) {
    const __m256i bytes = _mm256_set1_epi32(int(x));
    return {(shorts16)_mm256_maddubs_epi16((__m256i)weights.low, bytes),
            (shorts16)_mm256_maddubs_epi16((__m256i)weights.high, bytes)};
}
inline ints sums_of_pairs(shorts products) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {(ints8)_mm256_madd_epi16((__m256i)products.low, ones), (ints8)_mm256_madd_epi16((__m256i)products.high, ones)};
}
#endif
template <int BITS>
inline ints add_products(ints sums, words weights, uint32_t x, words others, uint32_t other_x) {
    if constexpr (BITS < 8) {  // four products of 6 bits are below 2^15
        return sums + sums_of_pairs(products_of_pairs(weights, x) + products_of_pairs(others, other_x));
    } else {  // two of 8 bits are not: the highest bit is multiplied apart
        auto products = [](words weights, uint32_t x) {
            return sums_of_pairs(products_of_pairs(weights & 0x7f7f7f7fu, x)) +
                   sums_of_pairs(products_of_pairs(weights & 0x80808080u, x));
        };
        return sums + products(weights, x) + products(others, other_x);
    }
}
#else
template <int BITS>
inline ints add_products(ints sums, words weights, uint32_t x, words others, uint32_t other_x) {
    for (int i = 0; i < LANES; ++i)
        for (int at = 0; at < 32; at += 8)
            sums[i] += int(weights[i] >> at & 255) * int8_t(x >> at) + int(others[i] >> at & 255) * int8_t(other_x >> at);
    return sums;
}
#endif
#endif

// R rounded rows times one panel of blocks, a half after the other, so that the sums are in registers. parts: of a row. It is not
// inlined, as its code is long
template <int R, class B>
[[gnu::noinline]] void multiply_rounded(const Rounded* x, int parts, const B* w, int inputs, vec out[R][2]) {
    for (int half = 0; half < 2; ++half) {
        vec sums[R] = {};
        by_parts(w, inputs, [&](int k, const B& block, int part) {
            const Rounded* rounded = x + k / BLOCK;
            const auto s = block.scales(part, half);
            #pragma GCC unroll 2
            for (int run = 0; run < BLOCK / B::RUN; ++run) {
                ints products[R] = {};
                #pragma GCC unroll 4
                for (int i = 0; i < B::RUN / 4; i += 2) {
                    const int group = run * (B::RUN / 4) + i;
                    const words left = block.bytes(part, half, group), right = block.bytes(part, half, group + 1);
                    #pragma GCC unroll ROUNDED_ROWS
                    for (int r = 0; r < R; ++r) {
                        const Rounded& row = rounded[r * parts];
                        products[r] = add_products<B::BITS>(products[r], left, row.group(group), right,
                                                            row.group(group + 1));
                    }
                }
                #pragma GCC unroll ROUNDED_ROWS
                for (int r = 0; r < R; ++r) {
                    const Rounded& row = rounded[r * parts];
                    const vec scaled = B::scaled(s, run, to_floats(products[r]), row.template total_of<B::RUN>(run));
                    sums[r] += row.step * scaled;
                }
            }
        });
        #pragma GCC unroll ROUNDED_ROWS
        for (int r = 0; r < R; ++r) out[r][half] = sums[r];
    }
}

}  // namespace
