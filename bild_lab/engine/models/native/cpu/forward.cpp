// One forward pass of a decoder or an encoder on a CPU: every layer in one call, its weights read once, in order.
//
// Activations are float32; weights, keys and values are float32 or bfloat16. Each output of a row is summed in one
// order whatever rows run beside it, so a row's result does not depend on how many rows a pass has, nor on whose they
// are: a pass may hold rows of several texts, each with its own cache, positions and source.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <type_traits>
#include <vector>
#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int LANES = 16, PANEL = 32;  // columns of a vector, of a panel of packed weights
#if defined(__AVX512F__)
constexpr int ROWS = 6;  // rows that share a panel's registers
#else
constexpr int ROWS = 2;
#endif

typedef float vec __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef float loose __attribute__((vector_size(64), aligned(4)));
typedef uint32_t loose_words __attribute__((vector_size(64), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2)));

inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
inline void store(float* p, vec v) { *reinterpret_cast<loose*>(p) = v; }
inline vec all(float x) { return x - vec{}; }
inline vec low(words pairs) { return (vec)(pairs << 16); }
inline vec high(words pairs) { return (vec)(pairs & 0xffff0000u); }

inline float sum(vec v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

struct bfloat16 { uint16_t bits; };
inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
inline vec wide(const float* p) { return load(p); }
inline vec wide(const bfloat16* p) {
#if defined(__AVX512F__)
    return (vec)((words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16);
#else
    return (vec)(__builtin_convertvector(*reinterpret_cast<const halves*>(p), words) << 16);
#endif
}
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, bfloat16* to) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e to the x by a polynomial of degree 6 over half a binary order; within 2 units of the last place
inline vec exponential(vec x) {
    x = x > 88.0f ? all(88.0f) : x;
    x = x < -87.0f ? all(-87.0f) : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    vec n = x * 1.44269504088896341f + magic - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ints order = __builtin_convertvector(n, ints);
    return (vec)((ints)p + (order << 23));
}
inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

enum Activation { RELU, SILU, GELU_TANH, GELU };
inline vec activate(vec x, int kind) {
    switch (kind) {
        case RELU: return x > 0.0f ? x : vec{};
        case SILU: return x * sigmoid(x);
        case GELU_TANH: return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
        default:
            for (int i = 0; i < LANES; ++i) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
            return x;
    }
}

}  // namespace

extern "C" {

// packed: panels of 32 outputs. float32: [panels][in / 2][2][32]; bfloat16: [panels][in / 2][32][2], where the inputs
// are padded to a multiple of 32. bias: in the order of the panels' outputs
struct Matrix { const void* packed; const float* bias; int32_t outputs, inputs; };

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
    Matrix head;
    const void* embedding;      // [vocab][dim]
    const float* distance_bias; // [heads][farthest + 1] by query minus key, or null; bidirectional: [heads][2 farthest + 1]
};

// Some rows of one text, and the cache behind which they stand
struct Text {
    int32_t count, start, reserved, source;  // start: the cache slot of the first row
    int32_t scored, tree;         // for how many of the last rows logits are wanted; rows of its tree, these are the last
    int64_t capacity;
    const int64_t* parents;       // [tree]: an earlier row of the tree, or -1 behind the text; null for a chain
    void *keys, *values;          // [layers][kv_heads][capacity][head_dim]
    const void *memory_keys, *memory_values;  // [layers][heads][source][head_dim]
    // made by the kernels
    const uint8_t* visible;       // [count][start + count], or null for a chain without a prefix: see `Layout`
    const int64_t* positions;     // [count], with visible
    const int64_t* key_positions; // [start + count], with visible
    int32_t first;                // of the pass's rows
};

