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

constexpr int ROUNDED_ROWS = 8;  // for which a panel is read once
constexpr int ROWS_AT_ONCE = 4;  // of them, whose sums of whole numbers are in registers
#if defined(__AVX512F__)
constexpr int HALVES = 2;  // of a panel, whose sums are: what is read of a row serves both. Loads are what takes longest
#else
constexpr int HALVES = 1;
#endif

#if defined(__AVX512VNNI__)
// Adds to 16 sums the products of the four bytes of each word of `weights`, of BITS from 0 on, with the four of `x`, from -127
// on; then those of others
template <int BITS>
inline ints add_products(ints sums, words weights, uint32_t x, words others, uint32_t other_x) {
    sums = (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(int(x)));
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)others, _mm512_set1_epi32(int(other_x)));
}
#else
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

// adds to the sums of R rows, `parts` apart, the products with a run of a block's part; for HALVES of the panel, from `half` on
template <int R, class B>
inline void add_run(const Rounded* x, int parts, const B& block, int part, int run, int half,
                    const typename B::Scales scales[HALVES], vec sums[R][HALVES]) {
    ints products[R][HALVES] = {};
    #pragma GCC unroll 4
    for (int i = 0; i < B::RUN / 4; i += 2) {
        const int group = run * (B::RUN / 4) + i;
        words left[HALVES], right[HALVES];
        #pragma GCC unroll HALVES
        for (int h = 0; h < HALVES; ++h) {
            left[h] = block.bytes(part, half + h, group);
            right[h] = block.bytes(part, half + h, group + 1);
        }
        #pragma GCC unroll ROWS_AT_ONCE
        for (int r = 0; r < R; ++r) {
            const uint32_t x_left = x[r * parts].group(group), x_right = x[r * parts].group(group + 1);
            #pragma GCC unroll HALVES
            for (int h = 0; h < HALVES; ++h)
                products[r][h] = add_products<B::BITS>(products[r][h], left[h], x_left, right[h], x_right);
        }
    }
    #pragma GCC unroll ROWS_AT_ONCE
    for (int r = 0; r < R; ++r) {
        const Rounded& row = x[r * parts];
        #pragma GCC unroll HALVES
        for (int h = 0; h < HALVES; ++h)
            sums[r][h] += row.step * B::scaled(scales[h], run, to_floats(products[r][h]), row.template total_of<B::RUN>(run));
    }
}

// R rounded rows times one panel of blocks. parts: of a row. It is not inlined, as its code is long
template <int R, class B>
[[gnu::noinline]] void multiply_rounded(const Rounded* x, int parts, const B* w, int inputs, vec out[R][2]) {
    for (int half = 0; half < 2; half += HALVES) {
        vec sums[R][HALVES] = {};
        by_parts(w, inputs, [&](int k, const B& block, int part) {
            const Rounded* rows = x + k / BLOCK;
            typename B::Scales scales[HALVES];
            for (int h = 0; h < HALVES; ++h) scales[h] = block.scales(part, half + h);
            #pragma GCC unroll 2
            for (int run = 0; run < BLOCK / B::RUN; ++run) {
                constexpr int LEFT = R % ROWS_AT_ONCE, FULL = R - LEFT;
                #pragma GCC unroll ROUNDED_ROWS
                for (int r = 0; r < FULL; r += ROWS_AT_ONCE)
                    add_run<ROWS_AT_ONCE>(rows + r * parts, parts, block, part, run, half, scales, sums + r);
                if constexpr (LEFT > 0) add_run<LEFT>(rows + FULL * parts, parts, block, part, run, half, scales, sums + FULL);
            }
        });
        #pragma GCC unroll ROUNDED_ROWS
        for (int r = 0; r < R; ++r)
            for (int h = 0; h < HALVES; ++h) out[r][half + h] = sums[r][h];
    }
}

}  // namespace
