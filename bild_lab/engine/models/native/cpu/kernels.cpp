// What Python calls
#include "drafting.h"

namespace {

// the `count` largest of n numbers, the largest first; of equal ones the first
inline void most_likely(const float* x, int n, int count, int64_t* out) {
    std::vector<float> best(count, -INFINITY);
    std::fill(out, out + count, 0);
    for (int i = 0; i < n; ++i) {
        if (!(x[i] > best[count - 1])) continue;
        int at = count - 1;
        for (; at > 0 && x[i] > best[at - 1]; --at) { best[at] = best[at - 1]; out[at] = out[at - 1]; }
        best[at] = x[i];
        out[at] = i;
    }
}

template <class T>
void run_heads(const Heads& heads, const float* hidden, int depth, int count, float* x, float* logits, Buffers& b,
               int64_t* tokens) {  // by every thread of a team. x: [2][depth][dim]
    const int64_t dim = padded(heads.dim, PANEL), vocab = padded(heads.vocab, PANEL);
    float *from = x, *to = x + depth * dim;
    for (int layer = 0; layer < heads.layers; ++layer) {
        for (int head = 0; head < depth; ++head) {
            const float* in = layer ? from + head * dim : hidden;
            product<T>(heads.blocks[head * heads.layers + layer], in, dim, 1, b, [&](int, int panel, vec left, vec right) {
                const vec sums[] = {activate(left, SILU), activate(right, SILU)};
                for (int i = 0; i < PANEL && panel * PANEL + i < heads.dim; ++i)
                    to[head * dim + panel * PANEL + i] = in[panel * PANEL + i] + sums[i / LANES][i % LANES];
            });
        }
        #pragma omp barrier
        std::swap(from, to);
    }
    const int alike = heads.shared ? depth : 1;  // heads that a matrix serves
    for (int head = 0; head < depth; head += alike)
        product<T>(heads.outputs[head], heads.layers ? from + head * dim : hidden, dim, alike, b,
                   [&](int row, int panel, vec left, vec right) {
                       put(logits + (head + row) * vocab, panel, heads.vocab, left, right);
                   });
    #pragma omp barrier
    Span mine = share(depth);
    for (int head = mine.first; head < mine.last; ++head)
        most_likely(logits + head * vocab, heads.vocab, count, tokens + int64_t(head) * count);
}

}  // namespace

extern "C" {

void run(const Model* model, const Pass* given) {
    Pass pass = *given;
    Rows rows;
    rows.add_all(pass);
    rows.fill(pass);
    std::vector<Layout> layouts(pass.texts);
    for (int i = 0; i < pass.texts; ++i) layouts[i].place(rows.texts[i], pass, pass.tokens + rows.texts[i].first);
    with_buffers(*model, pass, 0, [&]<class T>(Buffers& b) { forward<T>(*model, pass, b); });
}

// Draft a chain for each text: the first forward runs the pass's rows, each later one the token drafted before it
void draft_chains(const Model* model, const Pass* pass, Chain* chain) {
    Chains all(*model, *pass, chain);
    int later = 0;
    for (int i = 0; i < pass->texts; ++i) later = std::max(later, chain[i].steps);
    with_buffers(*model, all.pass, later, [&]<class T>(Buffers& b) { draft<T>(*model, all, b); });
}

// Grow a tree for each text: the first forward runs the pass's rows, each later one the most likely leaves. The logits
// have room for `width` rows of each
void grow_trees(const Model* model, const Pass* pass, Growth* growth) {
    Trees all(*model, *pass, growth);
    Pass widest = all.pass;
    int later = 0, leaves = 0;
    for (int i = 0; i < pass->texts; ++i) {
        later = std::max(later, growth[i].depth * growth[i].width);
        leaves += growth[i].width;
    }
    widest.count = std::max(widest.count, leaves);
    with_buffers(*model, widest, later, [&]<class T>(Buffers& b) { draft<T>(*model, all, b); });
    for (auto& tree : all.trees) tree.finish();
}

// The `count` most likely tokens of each of the first `depth` heads after a state: [depth][count]
void most_likely_tokens(const Heads* heads, const float* hidden, int depth, int count, int threads, int64_t* tokens) {
    const int64_t dim = padded(heads->dim, PANEL), vocab = padded(heads->vocab, PANEL);
    const int64_t shared = depth * (2 * dim + vocab), own = PANEL * PANEL + padded(depth, PANEL) * dim / 2;
    by_team(threads, heads->half, shared, own, [&](float* x, float* tiles) {
        Buffers b{};
        b.tiles = tiles;
        b.halves = reinterpret_cast<uint16_t*>(tiles + PANEL * PANEL);
        if (heads->half) run_heads<bfloat16>(*heads, hidden, depth, count, x, x + 2 * depth * dim, b, tokens);
        else run_heads<float>(*heads, hidden, depth, count, x, x + 2 * depth * dim, b, tokens);
    });
}

// Read these bytes, by all threads: the least time in which weights can be used. Returns what was read, summed
uint32_t read_all(const void* bytes, int64_t count, int threads) {
    uint32_t total = 0;
    #pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        Span mine = share(int(count / (8 * sizeof(words))));
        words sums[8] = {};
        for (int block = mine.first; block < mine.last; ++block)
            for (int i = 0; i < 8; ++i)
                sums[i] += static_cast<const loose_words*>(bytes)[int64_t(block) * 8 + i];
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < LANES; ++j) total += sums[i][j];
    }
    return total;
}

}  // extern "C"
