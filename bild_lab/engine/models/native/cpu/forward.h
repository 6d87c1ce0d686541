// One forward pass of a decoder or an encoder: every layer in one call, its weights read once, in order.
//
// Activations are float32; weights, keys and values are float32 or bfloat16. Each output of a row is summed in one
// order whatever rows run beside it, so a row's result does not depend on how many rows a pass has, nor on whose they
// are: a pass may hold rows of several texts, each with its own cache, positions and source.
#pragma once
#include <vector>
#include "attention.h"
#include "products.h"

namespace {

constexpr int TOGETHER = 4;  // queries over the same keys

struct Sizes {
    int64_t features, inner, mixed, longest, widest;
    Sizes(const Model& model, const ForwardPass& pass, int64_t later = 0) {
        features = padded((model.heads + 2 * model.kv_heads) * model.head_dim, PANEL);
        mixed = padded(model.heads * model.head_dim, PANEL);
        inner = padded(model.hidden, PANEL);
        widest = std::max({mixed, inner, padded(model.dim, PANEL)});
        longest = 0;
        for (int i = 0; i < pass.texts; ++i)
            longest = std::max<int64_t>({longest, pass.text[i].start + pass.text[i].count + later, pass.text[i].source});
        longest += 2 * LANES;
    }
    int64_t shared(const Model& model, const ForwardPass& pass) const {
        return pass.count * (features + mixed + inner + 2 * padded(model.dim, PANEL));
    }
    int64_t own(const Model& model, const ForwardPass& pass) const {
        return pass.count * padded(model.dim, PANEL) + (TOGETHER + 1) * longest + PANEL * PANEL +
               padded(pass.count, PANEL) * widest / 2;
    }
};

// One pass, as each thread of a team runs it: threads share the panels of a product, the rows or the heads, and wait for
// each other behind every part
template <class T>
struct Run {
    const Model& model;
    const ForwardPass& pass;
    Buffers& b;
    const Sizes sizes;
    const int m, dim, head_dim, heads, kv_heads, both;
    float* const x;

    Run(const Model& model, const ForwardPass& pass, Buffers& b)
        : model(model), pass(pass), b(b), sizes(model, pass), m(pass.count), dim(model.dim), head_dim(model.head_dim),
          heads(model.heads), kv_heads(model.kv_heads), both(heads + kv_heads), x(b.x) {}

    void all() {
        embed();
        bool fill = pass.fill;  // only keys and values
        for (int l = 0; l < pass.layers; ++l) {
            const int index = pass.layer[l], skipped = pass.skipped ? pass.skipped[l] : 0;
            const Layer& layer = model.layer[index];
            const bool leaves = pass.layer_input && !fill && l + 1 < pass.layers;
            if (leaves && omp_get_thread_num() == 0) std::memcpy(pass.layer_input, x, 4 * dim);  // x changes after barriers
            if (!(skipped & 1)) {
                keys_and_values(layer, index);
                if (fill) continue;
                attention(layer, index);
                if (layer.cross_query.packed) attention_to_source(layer, index);
            }
            if (!(skipped & 2)) feed_forward(layer);
            if (pass.hidden) {
                Span rows = share(m * dim);
                std::memcpy(pass.hidden + int64_t(l) * m * dim + rows.first, x + rows.first, 4 * (rows.last - rows.first));
                #pragma omp barrier
            }
            if (leaves) {  // every thread finds the same
                fill = cosine(pass.layer_input, x, dim) > pass.exit_threshold;
                if (fill && omp_get_thread_num() == 0) *pass.layers_run = l + 1;
                #pragma omp barrier
            }
        }
        if (pass.scored) score();
    }

