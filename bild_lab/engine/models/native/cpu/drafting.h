// Drafting: which tokens follow a forward, and where a draft ends. A program alternates a forward with one such step.
// The rule of where a chain ends is `ChainProgress` of `engine/session.py`; `methods/speculative/draft_tree.py` grows the
// same trees in Python.
#pragma once
#include "forward.h"

namespace {

// the largest of n numbers, the first of them
inline int largest(const float* x, int n) {
    vec most = all(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) { vec v = load(x + i); most = select(v > most, v, most); }
    float top = most[0];
    for (int j = 1; j < LANES; ++j) top = std::max(top, most[j]);
    for (; i < n; ++i) top = std::max(top, x[i]);
    for (i = 0; i < n; ++i)
        if (x[i] == top) return i;
    return 0;  // NaN
}

// softmax of x / temperature, into `out` if there is one; returns the largest probability
inline float softmax(const float* x, int n, float top, float temperature, float* out) {
    vec total{};
    float rest = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec e = exponential((load(x + i) - top) / temperature);
        total += e;
        if (out) store(out + i, e);
    }
    for (; i < n; ++i) {
        float e = exponential(all((x[i] - top) / temperature))[0];
        rest += e;
        if (out) out[i] = e;
    }
    rest += sum(total);
    for (i = 0; out && i < n; ++i) out[i] /= rest;
    return 1.0f / rest;
}

// the first token whose cumulative probability exceeds this share of the whole
inline int64_t draw(const float* probs, int n, double uniform) {
    double total = 0, seen = 0;
    for (int i = 0; i < n; ++i) total += probs[i];
    for (int i = 0; i < n; ++i)
        if ((seen += probs[i]) > uniform * total) return i;
    return n - 1;
}

// whether this token ends a chain or a branch
template <class Draft>
inline bool is_end(const Draft& draft, int64_t token) {
    const int64_t* last = draft.end_tokens + draft.end_count;
    return std::find(draft.end_tokens, last, token) != last;
}

// the token that this row of the head scores
inline int64_t token_of(const Model& model, int64_t row) { return model.tokens ? model.tokens[row] : row; }

// one token after the forward that has just run, by the rule of `ChainProgress`; returns whether the chain goes on
inline bool choose(const Model& model, ChainDraft& chain, const float* logits) {
    const int vocab = model.vocab;
    int at = chain.forwards++, best = largest(logits, vocab);
    float* own = chain.unscaled_probs ? chain.unscaled_probs + int64_t(at) * vocab : nullptr;
    if (chain.has_threshold || own) chain.confidences[at] = softmax(logits, vocab, logits[best], 1.0f, own);
    int64_t token = best;
    if (chain.temperature > 0) {
        float* probs = chain.probs + int64_t(at) * vocab;
        softmax(logits, vocab, logits[best], chain.temperature, probs);
        token = draw(probs, vocab, chain.uniforms[at]);
    }
    if (chain.has_threshold && double(chain.confidences[at]) < chain.threshold) {
        chain.fallback = 1;
        return false;
    }
    chain.tokens[chain.drafted++] = token = token_of(model, token);
    return chain.drafted < chain.steps && !is_end(chain, token);
}

// Chains of several texts. Those that have ended leave the pass
struct Chains {
    const Model& model;
    ForwardPass pass;
    std::vector<SequenceSlice> texts;
    std::vector<ChainDraft*> chains;
    std::vector<char> goes_on;
    Rows rows;

    Chains(const Model& model, const ForwardPass& first, ChainDraft* chain)
        : model(model), pass(first), texts(first.text, first.text + first.texts), goes_on(first.texts, 1) {
        for (int i = 0; i < first.texts; ++i) chains.push_back(chain + i);
        rows.add_all(first);
        rows.fill(pass);
    }
    int waiting() const { return int(texts.size()); }
    void read(int i, const float* x) {
        ChainDraft& chain = *chains[i];
        const SequenceSlice& text = pass.text[i];
        const int64_t dim = model.dim;
        if (chain.states) std::memcpy(chain.states + chain.rows * dim, x + text.first * dim, 4 * text.count * dim);
        chain.rows += text.count;
        goes_on[i] = choose(model, chain, pass.logits + int64_t(i) * model.vocab);
    }
    void next() {  // by one thread
        rows.clear();
        int kept = 0;
        for (int i = 0; i < int(texts.size()); ++i) {
            if (!goes_on[i]) continue;
            texts[kept] = texts[i];
            chains[kept] = chains[i];
            texts[kept].start += texts[kept].count;
            texts[kept].count = 1;
            rows.add(texts[kept], chains[kept]->tokens + chains[kept]->drafted - 1);
            ++kept;
        }
        texts.resize(kept);
        chains.resize(kept);
        rows.fill(pass);
    }
};

struct Node { int64_t token; int32_t parent, row; double chance; };

// A growing tree. All threads of a team `read`; one of them does the rest
struct GrowingTree {
    const Model& model;
    const ForwardPass& pass;
    TreeDraft& tree_draft;
    SequenceSlice text;            // of the next level
    float* logits;          // of the level that has just run
    std::vector<Node> nodes;
    std::vector<int> leaves;       // nodes whose rows are next
    std::vector<int64_t> fed;      // their tokens
    std::vector<int64_t> above;    // the parent's row, of each row that ran after the text
    Layout layout;
    std::vector<double> chances;   // [width][children], of the level that has just run
    std::vector<int64_t> tokens;   // the same
    std::vector<float> confidences;
    int child_count;               // of a leaf
    bool goes_on = true;