struct Pass {
    int32_t texts, layers, threads, fill;
    const Text* text;             // [texts], in the order of their rows
    const int64_t* tokens;        // [count]
    const float* states;          // [count][dim]: what the first layer reads, or null for the tokens' embeddings
    const void* masks;            // [..][dim]: embeddings of the token ids from first_mask on, which alone see the prefix;
    int64_t first_mask;           // or null
    const int32_t* layer;         // [layers]
    const int32_t* skipped;       // [layers], or null: 1 for no attention, 2 for no feed-forward, 3 for neither
    const float *cos, *sin;       // [kinds][table][head_dim]: of every position
    int64_t table;
    float *hidden;                // [layers][count][dim], or null
    float *head_input, *logits;   // [scored][dim], [scored][vocab]
    float* before;                // [dim], or null. With it, one row leaves behind the first layer but the last whose
    int32_t* ran;                 // output's cosine with its input exceeds the bar; `ran` gets how many layers ran, and
    double bar;                   // the others compute only its keys and values, from that output
    // made by the kernels
    int32_t count, scored;
    const int32_t* text_of;       // [count]: of each row
    const int32_t* scored_row;    // [scored]: whose logits are wanted
};

// A chain to draft, and what was drafted
struct Chain {
    int32_t steps, stops, end_count, forwards, drafted, fallback, rows;  // rows: that ran
    double threshold;         // with stops: end before a token whose forward has a smaller confidence
    float temperature;        // 0: the likeliest token
    const int64_t* ends;      // [end_count]: tokens that end the chain, themselves drafted
    const double* uniforms;   // [steps] in [0, 1), one for each draw
    int64_t* tokens;          // [steps]
    float* confidences;       // [steps]: the largest probability at temperature 1
    float *probs, *own_probs; // [steps][vocab]: what was drawn from, and at temperature 1; or null
    float* states;            // [rows][dim]: the last layer's output, or null
};

// A tree to grow, and what was grown. A node's chance: the product of the probabilities on its branch
struct Growth {
    int32_t nodes, depth, width, children, end_count, has_sure, grown, forwards;
    double sure;              // a leaf whose largest probability at temperature 1 is not smaller has one child
    double least;             // growing ends when no leaf has this chance
    float temperature;
    const int64_t* ends;      // [end_count]: tokens without children
    int64_t* tokens;          // [nodes]
    int32_t *parents, *rows;  // [nodes]: -1 for the root; the place among the rows that ran behind the text, or -1
    int32_t* counts;          // [depth]: how many rows each forward ran
};

// Heads that predict further ahead than the model's own: blocks x + silu(W x + b), then a matrix to the vocabulary
struct Heads {
    int32_t dim, vocab, half, layers, shared;
    const Matrix* blocks;   // [heads][layers]
    const Matrix* outputs;  // [heads], or one that is shared; there are layers then
};

}  // extern "C"

