// What a row attends to, and attention over the keys and values of a cache
#pragma once
#include <vector>
#include "structures.h"
#include "vectors.h"

namespace {

// the sums of up to four vectors, in the first lanes; each in the order of `sum`
template <int Q>
inline vec sums(const vec (&v)[Q]) {
    if constexpr (Q == 1) return all(sum(v[0]));
#if defined(__AVX512F__)
    auto folded = [](vec x, vec y) {
        return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    const vec x = folded(v[0], v[1 % Q]), y = folded(v[2 % Q], v[3 % Q]);
    vec all = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return __builtin_shufflevector(all, all, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
#else
    auto folded = [](vec v, vec w) {
        const floats8 x = v.low + v.high, y = w.low + w.high;
        floats8 all = __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11) +
                      __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
        all += __builtin_shufflevector(all, all, 2, 3, 0, 1, 6, 7, 4, 5);
        all += __builtin_shufflevector(all, all, 1, 0, 3, 2, 5, 4, 7, 6);
        return all;
    };
    const floats8 x = folded(v[0], v[1 % Q]), y = folded(v[2 % Q], v[3 % Q]);
    const floats8 four = __builtin_shufflevector(x, y, 0, 4, 8, 12, 0, 4, 8, 12);
    return {four, four};
#endif
}

// Q queries over the keys that they see; what is added to a query's sums has one order, whatever Q is. sees: whether any
// sees a slot, and each one's bias, minus infinity for one that does not. scores, seen: room for Q times as many, as many
template <int Q, class T, class Sees>
inline void attend(const float* const (&query)[Q], const T* keys, const T* values, int begin, int stop, int dim,
                   float scale, Sees sees, float* scores, int* seen, float* const (&out)[Q]) {
    int count = 0, whole = dim / LANES * LANES;
    vec largest = all(-INFINITY), total{}, top{};
    for (int slot = begin; slot < stop; ++slot) {
        vec bias{}, products[Q] = {};
        if (!sees(slot, bias)) continue;
        const T* key = keys + int64_t(slot) * dim;
        for (int i = 0; i < whole; i += LANES) {
            const vec wider = wide(key + i);
            for (int q = 0; q < Q; ++q) products[q] += load(query[q] + i) * wider;
        }
        vec score = sums(products);
        for (int i = whole; i < dim; ++i)
            for (int q = 0; q < Q; ++q) score[q] = std::fma(query[q][i], widen(key[i]), score[q]);
        score = select(bias > -INFINITY, score * scale + bias, bias);
        largest = select(score > largest, score, largest);
        store(scores + count * Q, score);  // there is room for a whole vector at the end
        seen[count++] = slot;
    }
    for (int i = 0; i < LANES; ++i) top[i] = largest[i % Q];
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
