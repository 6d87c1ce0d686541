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

struct Sizes {
    int64_t features, inner, mixed, longest, widest;
    Sizes(const Model& model, const Pass& pass, int64_t later = 0) {
        features = padded((model.heads + 2 * model.kv_heads) * model.head_dim, PANEL);
        mixed = padded(model.heads * model.head_dim, PANEL);
        inner = padded(model.hidden, PANEL);
        widest = std::max({mixed, inner, padded(model.dim, PANEL)});
        longest = 0;
        for (int i = 0; i < pass.texts; ++i)
            longest = std::max<int64_t>({longest, pass.text[i].start + pass.text[i].count + later, pass.text[i].source});
        longest += 2 * LANES;
    }
    int64_t shared(const Model& model, const Pass& pass) const {
        return pass.count * (features + mixed + inner + 2 * padded(model.dim, PANEL));
    }
    int64_t own(const Model& model, const Pass& pass) const {
        return pass.count * padded(model.dim, PANEL) + 2 * longest + PANEL * PANEL + padded(pass.count, PANEL) * widest / 2;
    }
};

// One pass, as each thread of a team runs it: threads share the panels of a product, the rows or the heads, and wait for
// each other behind every part
template <class T>
struct Run {
    const Model& model;
    const Pass& pass;
    Buffers& b;
    const Sizes sizes;
    const int m, dim, head_dim, heads, kv_heads, both;
    float* const x;

    Run(const Model& model, const Pass& pass, Buffers& b)
        : model(model), pass(pass), b(b), sizes(model, pass), m(pass.count), dim(model.dim), head_dim(model.head_dim),
          heads(model.heads), kv_heads(model.kv_heads), both(heads + kv_heads), x(b.x) {}

    void all() {
        embed();
        bool fill = pass.fill;  // only keys and values
        for (int l = 0; l < pass.layers; ++l) {
            const int index = pass.layer[l], skipped = pass.skipped ? pass.skipped[l] : 0;
            const Layer& layer = model.layer[index];
            const bool leaves = pass.before && !fill && l + 1 < pass.layers;
            if (leaves && omp_get_thread_num() == 0) std::memcpy(pass.before, x, 4 * dim);  // x changes after barriers
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
                fill = cosine(pass.before, x, dim) > pass.bar;
                if (fill && omp_get_thread_num() == 0) *pass.ran = l + 1;
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
            const Text& text = pass.text[pass.text_of[row]];
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

    void attention(const Layer& layer, int index) {
        Span mine = share(m * heads);
        for (int task = mine.first; task < mine.last; ++task) {
            int head = task / m, row = task % m;
            const Text& text = pass.text[pass.text_of[row]];
            const int in_text = row - text.first, stop = text.start + text.count;
            const uint8_t* visible = text.visible ? text.visible + int64_t(in_text) * stop : nullptr;
            const int64_t position = position_of(text, in_text);
            const int64_t farthest = model.farthest, nearest = model.bidirectional ? -farthest : 0;
            const float* table = model.distance_bias ? model.distance_bias + head * (farthest - nearest + 1) : nullptr;
            auto sees = [&](int slot, float& bias) {
                int64_t key = visible ? text.key_positions[slot] : slot - text.reserved;
                if (visible && !visible[slot]) return false;
                int64_t distance = position - key;
                if (layer.window && key >= 0 && distance >= layer.window) return false;
                bias = table ? table[std::min(std::max(distance, nearest), farthest) - nearest] : 0.0f;
                return true;
            };
            const int64_t at = (int64_t(index) * kv_heads + head / (heads / kv_heads)) * text.capacity * head_dim;
            const int end = visible || model.bidirectional ? stop : text.start + in_text + 1;
            mix(row, head, static_cast<const T*>(text.keys) + at, static_cast<const T*>(text.values) + at, end, sees);
        }
        #pragma omp barrier
        residual(layer.out, b.mixed, sizes.mixed, layer.out_norm);
    }

    void attention_to_source(const Layer& layer, int index) {
        project(layer.cross_query, layer.cross_norm);
        Span mine = share(m * heads);
        for (int task = mine.first; task < mine.last; ++task) {
            int head = task / m, row = task % m;
            const Text& text = pass.text[pass.text_of[row]];
            const int64_t at = (int64_t(index) * heads + head) * text.source * head_dim;
            auto sees = [](int, float& bias) { bias = 0.0f; return true; };
            const T *keys = static_cast<const T*>(text.memory_keys), *values = static_cast<const T*>(text.memory_values);
            mix(row, head, keys + at, values + at, text.source, sees);
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

    // a query's attention over these keys and values, into b.mixed
    template <class Sees>
    void mix(int row, int head, const T* keys, const T* values, int stop, Sees sees) {
        attend(b.qkv + row * sizes.features + int64_t(head) * head_dim, keys, values, stop, head_dim, model.scale, sees,
               b.scores, b.seen, b.mixed + row * sizes.mixed + int64_t(head) * head_dim);
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
void forward(const Model& model, const Pass& pass, Buffers& b) {
    Run<T>(model, pass, b).all();
}

// `work<T>(buffers)` by every thread of a team; T: the weights' type. later: how many slots its later passes fill
template <class Work>
void with_buffers(const Model& model, const Pass pass, int later, Work work) {
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
        b.seen = reinterpret_cast<int*>(b.scores + sizes.longest);
        if (model.half) work.template operator()<bfloat16>(b);
        else work.template operator()<float>(b);
    });
}

// The rows that several texts run next, as one pass
struct Rows {
    std::vector<Text> texts;
    std::vector<int32_t> text_of, scored;
    std::vector<int64_t> tokens;

    void clear() {
        texts.clear();
        text_of.clear();
        scored.clear();
        tokens.clear();
    }
    void add(Text text, const int64_t* fed) {
        text.first = int32_t(tokens.size());
        for (int row = 0; row < text.count; ++row) {
            if (row >= text.count - text.scored) scored.push_back(int32_t(tokens.size()));
            text_of.push_back(int32_t(texts.size()));
            tokens.push_back(fed[row]);
        }
        texts.push_back(text);
    }
    void add_all(const Pass& pass) {
        for (int i = 0; i < pass.texts; ++i) add(pass.text[i], pass.tokens + tokens.size());
    }
    void fill(Pass& pass) const {
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