namespace {

struct Span { int first, last; };
inline Span share(int count) {  // of this thread
    int threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {int(int64_t(count) * me / threads), int(int64_t(count) * (me + 1) / threads)};
}

inline void normalize(const float* x, const float* weight, float epsilon, int dim, float* out, float scale = 1.0f) {
    vec squares{};
    int i = 0;
    for (; i + LANES <= dim; i += LANES) { vec v = load(x + i); squares += v * v; }
    float total = sum(squares);
    for (; i < dim; ++i) total += x[i] * x[i];
    float factor = 1.0f / std::sqrt(total / dim + epsilon);
    for (i = 0; i + LANES <= dim; i += LANES) store(out + i, load(x + i) * factor * load(weight + i) * scale);
    for (; i < dim; ++i) out[i] = x[i] * factor * weight[i] * scale;
}

// the weights of a pair of inputs, even and odd, for the 32 outputs of a panel
struct Pair { vec even[2], odd[2]; };
inline Pair pair(const float* w) {
    return {{load(w), load(w + LANES)}, {load(w + PANEL), load(w + PANEL + LANES)}};
}
inline Pair pair(const bfloat16* w) {
    words left = *reinterpret_cast<const loose_words*>(w), right = *reinterpret_cast<const loose_words*>(w + PANEL);
    return {{low(left), low(right)}, {high(left), high(right)}};
}

constexpr int AHEAD = 16384;  // bytes
// asks memory for the weights that far on, while rows are multiplied by these: a core waits for memory less
template <class T>
inline void ask_for(const T* w) {
    for (int i = 0; i < 2 * PANEL; i += 64 / sizeof(T))
        __builtin_prefetch(reinterpret_cast<const char*>(w + i) + AHEAD, 0, 2);
}

// R rows times one panel: the even and the odd inputs are summed apart, then added
template <int R, class T>
inline void multiply(const float* x, int stride, const T* w, int inputs, vec out[R][2]) {
    vec even[R][2] = {}, odd[R][2] = {};
    for (int k = 0; k < inputs; k += 2, w += 2 * PANEL) {
        const Pair weights = pair(w);
        ask_for(w);
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
    #pragma GCC unroll ROWS
    for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) out[r][half] = even[r][half] + odd[r][half];
}

// of two vectors, at most 1
inline double cosine(const float* x, const float* y, int dim) {
    double products = 0, left = 0, right = 0;
    for (int i = 0; i < dim; ++i) {
        products += double(x[i]) * y[i];
        left += double(x[i]) * x[i];
        right += double(y[i]) * y[i];
    }
    const double least = 1e-8;  // as in PyTorch
    return std::min(products / (std::max(std::sqrt(left), least) * std::max(std::sqrt(right), least)), 1.0);  // or NaN
}

struct Buffers {  // of one pass, for all threads; then for each thread. x: the states of the layer that runs
    float *x, *qkv, *mixed, *inner, *block, *normed, *scores, *tiles;
    int* seen;
    uint16_t* halves;
};

template <class T>
constexpr int STEP = std::is_same_v<T, bfloat16> ? 32 : 2;  // inputs of a panel come in multiples of it
inline int64_t padded(int64_t n, int to) { return (n + to - 1) / to * to; }

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
            words bits{};
            if (i + LANES <= matrix.inputs) bits = (words)load(x + int64_t(row) * stride + i);
            else std::memcpy(&bits, x + int64_t(row) * stride + i, 4 * std::max(0, matrix.inputs - i));
            bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            *reinterpret_cast<halves*>(to + i) = __builtin_convertvector(bits, halves);
        }
    }
    return inputs;
}

// `multiply` of rounded rows: an instruction adds the products of a pair of inputs. Pairs are summed by turns in two sums
template <int R>
inline void multiply(const uint16_t* x, int stride, const bfloat16* w, int inputs, vec out[R][2]) {
    vec sums[2][R][2] = {};
    for (int k = 0; k < inputs; k += 4)
        #pragma GCC unroll 2
        for (int turn = 0; turn < 2; ++turn, w += 2 * PANEL) {
            const __m512bh left = (__m512bh)_mm512_loadu_si512(w), right = (__m512bh)_mm512_loadu_si512(w + PANEL);
            ask_for(w);
            #pragma GCC unroll ROWS
            for (int r = 0; r < R; ++r) {
                int32_t two;
                std::memcpy(&two, x + int64_t(r) * stride + k + 2 * turn, 4);
                const __m512bh inputs_of_row = (__m512bh)_mm512_set1_epi32(two);
                sums[turn][r][0] = (vec)_mm512_dpbf16_ps((__m512)sums[turn][r][0], inputs_of_row, left);
                sums[turn][r][1] = (vec)_mm512_dpbf16_ps((__m512)sums[turn][r][1], inputs_of_row, right);
            }
        }
    #pragma GCC unroll ROWS
    for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) out[r][half] = sums[0][r][half] + sums[1][r][half];
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
    Span mine = share((matrix.outputs + PANEL - 1) / PANEL);
    for (int panel = mine.first; panel < mine.last; ++panel) {
        const bfloat16* w = static_cast<const bfloat16*>(matrix.packed) + int64_t(panel) * inputs * PANEL;
        vec bias[2] = {};
        if (matrix.bias) { bias[0] = load(matrix.bias + panel * PANEL); bias[1] = load(matrix.bias + panel * PANEL + LANES); }
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
                use(row + r, panel, load(sums + r * PANEL) + bias[0], load(sums + r * PANEL + LANES) + bias[1]);
        }
    }
}
#endif

