// What a row attends to, and attention over the keys and values of a cache
#pragma once
#include <vector>
#include "structures.h"
#include "vectors.h"

namespace {

// the sums of 1, 4 or 16 vectors, in as many lanes, over and over; each in the order of `sum`
template <int COUNT>
inline vec sums(const vec (&v)[COUNT]) {
    if constexpr (COUNT == 1) return all(sum(v[0]));
#if defined(__AVX512F__)
    auto halves = [](vec x, vec y) {
        return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    auto quarters = [](vec x, vec y) {
        return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    auto pairs = [](vec x, vec y) {
        return __builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    };
    auto neighbours = [](vec x, vec y) {
        return __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
               __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    };
    auto four = [&](int at) {
        return quarters(halves(v[at % COUNT], v[(at + 1) % COUNT]), halves(v[(at + 2) % COUNT], v[(at + 3) % COUNT]));
    };
    return neighbours(pairs(four(0), four(4)), pairs(four(8), four(12)));
#else
    static_assert(COUNT <= 4);
    auto folded = [](vec v, vec w) {
        const floats8 x = v.low + v.high, y = w.low + w.high;
        floats8 all = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11) +
                      __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
        all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5);
        all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6);
        return all;
    };
    const floats8 x = folded(v[0], v[1 % COUNT]), y = folded(v[2 % COUNT], v[3 % COUNT]);
    const floats8 four = __builtin_shufflevector(x, y, 0, 4, 8, 12, 0, 4, 8, 12);
    return {four, four};
#endif
}

#if defined(__AVX512F__)
constexpr int SLOTS = 4;  // whose products with four queries are in registers
#else
constexpr int SLOTS = 1;
#endif

// products of Q queries with the keys of S consecutive slots, summed: of the first slot's, then of the next one's, over and over
template <int S, int Q, class T>
inline vec scores_of(const float* const (&query)[Q], const T* keys, int dim) {
    const int whole = dim / LANES * LANES;
    vec products[S * Q] = {};
    for (int i = 0; i < whole; i += LANES)
        #pragma GCC unroll SLOTS
        for (int s = 0; s < S; ++s) {
            const vec wider = wide(keys + s * dim + i);
            #pragma GCC unroll 4
            for (int q = 0; q < Q; ++q) products[s * Q + q] += load(query[q] + i) * wider;
        }
    vec score = sums(products);
    for (int i = whole; i < dim; ++i)
        for (int at = 0; at < LANES; ++at) {
            const int pair = at % (S * Q);
            score[at] = std::fma(query[pair % Q][i], widen(keys[pair / Q * dim + i]), score[at]);
        }
    return score;
}

