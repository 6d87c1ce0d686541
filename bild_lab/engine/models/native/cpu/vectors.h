// Vectors of 16 floats, bfloat16, activations, and each thread's share of the work
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, PANEL = 32;  // columns of a vector, of a panel of packed weights

typedef float vec __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4)));
typedef uint32_t loose_words __attribute__((vector_size(64), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2)));

inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
inline vec all(float x) { return x - vec{}; }
inline vec low(words pairs) { return (vec)(pairs << 16); }
inline vec high(words pairs) { return (vec)(pairs & 0xffff0000u); }

inline float sum(vec v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

struct bfloat16 { uint16_t bits; };
inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline vec wide(const float* p) { return load(p); }
inline vec wide(const bfloat16* p) {
#if defined(__AVX512F__)
    return (vec)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16);
#else
    return (vec)(__builtin_convertvector(*reinterpret_cast<const halves*>(p), words) << 16);
#endif
}
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bfloat16* to) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline halves narrow(vec x) {  // the same of each; a NaN's bits would be carried over to those of zero
    const words bits = (words)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? nearest : words{} + 0x7fc0, halves);
}

// e to the x by a polynomial of degree 6 over half a binary order; within 2 units of the last place
inline vec exponential(vec x) {
    x = x > 88.0f ? all(88.0f) : x;
    x = x < -87.0f ? all(-87.0f) : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    vec n = x * 1.44269504088896341f + magic - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints order = __builtin_convertvector(n, ints);
    return (vec)((ints)p + (order << 23));
}
inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

enum Activation { RELU, SILU, GELU_TANH, GELU };
inline vec activate(vec x, int kind) {
    switch (kind) {
        case RELU: return x < 0.0f ? vec{} : x;  // a NaN stays one
        case SILU: return x * sigmoid(x);
        case GELU_TANH: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
        default:
            for (int i = 0; i < LANES; ++i) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
            return x;
    }
}

struct Span { int first, last; };
inline Span share(int count) {  // of this thread
    int threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {int(int64_t(count) * me / threads), int(int64_t(count) * (me + 1) / threads)};
}

inline void normalize(const float* x, const float* weight, float epsilon, int dim, float* out, float scale = 1.0f) {
    vec squares{};
    int i = 0;
    for (; i + LANES <= dim; i += LANES) { vec v = load(x + i); squares += v * v; }
    float total = sum(squares);
    for (; i < dim; ++i) total += x[i] * x[i];
    float factor = 1.0f / std::sqrt(total / dim + epsilon);
    for (i = 0; i + LANES <= dim; i += LANES) store(out + i, load(x + i) * factor * load(weight + i) * scale);
    for (; i < dim; ++i) out[i] = x[i] * factor * weight[i] * scale;
}

// of two vectors, at most 1
inline double cosine(const float* x, const float* y, int dim) {
    double products = 0, left = 0, right = 0;
    for (int i = 0; i < dim; ++i) {
        products += double(x[i]) * y[i];
        left += double(x[i]) * x[i];
        right += double(y[i]) * y[i];
    }
    const double least = 1e-8;  // as in PyTorch
    return std::min(products / (std::max(std::sqrt(left), least) * std::max(std::sqrt(right), least)), 1.0);  // or NaN
}

inline int64_t padded(int64_t n, int to) { return (n + to - 1) / to * to; }

}  // namespace
