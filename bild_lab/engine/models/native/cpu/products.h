// Rows times a matrix in panels of 32 outputs, by vectors, by pairs of bfloat16, by matrix tiles or by whole numbers
#pragma once
#include <utility>
#include <vector>
#include "rounded.h"
#include "structures.h"
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int ROWS = 6;  // rows that share a panel's registers
#else
constexpr int ROWS = 1;  // more share what is in the first cache (`multiply_bands`)
#endif

// the weights of a pair of inputs, even and odd, for the 32 outputs of a panel
struct Pair { vec even[2], odd[2]; };
inline Pair pair(const float* w) {
    return {{load(w), load(w + LANES)}, {load(w + PANEL), load(w + PANEL + LANES)}};
}
inline Pair pair(const bfloat16* w) {
    const words left = load_words(w), right = load_words(w + PANEL);
    return {{low(left), low(right)}, {high(left), high(right)}};
}

// adds to the sums of R rows the products with a pair of inputs, the k-th and the next
template <int R>
inline void add_pair(const float* x, int stride, int k, const Pair& weights, vec even[R][2], vec odd[R][2]) {
    #pragma GCC unroll ROWS  // or the sums of 3 to 5 rows go to memory and back
    for (int r = 0; r < R; ++r) {
        const float* row = x + r * stride + k;
        #pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            even[r][half] += row[0] * weights.even[half];
            odd[r][half] += row[1] * weights.odd[half];
        }
    }
}

// What R rows have summed for one panel: the even and the odd inputs apart, for each half of the panel
template <int R>
struct Sums {
    vec even[R][2], odd[R][2];

    void results(vec out[R][2]) const {
        #pragma GCC unroll ROWS
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) out[r][half] = even[r][half] + odd[r][half];
    }
};

// adds the products of R rows with `count` inputs of one panel
template <int R, class T>
inline void add_inputs(const float* x, int stride, const T* w, int count, Sums<R>& sums) {
    int k = 0;
    for (; k + 1 < count; k += 2, w += 2 * PANEL) {
        const Pair weights = pair(w);
        ask_for<sizeof(T) * 2 * PANEL>(w);
        add_pair<R>(x, stride, k, weights, sums.even, sums.odd);
    }
    if (k < count) {  // the last of an odd number: what lies behind it in the row is no input
        const Pair weights = pair(w);
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) sums.even[r][half] += x[r * stride + k] * weights.even[half];
    }
}

// R rows times one panel
template <int R, class X, class T>
inline void multiply(const X* x, int stride, const T* w, int inputs, vec out[R][2]) {
    Sums<R> sums{};
    add_inputs<R>(x, stride, w, inputs, sums);
    sums.results(out);
}

#if defined(__AVX512F__)
// `multiply` with weights in blocks. It is not inlined, as its code is long
template <int R, class B>
    requires(B::INPUTS > 0)
[[gnu::noinline]] void multiply(const float* x, int stride, const B* w, int inputs, vec out[R][2]) {
    vec even[R][2] = {}, odd[R][2] = {};
    by_parts(w, inputs, [&](int k, const B& block, int part) {
        const typename B::Scales s[2] = {block.scales(part, 0), block.scales(part, 1)};
        #pragma GCC unroll 16
        for (int i = 0; i < BLOCK; i += 2) {
            const Pair weights{{block.weights(part, 0, i, s[0]), block.weights(part, 1, i, s[1])},
                               {block.weights(part, 0, i + 1, s[0]), block.weights(part, 1, i + 1, s[1])}};
            add_pair<R>(x, stride, k + i, weights, even, odd);
        }
    });
    for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) out[r][half] = even[r][half] + odd[r][half];
}
#else
// the same of a row with weights in blocks: the sums and the scales of half a panel are in registers at once
template <int R, class B>
    requires(B::INPUTS > 0)
[[gnu::noinline]] void multiply(const float* x, int, const B* w, int inputs, vec out[R][2]) {
    static_assert(R == 1);
    vec even[2] = {}, odd[2] = {};
    by_parts(w, inputs, [&](int k, const B& block, int part) {
        #pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const auto s = block.scales(part, half);
            vec left = even[half], right = odd[half];
            #pragma GCC unroll 16
            for (int i = 0; i < BLOCK; i += 2) {
                left += x[k + i] * block.weights(part, half, i, s);
                right += x[k + i + 1] * block.weights(part, half, i + 1, s);
            }
            even[half] = left;
            odd[half] = right;
        }
    });
    for (int half = 0; half < 2; ++half) out[0][half] = even[half] + odd[half];
}
#endif