// `product` of rows of floats, or of rounded ones
template <class T, class X, class Use>
inline void panels_product(const Matrix& matrix, const X* x, int stride, int inputs, int rows, Use use) {
    Span mine = share((matrix.outputs + PANEL - 1) / PANEL);
    for (int panel = mine.first; panel < mine.last; ++panel) {
        const T* w = static_cast<const T*>(matrix.packed) + int64_t(panel) * padded(inputs, STEP<T>) * PANEL;
        vec bias[2] = {};
        if (matrix.bias) { bias[0] = load(matrix.bias + panel * PANEL); bias[1] = load(matrix.bias + panel * PANEL + LANES); }
        int row = 0;
        auto some = [&]<int R>() {
            vec out[R][2];
            multiply<R>(x + int64_t(row) * stride, stride, w, inputs, out);
            for (int r = 0; r < R; ++r) use(row + r, panel, out[r][0] + bias[0], out[r][1] + bias[1]);
            row += R;
        };
        while (row + ROWS <= rows) some.template operator()<ROWS>();
        switch (rows - row) {
#if defined(__AVX512F__)
            case 5: some.template operator()<5>(); break;
            case 4: some.template operator()<4>(); break;
            case 3: some.template operator()<3>(); break;
            case 2: some.template operator()<2>(); break;
#endif
            case 1: some.template operator()<1>(); break;
        }
    }
}

// rows times this thread's panels; `use(row, panel, left, right)` takes the 32 results
template <class T, class Use>
inline void product(const Matrix& matrix, const float* x, int stride, int rows, Buffers& b, Use use) {
#if defined(__AMX_BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (has_tiles()) return tile_product(matrix, x, stride, rows, b, use);
#endif
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bfloat16>)
        if (quick_pairs()) {
            const int inputs = round_rows(matrix, x, stride, rows, b);
            return panels_product<T>(matrix, b.halves, inputs, inputs, rows, use);
        }
#endif
    panels_product<T>(matrix, x, stride, matrix.inputs, rows, use);
}

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

