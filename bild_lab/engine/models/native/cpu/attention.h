// What a row attends to, and attention over the keys and values of a cache
#pragma once
#include <vector>
#include "structures.h"
#include "vectors.h"

namespace {

// a query over the keys that it sees. scores, seen: room for as many
template <class T, class Sees>
inline void attend(const float* query, const T* keys, const T* values, int stop, int dim, float scale, Sees sees,
                   float* scores, int* seen, float* out) {
    int count = 0, whole = dim / LANES * LANES;
    float largest = -INFINITY;
    for (int slot = 0; slot < stop; ++slot) {
        float bias;
        if (!sees(slot, bias)) continue;
        const T* key = keys + int64_t(slot) * dim;
        vec products{};
        for (int i = 0; i < whole; i += LANES) products += load(query + i) * wide(key + i);
        float score = sum(products);
        for (int i = whole; i < dim; ++i) score += query[i] * widen(key[i]);
        score = score * scale + bias;
        seen[count] = slot;
        scores[count++] = score;
        largest = std::max(largest, score);
    }
    float total = 0;
    for (int i = 0; i < count; i += LANES) {  // there is room for a whole vector at the end
        vec e = exponential(load(scores + i) - largest);
        store(scores + i, e);
        for (int j = 0; j < LANES && i + j < count; ++j) total += e[j];
    }
    int done = 0;
    auto mix = [&]<int V>() {  // V vectors of the output: each has a sum of its own, so that none waits for another
        for (; done + V * LANES <= whole; done += V * LANES) {
            vec mixed[V] = {};
            for (int n = 0; n < count; ++n) {
                const T* value = values + int64_t(seen[n]) * dim + done;
                #pragma GCC unroll 4
                for (int v = 0; v < V; ++v) mixed[v] += scores[n] * wide(value + v * LANES);
            }
            #pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(out + done + v * LANES, mixed[v] / total);
        }
    };
    mix.template operator()<4>();
    mix.template operator()<1>();
    for (int i = whole; i < dim; ++i) {
        float mixed = 0;
        for (int n = 0; n < count; ++n) mixed += scores[n] * widen(values[int64_t(seen[n]) * dim + i]);
        out[i] = mixed / total;
    }
}

// norm of a head, then rotation, in place
inline void place(const Model& model, const Layer& layer, const Pass& pass, int64_t position, int head, float* x) {
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

inline bool is_mask(const Pass& pass, int64_t token) { return pass.masks && token >= pass.first_mask; }

// What the rows of a tree see, or those of a chain behind a prefix
struct Layout {
    std::vector<int64_t> positions, keys;
    std::vector<uint8_t> visible;

    void place(Text& text, const Pass& pass, const int64_t* tokens) {  // tokens: [count], of this text
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
inline int64_t position_of(const Text& text, int row) {
    return text.visible ? text.positions[row] : text.start - text.reserved + row;
}

}  // namespace