// A panel of blocks whose type is known when the program runs
struct Blocks {
    int type;
    const void* at;
};
template <int R>
inline void multiply(const float* x, int stride, Blocks w, int inputs, vec out[R][2]) {
    by_blocks(w.type, [&]<class B>() { multiply<R>(x, stride, static_cast<const B*>(w.at), inputs, out); });
}
template <int R>
inline void multiply(const Rounded* x, int parts, Blocks w, int inputs, vec out[R][2]) {
    by_blocks(w.type, [&]<class B>() { multiply_rounded<R>(x, parts, static_cast<const B*>(w.at), inputs, out); });
}

// `work<N>()` for N = count, from 1 to MOST
template <int MOST, class Work>
inline void by_count(int count, Work work) {
    [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
        ((count == LESS + 1 ? work.template operator()<LESS + 1>() : void()), ...);
    }(std::make_integer_sequence<int, MOST>{});
}

// More rows than share registers are multiplied in groups, each in turn by a part of the panel's inputs. Its weights stay in the
// first cache, and memory sends the next ones meanwhile
constexpr int BAND = 24;  // rows whose sums stay in that cache too

struct RowSums { float even[PANEL], odd[PANEL]; };

#if defined(__AVX512F__)
constexpr int GROUP = ROWS;

// `work(k, count, weights)` for each part of a panel's inputs, k the first
template <class T, class Work>
inline void by_inputs(const T* w, int inputs, Work work) {
    constexpr int most = AHEAD / int(sizeof(T) * PANEL);
    for (int k = 0; k < inputs; k += most) work(k, std::min(most, inputs - k), w + k * PANEL);
}

// adds to the sums of R rows the products with `count` inputs. weights: [count][PANEL]
template <int R, class X, class T>
[[gnu::noinline]] void add_part(const X* x, int stride, const T* weights, int count, RowSums* rows) {
    Sums<R> sums;
    #pragma GCC unroll ROWS
    for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) {
            sums.even[r][half] = load(rows[r].even + half * LANES);
            sums.odd[r][half] = load(rows[r].odd + half * LANES);
        }
    add_inputs<R>(x, stride, weights, count, sums);
    #pragma GCC unroll ROWS
    for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) {
            store(rows[r].even + half * LANES, sums.even[r][half]);
            store(rows[r].odd + half * LANES, sums.odd[r][half]);
        }
}
#else
// With 16 registers of eight floats the weights are widened once, 32 inputs at a time
constexpr int GROUP = 3;  // rows whose sums of 16 outputs are in registers at once

// adds to the sums of R rows the products with `count` inputs. weights: [count][PANEL]
template <int R>
[[gnu::noinline]] void add_part(const float* x, int stride, const float* weights, int count, RowSums* sums) {
    for (int at = 0; at < PANEL; at += LANES) {
        vec even[R], odd[R];
        #pragma GCC unroll GROUP
        for (int r = 0; r < R; ++r) { even[r] = load(sums[r].even + at); odd[r] = load(sums[r].odd + at); }
        const float* w = weights + at;
        int i = 0;
        for (; i + 1 < count; i += 2, w += 2 * PANEL) {
            const vec left = load(w);
            #pragma GCC unroll GROUP
            for (int r = 0; r < R; ++r) even[r] += x[int64_t(r) * stride + i] * left;
            const vec right = load(w + PANEL);
            #pragma GCC unroll GROUP
            for (int r = 0; r < R; ++r) odd[r] += x[int64_t(r) * stride + i + 1] * right;
        }
        if (i < count)
            for (int r = 0; r < R; ++r) even[r] += x[int64_t(r) * stride + i] * load(w);
        #pragma GCC unroll GROUP
        for (int r = 0; r < R; ++r) { store(sums[r].even + at, even[r]); store(sums[r].odd + at, odd[r]); }
    }
}

inline void store(float* to, const Pair& weights) {
    for (int half = 0; half < 2; ++half) {
        store(to + half * LANES, weights.even[half]);
        store(to + PANEL + half * LANES, weights.odd[half]);
    }
}

