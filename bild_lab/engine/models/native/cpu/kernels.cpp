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
               int64_t* tokens, float* scores) {  // by every thread of a team. x: [2][depth][dim]
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
    for (int head = mine.first; head < mine.last; ++head) {
        if (scores) std::memcpy(scores + int64_t(head) * heads.vocab, logits + head * vocab, 4 * int64_t(heads.vocab));
        else most_likely(logits + head * vocab, heads.vocab, count, tokens + int64_t(head) * count);
    }
}

// Each node's token, below each parent the most likely by the scores of its depth and the parent's bias
template <class T>
void run_markov(const Markov& markov, const float* scores, const int32_t* parents, int n, int64_t last, float* row,
                Buffers& b, int64_t* tokens) {  // by every thread of a team
    const int32_t *depths = parents + n, *ranks = depths + n;
    for (int parent = -1; parent < n; ++parent) {
        int widest = 0, depth = 0;
        for (int node = parent + 1; node < n; ++node)
            if (parents[node] == parent) { widest = std::max(widest, ranks[node] + 1); depth = depths[node]; }
        if (!widest) continue;
        const float *x = markov.before + (parent < 0 ? last : tokens[parent]) * markov.stride;
        const float *own = scores + int64_t(depth) * markov.vocab;
        product<T>(*markov.after, x, markov.stride, 1, b, [&](int, int panel, vec left, vec right) {
            put(row, panel, markov.vocab, left, right);
            for (int i = panel * PANEL; i < std::min((panel + 1) * PANEL, markov.vocab); ++i) row[i] += own[i];
        });
        #pragma omp barrier
        #pragma omp single  // the others wait
        {
            std::vector<int64_t> best(widest);
            most_likely(row, markov.vocab, widest, best.data());
            for (int node = parent + 1; node < n; ++node)
                if (parents[node] == parent) tokens[node] = best[ranks[node]];
        }
    }
}

// 0 if a pass reads only what there is: an embedding of each token, a slot and a position of each row, with `later` rows
// of each text behind them. Otherwise the place of the first token without an embedding, from 1, or minus that of the
// first text that is too long
inline int readable(const Model& model, const ForwardPass& pass, const int64_t* later) {
    const int64_t* tokens = pass.tokens;
    const int64_t end = pass.masks ? pass.first_mask + pass.mask_count : model.known;
    for (int i = 0; i < pass.texts; ++i) {
        const SequenceSlice& text = pass.text[i];
        for (int row = 0; row < text.count && !pass.states; ++row)
            if (tokens[row] < 0 || tokens[row] >= end) return int(tokens + row - pass.tokens) + 1;
        tokens += text.count;
        const int64_t slots = text.start + text.count + (later ? later[i] : 0);
        if (slots > text.capacity || (model.rotary && slots - text.reserved > pass.table)) return -i - 1;
        if (later && !model.tokens && model.vocab > model.known) return -i - 1;
    }
    return 0;
}

}  // namespace

extern "C" {

int run(const Model* model, const ForwardPass* given) {
    if (int refused = readable(*model, *given, nullptr)) return refused;
    ForwardPass pass = *given;
    Rows rows;
    rows.add_all(pass);
    rows.fill(pass);
    std::vector<Layout> layouts(pass.texts);
    for (int i = 0; i < pass.texts; ++i) layouts[i].place(rows.texts[i], pass, pass.tokens + rows.texts[i].first);
    with_buffers(*model, pass, 0, [&]<class T>(Buffers& b) { forward<T>(*model, pass, b); });
    return 0;
}

// Draft a chain for each text: the first forward runs the pass's rows, each later one the token drafted before it
int draft_chains(const Model* model, const ForwardPass* pass, ChainDraft* chain) {
    std::vector<int64_t> rows(pass->texts);
    for (int i = 0; i < pass->texts; ++i) rows[i] = chain[i].steps - 1;
    if (int refused = readable(*model, *pass, rows.data())) return refused;
    Chains all(*model, *pass, chain);
    int later = 0;
    for (int i = 0; i < pass->texts; ++i) later = std::max(later, chain[i].steps);
    with_buffers(*model, all.pass, later, [&]<class T>(Buffers& b) { draft<T>(*model, all, b); });
    return 0;
}

// Grow a tree for each text: the first forward runs the pass's rows, each later one the most likely leaves. The logits
// have room for `width` rows of each
int grow_trees(const Model* model, const ForwardPass* pass, TreeDraft* tree_draft) {
    std::vector<int64_t> rows(pass->texts);
    for (int i = 0; i < pass->texts; ++i) rows[i] = int64_t(tree_draft[i].depth - 1) * tree_draft[i].width;
    if (int refused = readable(*model, *pass, rows.data())) return refused;
    Trees all(*model, *pass, tree_draft);
    ForwardPass widest = all.pass;
    int later = 0, leaves = 0;
    for (int i = 0; i < pass->texts; ++i) {
        later = std::max(later, tree_draft[i].depth * tree_draft[i].width);
        leaves += tree_draft[i].width;
    }
    widest.count = std::max(widest.count, leaves);
    with_buffers(*model, widest, later, [&]<class T>(Buffers& b) { draft<T>(*model, all, b); });
    for (auto& tree : all.trees) tree.finish();
    return 0;
}

// The `count` most likely tokens of each of the first `depth` heads after a state: [depth][count]; or their logits, if
// there are `scores` [depth][vocab]
void most_likely_tokens(const Heads* heads, const float* hidden, int depth, int count, int threads, int64_t* tokens,
                        float* scores) {
    const int64_t dim = padded(heads->dim, PANEL), vocab = padded(heads->vocab, PANEL);
    const int64_t shared = depth * (2 * dim + vocab), own = PANEL * PANEL + padded(depth, PANEL) * dim / 2;
    by_team(threads, heads->half, shared, own, [&](float* x, float* tiles) {
        Buffers b{};
        b.tiles = tiles;
        b.halves = reinterpret_cast<uint16_t*>(tiles + PANEL * PANEL);
        if (heads->half) run_heads<bfloat16>(*heads, hidden, depth, count, x, x + 2 * depth * dim, b, tokens, scores);
        else run_heads<float>(*heads, hidden, depth, count, x, x + 2 * depth * dim, b, tokens, scores);
    });
}

// The tokens of a tree. nodes: [3][n], the parents, depths and ranks. last: the token before the tree
int draft_by_parents(const Markov* markov, const float* scores, const int32_t* nodes, int n, int64_t last, int threads,
                     int64_t* tokens) {
    if (last < 0 || last >= markov->known) return 1;
    const int64_t own = PANEL * PANEL + PANEL * int64_t(markov->stride) / 2;
    by_team(threads, markov->half, padded(markov->vocab, PANEL), own, [&](float* row, float* tiles) {
        Buffers b{};
        b.tiles = tiles;
        b.halves = reinterpret_cast<uint16_t*>(tiles + PANEL * PANEL);
        if (markov->half) run_markov<bfloat16>(*markov, scores, nodes, n, last, row, b, tokens);
        else run_markov<float>(*markov, scores, nodes, n, last, row, b, tokens);
    });
    return 0;
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
                sums[i] += load_words(static_cast<const char*>(bytes) + (int64_t(block) * 8 + i) * sizeof(words));
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < LANES; ++j) total += sums[i][j];
    }
    return total;
}

}  // extern "C"