    void embed() {
        Span rows = share(m);
        for (int row = rows.first; row < rows.last; ++row) {
            if (pass.states) {
                std::memcpy(x + int64_t(row) * dim, pass.states + int64_t(row) * dim, 4 * dim);
                continue;
            }
            const bool mask = is_mask(pass, pass.tokens[row]);
            if (!mask && read_row(model.embedding, pass.tokens[row], x + int64_t(row) * dim)) {
                for (int i = 0; i < dim; ++i) x[int64_t(row) * dim + i] *= model.embedding_scale;
                continue;
            }
            const T* table = static_cast<const T*>(mask ? pass.masks : model.embedding.packed);
            const T* embedding = table + (pass.tokens[row] - (mask ? pass.first_mask : 0)) * dim;
            const float scale = mask ? 1.0f : model.embedding_scale;
            for (int i = 0; i < dim; ++i) x[int64_t(row) * dim + i] = widen(embedding[i]) * scale;
        }
        #pragma omp barrier
    }

    // queries, keys and values, normed and rotated; keys and values go to the cache
    void keys_and_values(const Layer& layer, int index) {
        project(layer.qkv, layer.norm);
        Span mine = share(m * (both + kv_heads));
        for (int task = mine.first; task < mine.last; ++task) {
            int row = task / (both + kv_heads), head = task % (both + kv_heads);
            float* from = b.qkv + row * sizes.features + int64_t(head) * head_dim;
            const SequenceSlice& text = pass.text[pass.text_of[row]];
            const int at = row - text.first;  // in its text
            if (head < both) place(model, layer, pass, position_of(text, at), head, from);
            if (head < heads) continue;
            const int64_t cached = int64_t(index) * kv_heads + (head < both ? head - heads : head - both);
            T* to = static_cast<T*>(head < both ? text.keys : text.values) +
                    (cached * text.capacity + text.start + at) * head_dim;
            for (int i = 0; i < head_dim; ++i) narrow(from[i], to + i);
        }
        #pragma omp barrier
    }

    // the heads that share keys, in one row after another: so many at once, if that leaves work for every thread
    void attention(const Layer& layer, int index) {
        const int group = heads / kv_heads, pairs = m * group, threads = omp_get_num_threads();
        const int size = kv_heads * padded(pairs, TOGETHER) / TOGETHER < threads ? 1 : TOGETHER;
        const int blocks = int(padded(pairs, size)) / size;
        for (int task = omp_get_thread_num(); task < kv_heads * blocks; task += threads) {
            const int shared = task / blocks, first = task % blocks * size, end = std::min(first + size, pairs);
            if (end - first > 1 && pass.text_of[first / group] == pass.text_of[(end - 1) / group])
                attend_to_text<TOGETHER>(layer, index, shared, first, end);
            else
                for (int pair = first; pair < end; ++pair) attend_to_text<1>(layer, index, shared, pair, end);
        }
        #pragma omp barrier
        residual(layer.out, b.mixed, sizes.mixed, layer.out_norm);
    }