// `work(k, count, weights)` for each 32 inputs of a panel, k the first
template <class T, class Work>
inline void by_inputs(const T* w, int inputs, Work work) {
    alignas(64) float weights[BLOCK * PANEL];
    for (int k = 0; k < inputs; k += BLOCK) {
        const int count = std::min(BLOCK, inputs - k);
        for (int i = 0; i < count; i += 2, w += 2 * PANEL) {
            ask_for<sizeof(T) * 2 * PANEL>(w);
            store(weights + i * PANEL, pair(w));
        }
        work(k, count, weights);
    }
}
template <class B, class Work>
    requires(B::INPUTS > 0)
inline void by_inputs(const B* w, int inputs, Work work) {
    alignas(64) float weights[BLOCK * PANEL];
    by_parts(w, inputs, [&](int k, const B& block, int part) {
        for (int half = 0; half < 2; ++half) {
            const auto s = block.scales(part, half);
            #pragma GCC unroll 32
            for (int i = 0; i < BLOCK; ++i) store(weights + i * PANEL + half * LANES, block.weights(part, half, i, s));
        }
        work(k, BLOCK, weights);
    });
}
template <class Work>
inline void by_inputs(Blocks w, int inputs, Work work) {
    by_blocks(w.type, [&]<class B>() { by_inputs(static_cast<const B*>(w.at), inputs, work); });
}
#endif

// rows times a panel, summed in the order of `multiply`; `keep(row, left, right)` takes a row's 32 results
template <class X, class Weights, class Keep>
inline void multiply_bands(const X* x, int stride, Weights w, int inputs, int rows, Keep keep) {
    alignas(64) RowSums sums[BAND];
    for (int first = 0; first < rows; first += BAND) {
        const int band = std::min(BAND, rows - first), groups = (band + GROUP - 1) / GROUP;
        std::fill(sums, sums + band, RowSums{});
        by_inputs(w, inputs, [&](int k, int count, const auto* weights) {
            for (int group = 0; group < groups; ++group) {
                const int row = band * group / groups, next = band * (group + 1) / groups;
                const X* from = x + int64_t(first + row) * stride + k;
                by_count<GROUP>(next - row, [&]<int R>() { add_part<R>(from, stride, weights, count, sums + row); });
            }
        });
        for (int row = 0; row < band; ++row) {
            const RowSums& s = sums[row];
            keep(first + row, load(s.even) + load(s.odd), load(s.even + LANES) + load(s.odd + LANES));
        }
    }
}

struct Buffers {  // of one pass, for all threads; then for each thread. x: the states of the layer that runs
    float *x, *qkv, *mixed, *inner, *block, *normed, *scores, *tiles;
    int* seen;
    union { uint16_t* halves; Rounded* rounded; };  // the rows that a product reads, in bfloat16 or in 8 bits
};

// `work(at, keep)` for each of this thread's panels; `keep(row, left, right)` hands 32 results on to `use`, with the bias
template <class Use, class Work>
inline void by_panels(const Matrix& matrix, Use use, Work work) {
    Span mine = share(matrix.panels);
    for (int at = mine.first; at < mine.last; ++at) {
        const int panel = matrix.first + at;
        vec bias[2] = {};
        if (matrix.bias) { bias[0] = load(matrix.bias + panel * PANEL); bias[1] = load(matrix.bias + panel * PANEL + LANES); }
        work(at, [&](int row, vec left, vec right) { use(row, panel, left + bias[0], right + bias[1]); });
    }
}

template <class T>
constexpr int STEP = std::is_same_v<T, bfloat16> ? 32 : 2;  // inputs of a panel come in multiples of it

#if defined(__AVX512BF16__)
// Whether the instruction that adds products of bfloat16 pairs is as quick as the one for floats. AMD's is; Intel's takes
// four times as long, so that floats are multiplied twice as fast
inline bool quick_pairs() {
#if defined(QUICK_PAIRS)  // for tests
    return true;
#else
    static const bool quick = __builtin_cpu_is("amd");
    return quick;
#endif
}

// writes the rows to b.halves in bfloat16, a multiple of 32 long; returns how long
inline int round_rows(const Matrix& matrix, const float* x, int stride, int rows, Buffers& b) {
    const int inputs = padded(matrix.inputs, 32);
    for (int row = 0; row < rows; ++row) {
        uint16_t* to = b.halves + int64_t(row) * inputs;
        for (int i = 0; i < inputs; i += LANES) {
            vec floats{};
            if (i + LANES <= matrix.inputs) floats = load(x + int64_t(row) * stride + i);
            else std::memcpy(&floats, x + int64_t(row) * stride + i, 4 * std::max(0, matrix.inputs - i));
            *reinterpret_cast<halves*>(to + i) = narrow(floats);
        }
    }
    return inputs;
}

