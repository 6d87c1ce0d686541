// What Python hands to the kernels. `structures.py` reads these declarations: `const type *one, *other;` or `type one;`
#pragma once
#include <cstdint>

extern "C" {

// packed: panels of 32 outputs. float32: [panels][in / 2][2][32]; bfloat16: [panels][in / 2][32][2], where the inputs
// are padded to a multiple of 32. type: 0, or GGML's of the blocks of `quantized.h`: [panels][blocks]. bias: in the
// order of the panels' outputs. next: further panels, of another type, of the same outputs; first: the first of these
struct Matrix {
    const void* packed;
    const float* bias;
    const Matrix* next;
    int32_t outputs, inputs, type, first, panels;
};

struct Layer {
    const float *norm, *head_norm, *out_norm, *cross_norm, *feed_norm, *feed_out_norm;
    Matrix qkv, out, cross_query, cross_out, inner, outer;
    int32_t window, kind;  // window: 0 for none. kind: which rotation
};

struct Model {
    int32_t dim, heads, kv_heads, head_dim, hidden, vocab, half, activation, gated, rotary, farthest,
        bidirectional;
    float epsilon, scale, final_scale, embedding_scale;
    const Layer* layer;
    const float* final_norm;
    Matrix head, embedding;     // head: its rows may be some tokens'. embedding: of type 0, packed is [vocab][dim]
    int64_t known;              // how many rows the embedding has
    const int64_t* tokens;      // [vocab]: of each row of the head, or null if it is its number
    const float* distance_bias; // [heads][farthest + 1] by query minus key, or null; bidirectional: [heads][2 farthest + 1]
};

// Some rows of one text, and its cache
struct SequenceSlice {
    int32_t count, start, reserved, source;  // start: the cache slot of the first row
    int32_t scored, tree;         // for how many of the last rows logits are wanted; rows of its tree, these are the last
    int64_t capacity;
    const int64_t* parents;       // [tree]: an earlier row of the tree, or -1 after the text; null for a chain
    void *keys, *values;          // [layers][kv_heads][capacity][head_dim]
    const void *memory_keys, *memory_values;  // [layers][heads][source][head_dim]
    // made by the kernels
    const uint8_t* visible;       // [count][start + count], or null for a chain without a prefix: see `Layout`
    const int64_t* positions;     // [count], with visible
    const int64_t* key_positions; // [start + count], with visible
    int32_t first;                // of the pass's rows
};

struct ForwardPass {
    int32_t texts, layers, threads, fill;
    const SequenceSlice* text;    // [texts], in the order of their rows
    const int64_t* tokens;        // [count]
    const float* states;          // [count][dim]: what the first layer reads, or null for the tokens' embeddings
    const void* masks;            // [..][dim]: embeddings of the token ids from first_mask on, which alone see the prefix;
    int64_t first_mask, mask_count;  // or null; how many there are
    const int32_t* layer;         // [layers]
    const int32_t* skipped;       // [layers], or null: 1 for no attention, 2 for no feed-forward, 3 for neither
    const float *cos, *sin;       // [kinds][table][head_dim]: of every position
    int64_t table;
    float *hidden;                // [layers][count][dim], or null
    float *head_input, *logits;   // [scored][dim], [scored][vocab]
    float* layer_input;           // [dim], or null. With it, one row leaves after the first layer but the last whose
    int32_t* layers_run;          // output's cosine with its input exceeds the threshold; `layers_run` gets how many layers
    double exit_threshold;        // ran, and the others compute only its keys and values, from that output
    // made by the kernels
    int32_t count, scored;
    const int32_t* text_of;       // [count]: of each row
    const int32_t* scored_row;    // [scored]: whose logits are wanted
};

// A chain to draft, and what was drafted
struct ChainDraft {
    int32_t steps, has_threshold, end_count, forwards, drafted, fallback, rows;  // rows: that ran
    double threshold;         // with has_threshold: end before a token whose forward has a smaller confidence
    float temperature;        // 0: the most likely token
    const int64_t* end_tokens;  // [end_count]: tokens that end the chain, themselves drafted
    const double* uniforms;   // [steps] in [0, 1), one for each draw
    int64_t* tokens;          // [steps]
    float* confidences;       // [steps]: the largest probability at temperature 1
    float *probs, *unscaled_probs; // [steps][vocab]: what was drawn from, and at temperature 1; or null
    float* states;            // [rows][dim]: the last layer's output, or null
};

// A tree to grow, and what was grown. A node's chance: the product of the probabilities on its branch
struct TreeDraft {
    int32_t nodes, depth, width, children, end_count, prunes, grown, forwards;
    double prune_confidence;  // with prunes: a leaf whose largest probability at temperature 1 is not smaller has one child
    double min_prob;          // growing ends when no leaf has this chance
    float temperature;
    const int64_t* end_tokens;  // [end_count]: tokens without children
    int64_t* tokens;          // [nodes]
    int32_t *parents, *rows;  // [nodes]: -1 for the root; the place among the rows that ran after the text, or -1
    int32_t* row_counts;      // [depth]: how many rows each forward ran
};

// Heads that predict further ahead than the model's own: blocks x + silu(W x + b), then a matrix to the vocabulary
struct Heads {
    int32_t dim, vocab, half, layers, shared;
    const Matrix* blocks;   // [heads][layers]
    const Matrix* outputs;  // [heads], or one that is shared; there are layers then
};

// A bias on a token's logits by the token before it
struct Markov {
    int32_t vocab, half, stride, known;
    const float* before;   // [known][stride], of a multiple of 32 with zeros at the end
    const Matrix* after;
};

}  // extern "C"