    // Q of a text's pairs of row and head, the last one again in the places that are left
    template <int Q>
    void attend_to_text(const Layer& layer, int index, int shared, int first, int end) {
        const int group = heads / kv_heads;
        const SequenceSlice& text = pass.text[pass.text_of[first / group]];
        const int64_t stop = text.start + text.count, farthest = model.farthest, nearest = model.bidirectional ? -farthest : 0;
        const float *query[Q], *table[Q];
        const uint8_t* visible[Q];
        float* out[Q];
        int64_t position[Q], ends[Q], last = 0, begin = layer.window && !text.reserved ? stop : 0;
        for (int q = 0; q < Q; ++q) {
            const int pair = std::min(first + q, end - 1), row = pair / group, head = shared * group + pair % group;
            const int in_text = row - text.first;
            query[q] = b.qkv + row * sizes.features + int64_t(head) * head_dim;
            out[q] = b.mixed + row * sizes.mixed + int64_t(head) * head_dim;
            table[q] = model.distance_bias ? model.distance_bias + head * (farthest - nearest + 1) : nullptr;
            visible[q] = text.visible ? text.visible + in_text * stop : nullptr;
            position[q] = position_of(text, in_text);
            ends[q] = text.visible || model.bidirectional ? stop : text.start + in_text + 1;
            last = std::max(last, ends[q]);
            // a slot's position is at most its number, so none before this one is in the window
            begin = std::min(begin, std::max<int64_t>(0, position[q] - layer.window + 1));
        }
        auto sees = [&](int slot, vec& bias) {
            const int64_t key = text.visible ? text.key_positions[slot] : slot - text.reserved;
            bool any = false;
            for (int q = 0; q < Q; ++q) {
                const int64_t distance = position[q] - key;
                if (slot >= ends[q] || (text.visible && !visible[q][slot]) ||
                    (layer.window && key >= 0 && distance >= layer.window)) { bias[q] = -INFINITY; continue; }
                if (table[q]) bias[q] = table[q][std::min(std::max(distance, nearest), farthest) - nearest];
                any = true;
            }
            return any;
        };
        Span in_full{0, 0};
        if (!model.distance_bias) {
            const int rows = text.parents ? text.tree : text.count;
            in_full.first = text.reserved;
            if (layer.window)
                in_full.first += std::max<int64_t>(0, *std::max_element(position, position + Q) - layer.window + 1);
            in_full.last = text.visible ? stop - rows : *std::min_element(ends, ends + Q);
        }
        const int64_t at = (int64_t(index) * kv_heads + shared) * text.capacity * head_dim;
        attend(query, static_cast<const T*>(text.keys) + at, static_cast<const T*>(text.values) + at, int(begin), int(last),
               in_full, head_dim, model.scale, sees, b.scores, b.seen, out);
    }

    void attention_to_source(const Layer& layer, int index) {
        project(layer.cross_query, layer.cross_norm);
        Span mine = share(m * heads);
        for (int task = mine.first; task < mine.last; ++task) {
            int head = task / m, row = task % m;
            const SequenceSlice& text = pass.text[pass.text_of[row]];
            const int64_t at = (int64_t(index) * heads + head) * text.source * head_dim;
            const T *keys = static_cast<const T*>(text.memory_keys), *values = static_cast<const T*>(text.memory_values);
            const float* query[] = {b.qkv + row * sizes.features + int64_t(head) * head_dim};
            float* out[] = {b.mixed + row * sizes.mixed + int64_t(head) * head_dim};
            attend(query, keys + at, values + at, 0, text.source, {0, int(text.source)}, head_dim, model.scale,
                   [](int, vec&) { return true; }, b.scores, b.seen, out);
        }
        #pragma omp barrier
        residual(layer.cross_out, b.mixed, sizes.mixed, nullptr);
    }

    void feed_forward(const Layer& layer) {
        const int kind = model.activation;
        if (model.gated)  // a panel holds 16 columns of the gate, then the same 16 of what it gates
            product<T>(layer.inner, normed(layer.feed_norm), dim, m, b, [&](int row, int panel, vec gate, vec up) {
                store(b.inner + row * sizes.inner + panel * LANES, activate(gate, kind) * up);
            });
        else
            product<T>(layer.inner, normed(layer.feed_norm), dim, m, b, [&](int row, int panel, vec left, vec right) {
                put(b.inner + row * sizes.inner, panel, layer.inner.outputs, activate(left, kind), activate(right, kind));
            });
        #pragma omp barrier
        residual(layer.outer, b.inner, sizes.inner, layer.feed_out_norm);
    }

    void score() {
        for (int r = 0; r < pass.scored; ++r)
            normalize(x + int64_t(pass.scored_row[r]) * dim, model.final_norm, model.epsilon, dim,
                      b.normed + int64_t(r) * dim, model.final_scale);
        product<T>(model.head, b.normed, dim, pass.scored, b, [&](int row, int panel, vec left, vec right) {
            put(pass.logits + int64_t(row) * model.vocab, panel, model.vocab, left, right);
        });
        if (omp_get_thread_num() == 0 && pass.head_input)
            std::memcpy(pass.head_input, b.normed, 4 * int64_t(pass.scored) * dim);
        #pragma omp barrier
    }