// `add_inputs` of rounded rows: an instruction adds the products of a pair of inputs. Pairs are summed by turns in two sums
template <int R>
inline void add_inputs(const uint16_t* x, int stride, const bfloat16* w, int count, Sums<R>& sums) {
    for (int k = 0; k < count; k += 4)
        #pragma GCC unroll 2
        for (int turn = 0; turn < 2; ++turn, w += 2 * PANEL) {
            const __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + PANEL);
            ask_for<sizeof(bfloat16) * 2 * PANEL>(w);
            #pragma GCC unroll ROWS
            for (int r = 0; r < R; ++r) {
                int32_t two;
                std::memcpy(&two, x + int64_t(r) * stride + k + 2 * turn, 4);
                const __m512bh inputs_of_row = (__m512bh)_mm512_set1_epi32(two);
                vec* sum = turn ? sums.odd[r] : sums.even[r];
                sum[0] = (vec)_mm512_dpbf16_ps((__m512)sum[0], inputs_of_row, left);
                sum[1] = (vec)_mm512_dpbf16_ps((__m512)sum[1], inputs_of_row, right);
            }
        }
}
#endif

#if defined(__AMX_BF16__)
constexpr int TILE = 16;  // rows of a tile

// Whether the system lets this process use tiles
inline bool has_tiles() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ARCH_REQ_XCOMP_PERM, tile data
    return allowed;
}
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