// Q queries over the keys that they see; what is added to a query's sums has one order, whatever Q is. in_full: the slots that
// all see without a bias. sees: of another slot, whether any sees it, and each one's bias, minus infinity for one that does not.
// scores, seen: room for Q times as many, as many
template <int Q, class T, class Sees>
inline void attend(const float* const (&query)[Q], const T* keys, const T* values, int begin, int stop, Span in_full, int dim,
                   float scale, Sees sees, float* scores, int* seen, float* const (&out)[Q]) {
    int count = 0, whole = dim / LANES * LANES;
    vec largest = all(-INFINITY), total{}, top{}, unbiased = largest;  // minus infinity in lanes that are no query's
    for (int q = 0; q < Q; ++q) unbiased[q] = 0;
    auto keep = [&]<int S>(int slot, vec score) {
        largest = select(score > largest, score, largest);
        store(scores + count * Q, score);  // there is room for a whole vector at the end
        for (int s = 0; s < S; ++s) seen[count++] = slot + s;
    };
    for (int slot = begin; slot < stop;) {
        if (slot >= in_full.first && slot + SLOTS <= in_full.last) {
            keep.template operator()<SLOTS>(slot, scores_of<SLOTS>(query, keys + int64_t(slot) * dim, dim) * scale);
            slot += SLOTS;
            continue;
        }
        vec bias = unbiased;
        if (sees(slot, bias)) {
            const vec score = scores_of<1>(query, keys + int64_t(slot) * dim, dim);
            keep.template operator()<1>(slot, select(bias > -INFINITY, score * scale + bias, bias));
        }
        ++slot;
    }
    for (int i = 0; i < LANES; ++i) {
        top[i] = largest[i];
        for (int other = i % Q; other < LANES; other += Q) top[i] = std::max(top[i], largest[other]);
    }
    for (int i = 0; i < count * Q; i += LANES) {
        const vec score = load(scores + i);
        store(scores + i, select(score == -INFINITY, vec{}, exponential(score - top)));
    }
    for (int n = 0; n < count; ++n) total += load(scores + n * Q);
    int done = 0;
    auto mix = [&]<int V>() {  // V vectors of each output: each has a sum of its own, so that none waits for another
        for (; done + V * LANES <= whole; done += V * LANES) {
            vec mixed[Q][V] = {};
            for (int n = 0; n < count; ++n) {
                const T* value = values + int64_t(seen[n]) * dim + done;
                #pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
                    const vec wider = wide(value + v * LANES);
                    #pragma GCC unroll 4
                    for (int q = 0; q < Q; ++q) mixed[q][v] += scores[n * Q + q] * wider;
                }
            }
            for (int q = 0; q < Q; ++q)
                for (int v = 0; v < V; ++v) store(out[q] + done + v * LANES, mixed[q][v] / total[q]);
        }
    };
    mix.template operator()<4>();
    mix.template operator()<1>();
    for (int i = whole; i < dim; ++i)
        for (int q = 0; q < Q; ++q) {
            float mixed = 0;
            for (int n = 0; n < count; ++n)
                mixed = std::fma(scores[n * Q + q], widen(values[int64_t(seen[n]) * dim + i]), mixed);
            out[q][i] = mixed / total[q];
        }
}

// norm of a head, then rotation, in place
inline void place(const Model& model, const Layer& layer, const ForwardPass& pass, int64_t position, int head, float* x) {
    int dim = model.head_dim, half = dim / 2;
    if (layer.head_norm) normalize(x, layer.head_norm + int64_t(head) * dim, model.epsilon, dim, x);
    if (!model.rotary) return;
    int64_t at = (layer.kind * pass.table + position) * dim;
    const float *cos = pass.cos + at, *sin = pass.sin + at;
    for (int i = 0; i < half; ++i) {
        float left = x[i], right = x[i + half];
        x[i] = left * cos[i] + right * sin[i];  // sin carries the sign
        x[i + half] = right * cos[i + half] + left * sin[i + half];
    }
}

inline bool is_mask(const ForwardPass& pass, int64_t token) { return pass.masks && token >= pass.first_mask; }

// What the rows of a tree see, or those of a chain behind a prefix
struct Layout {
    std::vector<int64_t> positions, keys;
    std::vector<uint8_t> visible;

    void place(SequenceSlice& text, const ForwardPass& pass, const int64_t* tokens) {  // tokens: [count], of this text
        if (!text.parents && !text.reserved) return;
        const int rows = text.parents ? text.tree : text.count, stop = text.start + text.count, root = stop - rows;
        auto parent = [&](int row) { return text.parents ? int(text.parents[row]) : row - 1; };
        keys.resize(stop);
        for (int slot = 0; slot < root; ++slot) keys[slot] = slot - text.reserved;
        for (int row = 0; row < rows; ++row)
            keys[root + row] = parent(row) < 0 ? root - text.reserved : keys[root + parent(row)] + 1;
        positions.assign(keys.end() - text.count, keys.end());
        visible.assign(int64_t(text.count) * stop, 0);
        for (int row = 0; row < text.count; ++row) {
            uint8_t* sees = visible.data() + int64_t(row) * stop;
            const int prefix = is_mask(pass, tokens[row]) ? 0 : text.reserved;
            std::fill(sees + prefix, sees + root, 1);
            for (int above = rows - text.count + row; above >= 0; above = parent(above)) sees[root + above] = 1;
        }
        text.visible = visible.data();
        text.positions = positions.data();
        text.key_positions = keys.data();
    }
};

// where a row of a text stands
inline int64_t position_of(const SequenceSlice& text, int row) {
    return text.visible ? text.positions[row] : text.start - text.reserved + row;
}

}  // namespace