    const float* normed(const float* weight) {
        for (int r = 0; r < m; ++r)
            normalize(x + int64_t(r) * dim, weight, model.epsilon, dim, b.normed + int64_t(r) * dim);
        return b.normed;
    }

    // the normed rows times a matrix, into b.qkv
    void project(const Matrix& matrix, const float* norm) {
        product<T>(matrix, normed(norm), dim, m, b, [&](int row, int panel, vec left, vec right) {
            put(b.qkv + row * sizes.features, panel, matrix.outputs, left, right);
        });
        #pragma omp barrier
    }

    // what a block adds to the residual stream, through the norm after it if there is one
    void residual(const Matrix& matrix, const float* in, int stride, const float* norm) {
        if (!norm) {
            product<T>(matrix, in, stride, m, b, [&](int row, int panel, vec left, vec right) {
                add(x + int64_t(row) * dim, panel, dim, left, right);
            });
            #pragma omp barrier
            return;
        }
        product<T>(matrix, in, stride, m, b, [&](int row, int panel, vec left, vec right) {
            put(b.block + int64_t(row) * dim, panel, dim, left, right);
        });
        #pragma omp barrier
        Span rows = share(m);
        for (int row = rows.first; row < rows.last; ++row) {
            normalize(b.block + int64_t(row) * dim, norm, model.epsilon, dim, b.normed);
            for (int i = 0; i < dim; ++i) x[int64_t(row) * dim + i] += b.normed[i];
        }
        #pragma omp barrier
    }
};

template <class T>
void forward(const Model& model, const ForwardPass& pass, Buffers& b) {
    Run<T>(model, pass, b).all();
}

// `work<T>(buffers)` by every thread of a team; T: the weights' type. later: how many slots its later passes fill
template <class Work>
void with_buffers(const Model& model, const ForwardPass pass, int later, Work work) {
    const Sizes sizes(model, pass, later);
    by_team(pass.threads, model.half, sizes.shared(model, pass), sizes.own(model, pass), [&](float* shared, float* own) {
        Buffers b;
        b.x = shared;
        b.qkv = b.x + pass.count * padded(model.dim, PANEL);
        b.mixed = b.qkv + pass.count * sizes.features;
        b.inner = b.mixed + pass.count * sizes.mixed;
        b.block = b.inner + pass.count * sizes.inner;
        b.normed = own;
        b.tiles = b.normed + pass.count * padded(model.dim, PANEL);
        b.halves = reinterpret_cast<uint16_t*>(b.tiles + PANEL * PANEL);
        b.scores = b.tiles + PANEL * PANEL + padded(pass.count, PANEL) * sizes.widest / 2;
        b.seen = reinterpret_cast<int*>(b.scores + TOGETHER * sizes.longest);
        if (model.half) work.template operator()<bfloat16>(b);
        else work.template operator()<float>(b);
    });
}

// The rows that several texts run next, as one pass
struct Rows {
    std::vector<SequenceSlice> texts;
    std::vector<int32_t> text_of, scored;
    std::vector<int64_t> tokens;

    void clear() {
        texts.clear();
        text_of.clear();
        scored.clear();
        tokens.clear();
    }
    void add(SequenceSlice text, const int64_t* fed) {
        text.first = int32_t(tokens.size());
        for (int row = 0; row < text.count; ++row) {
            if (row >= text.count - text.scored) scored.push_back(int32_t(tokens.size()));
            text_of.push_back(int32_t(texts.size()));
            tokens.push_back(fed[row]);
        }
        texts.push_back(text);
    }
    void add_all(const ForwardPass& pass) {
        for (int i = 0; i < pass.texts; ++i) add(pass.text[i], pass.tokens + tokens.size());
    }
    void fill(ForwardPass& pass) const {
        pass.count = int32_t(tokens.size());
        pass.texts = int32_t(texts.size());
        pass.scored = int32_t(scored.size());
        pass.text = texts.data();
        pass.text_of = text_of.data();
        pass.scored_row = scored.data();
        pass.tokens = tokens.data();
    }
};

}  // namespace