    GrowingTree(const Model& model, const ForwardPass& pass, const SequenceSlice& first, TreeDraft& tree_draft, float* logits)
        : model(model), pass(pass), tree_draft(tree_draft), text(first), logits(logits), leaves{-1},
          child_count(std::min(tree_draft.children, model.vocab)) {
        chances.resize(tree_draft.width * child_count);
        tokens.resize(tree_draft.width * child_count);
        confidences.resize(tree_draft.width);
    }

    // the most likely tokens of a row of logits, which are overwritten
    void read(int row) {
        float* logits = this->logits + int64_t(row) * model.vocab;
        int best = largest(logits, model.vocab);
        const float top = logits[best], most = softmax(logits, model.vocab, top, tree_draft.temperature, nullptr);
        confidences[row] = tree_draft.temperature == 1.0f ? most : softmax(logits, model.vocab, top, 1.0f, nullptr);
        for (int child = 0; child < child_count; ++child) {
            if (child) best = largest(logits, model.vocab);
            tokens[row * child_count + child] = token_of(model, best);
            const float chance = exponential(all((logits[best] - top) / tree_draft.temperature))[0];  // never quite 0
            chances[row * child_count + child] = logits[best] > -INFINITY ? most * chance : 0.0f;
            logits[best] = -INFINITY;
        }
    }

    void next() {  // by one thread: children of the level that has run, and the rows of the next
        tree_draft.row_counts[tree_draft.forwards++] = text.count;
        std::vector<int> growing;
        for (int row = 0; row < int(leaves.size()); ++row) {
            const int leaf = leaves[row];
            const double before = leaf < 0 ? 1.0 : nodes[leaf].chance;
            const bool pruned = tree_draft.prunes && double(confidences[row]) >= tree_draft.prune_confidence;
            for (int child = 0; child < (pruned ? 1 : child_count); ++child) {
                const int64_t token = tokens[row * child_count + child];
                const double chance = before * chances[row * child_count + child];
                if (!(chances[row * child_count + child] > 0.0)) continue;
                if (!is_end(tree_draft, token) && chance >= tree_draft.min_prob) growing.push_back(int(nodes.size()));
                nodes.push_back({token, leaf, -1, chance});
            }
        }
        leaves = most_likely(growing, tree_draft.width);
        goes_on = !leaves.empty() && tree_draft.forwards < tree_draft.depth;
        if (goes_on) lay_out();
    }

    // the most likely of these nodes, in the order grown
    std::vector<int> most_likely(std::vector<int> some, int most) const {
        std::stable_sort(some.begin(), some.end(), [&](int a, int b) { return nodes[a].chance > nodes[b].chance; });
        if (int(some.size()) > most) some.resize(most);
        std::sort(some.begin(), some.end());
        return some;
    }

    void lay_out() {
        text.start += text.count;
        text.count = int(leaves.size());
        fed.clear();
        for (int leaf : leaves) {
            nodes[leaf].row = int(above.size());
            fed.push_back(nodes[leaf].token);
            above.push_back(nodes[leaf].parent < 0 ? -1 : nodes[nodes[leaf].parent].row);
        }
        text.tree = int(above.size());
        text.scored = text.count;
        text.parents = above.data();
        layout.place(text, pass, fed.data());
    }

    void finish() {
        std::vector<int> every(nodes.size());
        for (int node = 0; node < int(nodes.size()); ++node) every[node] = node;
        for (int node : most_likely(every, tree_draft.nodes)) {
            const int place = tree_draft.grown++;
            tree_draft.tokens[place] = nodes[node].token;
            tree_draft.parents[place] = nodes[node].parent < 0 ? -1 : every[nodes[node].parent];
            tree_draft.rows[place] = nodes[node].row;
            every[node] = place;  // a parent comes before its children
        }
    }
};

// Trees of several texts, level by level. Those that have ended leave the pass
struct Trees {
    ForwardPass pass;
    std::vector<GrowingTree> trees;
    std::vector<GrowingTree*> alive;
    std::vector<std::pair<GrowingTree*, int>> found;  // of each row with logits: its tree, and its place in the level
    Rows rows;

    Trees(const Model& model, const ForwardPass& first, TreeDraft* tree_draft) : pass(first) {
        trees.reserve(first.texts);
        for (int i = 0; i < first.texts; ++i)
            trees.emplace_back(model, first, first.text[i], tree_draft[i], pass.logits + int64_t(i) * model.vocab);
        for (auto& tree : trees) {
            alive.push_back(&tree);
            found.push_back({&tree, 0});
        }
        rows.add_all(first);
        rows.fill(pass);
    }
    int waiting() const { return int(found.size()); }
    void read(int i, const float*) { found[i].first->read(found[i].second); }
    void next() {  // by one thread
        rows.clear();
        found.clear();
        std::vector<GrowingTree*> before;
        before.swap(alive);
        for (GrowingTree* tree : before) {
            tree->next();
            if (!tree->goes_on) continue;
            tree->logits = pass.logits + int64_t(found.size()) * tree->model.vocab;
            for (int row = 0; row < int(tree->leaves.size()); ++row) found.push_back({tree, row});
            rows.add(tree->text, tree->fed.data());
            alive.push_back(tree);
        }
        rows.fill(pass);
    }
};

// Chains or trees, step by step until the last has ended: a forward, then what follows from each row of logits
template <class T, class Drafts>
void draft(const Model& model, Drafts& all, Buffers& b) {  // by every thread of a team
    while (all.waiting()) {
        forward<T>(model, all.pass, b);
        Span mine = share(all.waiting());
        for (int i = mine.first; i < mine.last; ++i) all.read(i, b.x);
        #pragma omp barrier
        #pragma omp master
        all.next();
        #pragma omp barrier
    }
}

}  // namespace