// `product` by matrix tiles: the rows are rounded to bfloat16 first. Up to 16 rows take as long as one
template <class Use>
inline void tile_product(const Matrix& matrix, const float* x, int stride, int rows, Buffers& b, Use use) {
    const int inputs = round_rows(matrix, x, stride, rows, b);
    by_panels(matrix, use, [&](int at, auto keep) {
        const bfloat16* w = static_cast<const bfloat16*>(matrix.packed) + int64_t(at) * inputs * PANEL;
        for (int row = 0; row < rows; row += 2 * TILE) {
            const uint16_t* left = b.halves + int64_t(row) * inputs;
            const bool both = rows - row > TILE;
            _tile_zero(0);
            _tile_zero(1);
            if (both) { _tile_zero(2); _tile_zero(3); }
            for (int k = 0; k < inputs; k += 32) {
                _tile_loadd(6, w + k * PANEL, 4 * PANEL);
                _tile_loadd(7, w + k * PANEL + PANEL, 4 * PANEL);
                _tile_loadd(4, left + k, 2 * inputs);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (both) {
                    _tile_loadd(5, left + int64_t(TILE) * inputs + k, 2 * inputs);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            float* sums = b.tiles;  // [2 * TILE][PANEL]
            _tile_stored(0, sums, 4 * PANEL);
            _tile_stored(1, sums + LANES, 4 * PANEL);
            if (both) {
                _tile_stored(2, sums + TILE * PANEL, 4 * PANEL);
                _tile_stored(3, sums + TILE * PANEL + LANES, 4 * PANEL);
            }
            for (int r = 0; r < std::min(rows - row, 2 * TILE); ++r)
                keep(row + r, load(sums + r * PANEL), load(sums + r * PANEL + LANES));
        }
    });
}
#endif

// the weights of a panel
template <class T>
inline const T* panel_of(const Matrix& matrix, int panel) {
    return static_cast<const T*>(matrix.packed) + panel * padded(matrix.inputs, STEP<T>) * PANEL;
}
inline Blocks blocks_of(const Matrix& matrix, int panel) {
    Blocks blocks{matrix.type, nullptr};
    by_blocks(matrix.type, [&]<class B>() {
        blocks.at = static_cast<const B*>(matrix.packed) + int64_t(panel) * (matrix.inputs / B::INPUTS);
    });
    return blocks;
}

// `work<R>(row)` for R rows at a time, from a row on: MOST, then those that are left
template <int MOST, class Work>
inline void by_most(int rows, Work work) {
    int row = 0;
    for (; row + MOST <= rows; row += MOST) work.template operator()<MOST>(row);
    if constexpr (MOST > 1) by_count<MOST - 1>(rows - row, [&]<int R>() { work.template operator()<R>(row); });
}

// whether more rows of X than share registers are multiplied in bands
#if defined(__AVX512F__)
template <class X, class Weights>
constexpr bool in_bands = std::is_pointer_v<Weights>;
#else
template <class X, class Weights>
constexpr bool in_bands = std::is_same_v<X, float>;
#endif

// `product` of rows of floats, or of rounded ones. panel: gives the weights of a panel
template <class X, class Panel, class Use>
inline void panels_product(const Matrix& matrix, const X* x, int stride, int inputs, int rows, Panel panel, Use use) {
    by_panels(matrix, use, [&](int at, auto keep) {
        const auto w = panel(matrix, at);
        if constexpr (in_bands<X, decltype(w)>)
            if (rows > ROWS) return multiply_bands(x, stride, w, inputs, rows, keep);
        by_most<std::is_same_v<X, Rounded> ? ROUNDED_ROWS : ROWS>(rows, [&]<int R>(int row) {
            vec out[R][2];
            multiply<R>(x + int64_t(row) * stride, stride, w, inputs, out);
            for (int r = 0; r < R; ++r) keep(row + r, out[r][0], out[r][1]);
        });
    });
}

template <class T, class Use>
inline void part_product(const Matrix& matrix, const float* x, int stride, int rows, Buffers& b, Use use) {
    if (matrix.type) {
        const int inputs = matrix.inputs;
        if constexpr (std::is_same_v<T, float>) return panels_product(matrix, x, stride, inputs, rows, blocks_of, use);
        round_to_bytes(x, stride, rows, inputs, b.rounded);
        return panels_product(matrix, b.rounded, inputs / BLOCK, inputs, rows, blocks_of, use);
    }
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (has_tiles()) return tile_product(matrix, x, stride, rows, b, use);
#endif
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (quick_pairs()) {
            const int inputs = round_rows(matrix, x, stride, rows, b);
            return panels_product(matrix, b.halves, inputs, inputs, rows, panel_of<T>, use);
        }
#endif
    panels_product(matrix, x, stride, matrix.inputs, rows, panel_of<T>, use);
}

// rows times this thread's panels; `use(row, panel, left, right)` takes the 32 results
template <class T, class Use>
inline void product(const Matrix& matrix, const float* x, int stride, int rows, Buffers& b, Use use) {
    for (const Matrix* part = &matrix; part; part = part->next) part_product<T>(*part, x, stride, rows, b, use);
}

// writes a row of a matrix in blocks, whose outputs are its rows
inline bool read_row(const Matrix& matrix, int64_t row, float* out) {
    return by_blocks(matrix.type, [&]<class B>() {
        const B* w = static_cast<const B*>(matrix.packed) + row / PANEL * (matrix.inputs / B::INPUTS);
        by_parts(w, matrix.inputs, [&](int k, const B& block, int part) {
            const int half = row % PANEL / LANES;
            const auto s = block.scales(part, half);
            for (int i = 0; i < BLOCK; ++i) out[k + i] = block.weights(part, half, i, s)[row % LANES];
        });
    });
}

// `work(shared, own)` by every thread of a team, with memory for all of them and for this one. half: it multiplies bfloat16
template <class Work>
void by_team(int threads, bool half, int64_t shared, int64_t own, Work work) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < shared + own * threads) memory.resize(shared + own * threads);
    float* base = memory.data();
    #pragma omp parallel num_threads(threads)
    {
        float* mine = base + shared + own * omp_get_thread_num();
#if defined(__AMX_BF16__)
        const bool tiles = half && has_tiles();
        TileShapes shapes;
        if (tiles) _tile_loadconfig(&shapes);
        work(base, mine);
        if (tiles) _tile_release();
#else
        work(base, mine);
#endif
    }
}

// stores 32 results of a row, of which some may lie beyond the last column
inline void put(float* row, int panel, int columns, vec left, vec right) {
    float* at = row + panel * PANEL;
    if ((panel + 1) * PANEL <= columns) {
        store(at, left);
        store(at + LANES, right);
        return;
    }
    for (int i = 0; i < PANEL && panel * PANEL + i < columns; ++i) at[i] = i < LANES ? left[i] : right[i - LANES];
}
inline void add(float* row, int panel, int columns, vec left, vec right) {
    float* at = row + panel * PANEL;
    if ((panel + 1) * PANEL <= columns) {
        store(at, load(at) + left);
        store(at + LANES, load(at + LANES) + right);
        return;
    }
    for (int i = 0; i < PANEL && panel * PANEL + i < columns; ++i) at[i] += i < LANES ? left[i] : right[i - LANES];
}

}  // namespace