template <class T>
void forward(const Model& model, const Pass& pass, Buffers& b) {  // by every thread of a team
    const int m = pass.count, dim = model.dim, head_dim = model.head_dim;
    const int heads = model.heads, kv_heads = model.kv_heads, both = heads + kv_heads;
    const Sizes sizes(model, pass);
    const int64_t features = sizes.features;
    float* x = b.x;

    auto normed = [&](const float* weight) {
        for (int r = 0; r < m; ++r)
            normalize(x + int64_t(r) * dim, weight, model.epsilon, dim, b.normed + int64_t(r) * dim);
        return b.normed;
    };
    // what a block adds to the residual stream, through the norm behind it if there is one
    auto residual = [&](const Matrix& matrix, const float* in, int stride, const float* norm) {
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
    };

    {
        Span rows = share(m);
        for (int row = rows.first; row < rows.last; ++row) {
            if (pass.states) {
                std::memcpy(x + int64_t(row) * dim, pass.states + int64_t(row) * dim, 4 * dim);
                continue;
            }
            const bool mask = is_mask(pass, pass.tokens[row]);
            const T* table = static_cast<const T*>(mask ? pass.masks : model.embedding);
            const T* embedding = table + (pass.tokens[row] - (mask ? pass.first_mask : 0)) * dim;
            const float scale = mask ? 1.0f : model.embedding_scale;
            for (int i = 0; i < dim; ++i) x[int64_t(row) * dim + i] = widen(embedding[i]) * scale;
        }
        #pragma omp barrier
    }
    bool fill = pass.fill;  // only keys and values
    for (int l = 0; l < pass.layers; ++l) {
        const int index = pass.layer[l];
        const Layer& layer = model.layer[index];
        const bool leaves = pass.before && !fill && l + 1 < pass.layers;
        if (leaves && omp_get_thread_num() == 0) std::memcpy(pass.before, x, 4 * dim);  // x changes behind barriers

        const int skipped = pass.skipped ? pass.skipped[l] : 0;
        if (!(skipped & 1)) {
            product<T>(layer.qkv, normed(layer.norm), dim, m, b, [&](int row, int panel, vec left, vec right) {
                put(b.qkv + row * features, panel, layer.qkv.outputs, left, right);
            });
            #pragma omp barrier
            Span mine = share(m * (both + kv_heads));
            for (int task = mine.first; task < mine.last; ++task) {
                int row = task / (both + kv_heads), head = task % (both + kv_heads);
                float* from = b.qkv + row * features + int64_t(head) * head_dim;
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
            if (fill) continue;
            mine = share(m * heads);
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
                attend(b.qkv + row * features + int64_t(head) * head_dim, static_cast<const T*>(text.keys) + at,
                       static_cast<const T*>(text.values) + at, end, head_dim, model.scale, sees, b.scores, b.seen,
                       b.mixed + row * sizes.mixed + int64_t(head) * head_dim);
            }
            #pragma omp barrier
            residual(layer.out, b.mixed, sizes.mixed, layer.out_norm);

            if (layer.cross_query.packed) {
                product<T>(layer.cross_query, normed(layer.cross_norm), dim, m, b, [&](int row, int panel, vec left, vec right) {
                    put(b.qkv + row * features, panel, layer.cross_query.outputs, left, right);
                });
                #pragma omp barrier
                for (int task = mine.first; task < mine.last; ++task) {
                    int head = task / m, row = task % m;
                    const Text& text = pass.text[pass.text_of[row]];
                    int64_t at = (int64_t(index) * heads + head) * text.source * head_dim;
                    auto sees = [](int, float& bias) { bias = 0.0f; return true; };
                    attend(b.qkv + row * features + int64_t(head) * head_dim, static_cast<const T*>(text.memory_keys) + at,
                           static_cast<const T*>(text.memory_values) + at, text.source, head_dim, model.scale, sees, b.scores,
                           b.seen, b.mixed + row * sizes.mixed + int64_t(head) * head_dim);
                }
                #pragma omp barrier
                residual(layer.cross_out, b.mixed, sizes.mixed, nullptr);
            }
        }
        if (!(skipped & 2)) {
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
    if (!pass.scored) return;
    for (int r = 0; r < pass.scored; ++r)
        normalize(x + int64_t(pass.scored_row[r]) * dim, model.final_norm, model.epsilon, dim, b.normed + int64_t(r) * dim,
                  model.final_scale);
    product<T>(model.head, b.normed, dim, pass.scored, b, [&](int row, int panel, vec left, vec right) {
        put(pass.logits + int64_t(row) * model.vocab, panel, model.vocab, left, right);
    });
    if (omp_get_thread_num() == 0 && pass.head_input) std::memcpy(pass.head_input, b.normed, 4 * int64_t(pass.scored) * dim);
    #pragma omp barrier
}

// `work(buffers)` by every thread of a team. later: how many slots its later passes fill
template <class Work>
void with_team(const Model& model, const Pass pass, int later, Work work) {
    const Sizes sizes(model, pass, later);
    const int64_t shared = sizes.shared(model, pass), own = sizes.own(model, pass);
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < shared + own * pass.threads) memory.resize(shared + own * pass.threads);
    float* base = memory.data();
    #pragma omp parallel num_threads(pass.threads)
    {
        Buffers b;
        b.x = base;
        b.qkv = b.x + pass.count * padded(model.dim, PANEL);
        b.mixed = b.qkv + pass.count * sizes.features;
        b.inner = b.mixed + pass.count * sizes.mixed;
        b.block = b.inner + pass.count * sizes.inner;
        b.normed = base + shared + own * omp_get_thread_num();
        b.tiles = b.normed + pass.count * padded(model.dim, PANEL);
        b.halves = reinterpret_cast<uint16_t*>(b.tiles + PANEL * PANEL);
        b.scores = b.tiles + PANEL * PANEL + padded(pass.count, PANEL) * sizes.widest / 2;
        b.seen = reinterpret_cast<int*>(b.scores + sizes.longest);
#if defined(__AMX_BF16__)
        const bool tiles = model.half && has_tiles();
        TileShapes shapes;
        if (tiles) _tile_loadconfig(&shapes);
        work(b);
        if (tiles) _tile_release();
#else
        work(b);
#endif
    }
}

// the largest of n numbers, the first of them
inline int largest(const float* x, int n) {
    vec most = all(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) { vec v = load(x + i); most = v > most ? v : most; }
    float top = most[0];
    for (int j = 1; j < LANES; ++j) top = std::max(top, most[j]);
    for (; i < n; ++i) top = std::max(top, x[i]);
    for (i = 0; i < n; ++i)
        if (x[i] == top) return i;
    return 0;  // NaN
}

// the `count` largest of n numbers, the largest first; of equal ones the first
inline void likeliest(const float* x, int n, int count, int64_t* out) {
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
        likeliest(logits + head * vocab, heads.vocab, count, tokens + int64_t(head) * count);
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

// one token behind the forward that has just run; returns whether the chain goes on
inline bool choose(Chain& chain, const float* logits, int vocab) {
    int at = chain.forwards++, best = largest(logits, vocab);
    float* own = chain.own_probs ? chain.own_probs + int64_t(at) * vocab : nullptr;
    if (chain.stops || own) chain.confidences[at] = softmax(logits, vocab, logits[best], 1.0f, own);
    int64_t token = best;
    if (chain.temperature > 0) {
        float* probs = chain.probs + int64_t(at) * vocab;
        softmax(logits, vocab, logits[best], chain.temperature, probs);
        token = draw(probs, vocab, chain.uniforms[at]);
    }
    if (chain.stops && double(chain.confidences[at]) < chain.threshold) {
        chain.fallback = 1;
        return false;
    }
    chain.tokens[chain.drafted++] = token;
    return chain.drafted < chain.steps && std::find(chain.ends, chain.ends + chain.end_count, token) == chain.ends + chain.end_count;
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

// Chains of several texts. Those that have ended leave the pass
struct Drafting {
    const Model& model;
    Pass pass;
    std::vector<Text> texts;
    std::vector<Chain*> chains;
    std::vector<char> goes_on;
    Rows rows;

    Drafting(const Model& model, const Pass& first, Chain* chain)
        : model(model), pass(first), texts(first.text, first.text + first.texts), goes_on(first.texts, 1) {
        for (int i = 0; i < first.texts; ++i) chains.push_back(chain + i);
        rows.add_all(first);
        rows.fill(pass);
    }
    void read(int i, const float* x) {
        Chain& chain = *chains[i];
        const Text& text = pass.text[i];
        const int64_t dim = model.dim;
        if (chain.states) std::memcpy(chain.states + chain.rows * dim, x + text.first * dim, 4 * text.count * dim);
        chain.rows += text.count;
        goes_on[i] = choose(chain, pass.logits + int64_t(i) * model.vocab, model.vocab);
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

template <class T>
void draft(Drafting& all, Buffers& b) {
    for (;;) {
        forward<T>(all.model, all.pass, b);
        Span mine = share(int(all.texts.size()));
        for (int i = mine.first; i < mine.last; ++i) all.read(i, b.x);
        #pragma omp barrier
        #pragma omp master
        all.next();
        #pragma omp barrier
        if (all.texts.empty()) return;
    }
}

struct Node { int64_t token; int32_t parent, row, depth; double chance; };

// A growing tree. The threads of a team fill `found`; the first of them does the rest
struct Growing {
    const Model& model;
    const Pass& pass;
    Growth& growth;
    Text text;              // of the next level
    float* logits;          // of the level that has just run
    std::vector<Node> nodes;
    std::vector<int> leaves, ran;  // nodes whose rows are next; that have run behind the text
    std::vector<int64_t> fed, above;  // of the next level; the parent's row of each that ran behind the text
    Layout layout;
    std::vector<double> chances;   // [width][children], of the level that has just run
    std::vector<int64_t> tokens;   // the same
    std::vector<float> confidences;
    int kept;                      // children of a leaf
    bool goes_on = true;

    Growing(const Model& model, const Pass& pass, const Text& first, Growth& growth, float* logits)
        : model(model), pass(pass), growth(growth), text(first), logits(logits), leaves{-1},
          kept(std::min(growth.children, model.vocab)) {
        chances.resize(growth.width * kept);
        tokens.resize(growth.width * kept);
        confidences.resize(growth.width);
    }

    // the likeliest tokens of a row of logits, which are overwritten
    void read(int row) {
        float* logits = this->logits + int64_t(row) * model.vocab;
        int best = largest(logits, model.vocab);
        const float top = logits[best], most = softmax(logits, model.vocab, top, growth.temperature, nullptr);
        confidences[row] = growth.temperature == 1.0f ? most : softmax(logits, model.vocab, top, 1.0f, nullptr);
        for (int child = 0; child < kept; ++child) {
            if (child) best = largest(logits, model.vocab);
            tokens[row * kept + child] = best;
            chances[row * kept + child] = most * exponential(all((logits[best] - top) / growth.temperature))[0];
            logits[best] = -INFINITY;
        }
    }

    void next() {  // by one thread: children of the level that has run, and the rows of the next
        growth.counts[growth.forwards++] = text.count;
        std::vector<int> growing;
        for (int row = 0; row < int(leaves.size()); ++row) {
            const int leaf = leaves[row], depth = leaf < 0 ? 0 : nodes[leaf].depth + 1;
            const double before = leaf < 0 ? 1.0 : nodes[leaf].chance;
            const bool sure = growth.has_sure && double(confidences[row]) >= growth.sure;
            for (int child = 0; child < (sure ? 1 : kept); ++child) {
                const int64_t token = tokens[row * kept + child];
                const double chance = before * chances[row * kept + child];
                if (!(chances[row * kept + child] > 0.0)) continue;
                const bool ends = std::find(growth.ends, growth.ends + growth.end_count, token) != growth.ends + growth.end_count;
                if (!ends && chance >= growth.least) growing.push_back(int(nodes.size()));
                nodes.push_back({token, leaf, -1, depth, chance});
            }
        }
        leaves = likeliest(growing, growth.width);
        goes_on = !leaves.empty() && growth.forwards < growth.depth;
        if (goes_on) lay_out();
    }

    // the most likely of these nodes, in the order grown
    std::vector<int> likeliest(std::vector<int> some, int most) const {
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
            nodes[leaf].row = int(ran.size());
            ran.push_back(leaf);
            fed.push_back(nodes[leaf].token);
            above.push_back(nodes[leaf].parent < 0 ? -1 : nodes[nodes[leaf].parent].row);
        }
        text.tree = int(ran.size());
        text.scored = text.count;
        text.parents = above.data();
        layout.place(text, pass, fed.data());
    }

    void finish() {
        std::vector<int> every(nodes.size());
        for (int node = 0; node < int(nodes.size()); ++node) every[node] = node;
        for (int node : likeliest(every, growth.nodes)) {
            const int place = growth.grown++;
            growth.tokens[place] = nodes[node].token;
            growth.parents[place] = nodes[node].parent < 0 ? -1 : every[nodes[node].parent];
            growth.rows[place] = nodes[node].row;
            every[node] = place;  // a parent comes before its children
        }
    }
};

// Trees of several texts, level by level. Those that have ended leave the pass
struct Grove {
    Pass pass;
    std::vector<Growing> trees;
    std::vector<Growing*> alive;
    std::vector<std::pair<Growing*, int>> found;  // of each row with logits: its tree, and its place in the level
    Rows rows;

    Grove(const Model& model, const Pass& first, Growth* growth) : pass(first) {
        trees.reserve(first.texts);
        for (int i = 0; i < first.texts; ++i)
            trees.emplace_back(model, first, first.text[i], growth[i], pass.logits + int64_t(i) * model.vocab);
        for (auto& tree : trees) {
            alive.push_back(&tree);
            found.push_back({&tree, 0});
        }
        rows.add_all(first);
        rows.fill(pass);
    }
    void next() {  // by one thread
        rows.clear();
        found.clear();
        std::vector<Growing*> before;
        before.swap(alive);
        for (Growing* tree : before) {
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

template <class T>
void grow(const Model& model, Grove& grove, Buffers& b) {
    for (;;) {
        forward<T>(model, grove.pass, b);
        Span mine = share(int(grove.found.size()));
        for (int row = mine.first; row < mine.last; ++row) grove.found[row].first->read(grove.found[row].second);
        #pragma omp barrier
        #pragma omp master
        grove.next();
        #pragma omp barrier
        if (grove.alive.empty()) return;
    }
}

}  // namespace

// Grow a tree for each text: the first forward runs the pass's rows, each later one the likeliest leaves. The logits
// have room for `width` rows of each
extern "C" void grow_trees(const Model* model, const Pass* pass, Growth* growth) {
    Grove grove(*model, *pass, growth);
    Pass widest = grove.pass;
    int later = 0, leaves = 0;
    for (int i = 0; i < pass->texts; ++i) {
        later = std::max(later, growth[i].depth * growth[i].width);
        leaves += growth[i].width;
    }
    widest.count = std::max(widest.count, leaves);
    with_team(*model, widest, later, [&](Buffers& b) {
        if (model->half) grow<bfloat16>(*model, grove, b);
        else grow<float>(*model, grove, b);
    });
    for (auto& tree : grove.trees) tree.finish();
}

// Draft a chain for each text: the first forward runs the pass's rows, each later one the token drafted before it
extern "C" void draft_chains(const Model* model, const Pass* pass, Chain* chain) {
    Drafting all(*model, *pass, chain);
    int later = 0;
    for (int i = 0; i < pass->texts; ++i) later = std::max(later, chain[i].steps);
    with_team(*model, all.pass, later, [&](Buffers& b) {
        if (model->half) draft<bfloat16>(all, b);
        else draft<float>(all, b);
    });
}

extern "C" void run(const Model* model, const Pass* given) {
    Pass pass = *given;
    Rows rows;
    rows.add_all(pass);
    rows.fill(pass);
    std::vector<Layout> layouts(pass.texts);
    for (int i = 0; i < pass.texts; ++i) layouts[i].place(rows.texts[i], pass, pass.tokens + rows.texts[i].first);
    with_team(*model, pass, 0, [&](Buffers& b) {
        if (model->half) forward<bfloat16>(*model, pass, b);
        else forward<float>(*model, pass, b);
    });
}

// The `count` likeliest tokens of each of the first `depth` heads behind a state: [depth][count]
extern "C" void likeliest_tokens(const Heads* heads, const float* hidden, int depth, int count, int threads, int64_t* tokens) {
    const int64_t dim = padded(heads->dim, PANEL), vocab = padded(heads->vocab, PANEL);
    const int64_t shared = depth * (2 * dim + vocab), own = PANEL * PANEL + padded(depth, PANEL) * dim / 2;
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < shared + own * threads) memory.resize(shared + own * threads);
    float* base = memory.data();
    #pragma omp parallel num_threads(threads)
    {
        Buffers b{};
        b.tiles = base + shared + own * omp_get_thread_num();
        b.halves = reinterpret_cast<uint16_t*>(b.tiles + PANEL * PANEL);
#if defined(__AMX_BF16__)
        const bool tiles = heads->half && has_tiles();
        TileShapes shapes;
        if (tiles) _tile_loadconfig(&shapes);
#endif
        if (heads->half) run_heads<bfloat16>(*heads, hidden, depth, count, base, base + 2 * depth * dim, b, tokens);
        else run_heads<float>(*heads, hidden, depth, count, base, base + 2 * depth * dim, b, tokens);
#if defined(__AMX_BF16__)
        if (tiles) _tile_release();
#endif
    }
}

// Read these bytes, by all threads: the least time in which weights can be used. Returns what was read, summed
extern "C" uint32_t read_all(const void* bytes, int64_t count, int threads) {
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
