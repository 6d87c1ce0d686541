// Vectors of 16 floats, bfloat16, activations, and each thread's share of the work
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, PANEL = 32;  // columns of a vector, of a panel of packed weights

typedef uint16_t halves __attribute__((vector_size(32), aligned(2)));

#if defined(__AVX512F__)
typedef float vec __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4)));
typedef uint32_t loose_words __attribute__((vector_size(64), aligned(2)));

inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
inline words load_words(const void* p) { return *static_cast<const loose_words*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
inline vec select(ints where, vec x, vec otherwise) { return where ? x : otherwise; }
inline words select(ints where, words x, words otherwise) { return where ? x : otherwise; }
inline vec to_floats(ints v) { return __builtin_convertvector(v, vec); }
inline ints to_ints(vec v) { return __builtin_convertvector(v, ints); }
inline words to_words(halves v) { return __builtin_convertvector(v, words); }
inline halves to_halves(words v) { return __builtin_convertvector(v, halves); }
inline void store_bytes(int8_t* p, ints v) {  // the lowest of each
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
}

inline float sum(vec v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}
#else
typedef float floats8 __attribute__((vector_size(32)));
typedef uint32_t words8 __attribute__((vector_size(32)));
typedef int32_t ints8 __attribute__((vector_size(32)));
typedef float loose_floats8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t loose_words8 __attribute__((vector_size(32), aligned(2)));
typedef uint16_t halves8 __attribute__((vector_size(16), aligned(2)));

// 16 numbers in two registers, with the operators of GCC's vectors. GCC keeps a vector that is longer than a register in
// memory, and writes a factor of all its numbers there one by one
template <class Number, class Eight>
struct Sixteen {
    Eight low, high;

    Sixteen() = default;
    Sixteen(Eight low, Eight high) : low(low), high(high) {}
    Sixteen(Number x) : low(x - Eight{}), high(x - Eight{}) {}
    template <class N, class E>
    explicit Sixteen(Sixteen<N, E> bits) : low((Eight)bits.low), high((Eight)bits.high) {}

    Number operator[](int i) const { return i < LANES / 2 ? low[i] : high[i - LANES / 2]; }
    Number& operator[](int i) { return reinterpret_cast<Number*>(this)[i]; }

    friend Sixteen operator+(Sixteen x, Sixteen y) { return {x.low + y.low, x.high + y.high}; }
    friend Sixteen operator-(Sixteen x, Sixteen y) { return {x.low - y.low, x.high - y.high}; }
    friend Sixteen operator*(Sixteen x, Sixteen y) { return {x.low * y.low, x.high * y.high}; }
    friend Sixteen operator/(Sixteen x, Sixteen y) { return {x.low / y.low, x.high / y.high}; }
    friend Sixteen operator&(Sixteen x, Sixteen y) { return {x.low & y.low, x.high & y.high}; }
    friend Sixteen operator|(Sixteen x, Sixteen y) { return {x.low | y.low, x.high | y.high}; }
    friend Sixteen operator<<(Sixteen x, int bits) { return {x.low << bits, x.high << bits}; }
    friend Sixteen operator>>(Sixteen x, int bits) { return {x.low >> bits, x.high >> bits}; }
    Sixteen operator-() const { return {-low, -high}; }
    Sixteen& operator+=(Sixteen x) { return *this = *this + x; }

    friend Sixteen<int32_t, ints8> operator<(Sixteen x, Sixteen y) { return {x.low < y.low, x.high < y.high}; }
    friend Sixteen<int32_t, ints8> operator>(Sixteen x, Sixteen y) { return y < x; }
    friend Sixteen<int32_t, ints8> operator==(Sixteen x, Sixteen y) { return {x.low == y.low, x.high == y.high}; }
};
typedef Sixteen<float, floats8> vec;
typedef Sixteen<uint32_t, words8> words;
typedef Sixteen<int32_t, ints8> ints;

inline vec load(const float* p) {
    const loose_floats8* eights = reinterpret_cast<const loose_floats8*>(p);
    return {eights[0], eights[1]};
}
inline words load_words(const void* p) {
    const loose_words8* eights = static_cast<const loose_words8*>(p);
    return {eights[0], eights[1]};
}
inline void store(float* p, vec v) {
    loose_floats8* eights = reinterpret_cast<loose_floats8*>(p);
    eights[0] = v.low;
    eights[1] = v.high;
}
template <class Number, class Eight>
inline Sixteen<Number, Eight> select(ints where, Sixteen<Number, Eight> x, Sixteen<Number, Eight> otherwise) {
    return {where.low ? x.low : otherwise.low, where.high ? x.high : otherwise.high};
}
inline vec to_floats(ints v) {
    return {__builtin_convertvector(v.low, floats8), __builtin_convertvector(v.high, floats8)};
}
inline ints to_ints(vec v) { return {__builtin_convertvector(v.low, ints8), __builtin_convertvector(v.high, ints8)}; }
inline words to_words(halves v) {
    const halves8 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
    const halves8 high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return {__builtin_convertvector(low, words8), __builtin_convertvector(high, words8)};
}
inline halves to_halves(words v) {
    const halves8 low = __builtin_convertvector(v.low, halves8), high = __builtin_convertvector(v.high, halves8);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

inline void store_bytes(int8_t* p, ints v) {
    for (int i = 0; i < LANES; ++i) p[i] = int8_t(v[i]);
}

inline float sum(vec v) {  // in the order of a vector of 16
    floats8 sums = v.low + v.high;
    sums += __builtin_shufflevector(sums, sums, 4, 5, 6, 7, 0, 1, 2, 3);
    sums += __builtin_shufflevector(sums, sums, 2, 3, 0, 1, 6, 7, 4, 5);
    return sums[0] + sums[1];
}
#endif
// or GCC multiplies factors again wherever their product is used
inline void compute_now(vec& x) {
#if defined(__AVX512F__)
    asm("" : "+v"(x));
#elif defined(__AVX2__)
    asm("" : "+x"(x.low), "+x"(x.high));
#else
    asm("" : "+m"(x));
#endif
}
inline vec all(float x) { return x - vec{}; }
// the largest size of 32 numbers
inline float largest(vec x, vec y) {
    alignas(64) float sizes[LANES];
    x = select(x < 0.0f, -x, x);
    y = select(y < 0.0f, -y, y);
    store(sizes, select(x > y, x, y));
    for (int count = LANES / 2; count; count /= 2)
        for (int i = 0; i < count; ++i) sizes[i] = std::max(sizes[i], sizes[i + count]);
    return sizes[0];
}
inline vec low(words pairs) { return (vec)(pairs << 16); }
inline vec high(words pairs) { return (vec)(pairs & 0xffff0000u); }

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
    return (vec)(to_words(*reinterpret_cast<const halves*>(p)) << 16);
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
    return to_halves(select(x == x, nearest, words{} + 0x7fc0));
}

constexpr float TO_WHOLE = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number

// e to the x by a polynomial of degree 6 over half a binary order; within 2 units of the last place
inline vec exponential(vec x) {
    x = select(x > 88.0f, all(88.0f), x);
    x = select(x < -87.0f, all(-87.0f), x);
    vec n = x * 1.44269504088896341f + TO_WHOLE - TO_WHOLE;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints order = to_ints(n);
    return (vec)((ints)p + (order << 23));
}
inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

enum Activation { RELU, SILU, GELU_TANH, GELU };
inline vec activate(vec x, int kind) {
    switch (kind) {
        case RELU: return select(x < 0.0f, vec{}, x);  // a NaN stays one
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
