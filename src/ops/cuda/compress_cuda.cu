/* compress_cuda.cu - the compressors: V4's (models.md 2.10), and V4.1's of groups of tokens (2.18); state
 * as in 2.15. Position bias, entries, state: where sequences have few rows, one block does all of it for
 * a sequence; else kernels in order, whose blocks stride through the rows, because the host does
 * not know how many each sequence has. Args are the arguments of an operator with state, kv, gate
 * and seqs. */
#include "ops/cuda/entries_internal.cuh"

constexpr int ROW_BLOCKS = 512, MIX_THREADS = 512, MAX_THREADS = 1024;
constexpr int AT_ONCE = 8; /* slots of a channel on their way */
constexpr int SMALL_M_ROWS = 8;

/* A thread per column: what a block waits for, it waits for once. */
static unsigned threads_for(int32_t cols) {
    const unsigned whole = blocks_for(cols, WARP) * WARP;
    return whole < MAX_THREADS ? whole : MAX_THREADS;
}

/* Blocks of many rows: one for each sequence, and ROW_BLOCKS that sequences have by their rows. */
static unsigned many_blocks(const hd_seqs &seqs) {
    return (unsigned)seqs.n + ROW_BLOCKS;
}

/* The most rows that a step of few has. */
static __host__ __device__ __forceinline__ int64_t rows_of(const hd_seqs &seqs) {
    return (int64_t)seqs.n * seqs.most_rows;
}

/* Which of a sequence's rows and entries a block has: every `step`th from `first` on. */
struct share {
    int32_t seq, first, step;
};

/* Of a block per sequence. */
static __device__ __forceinline__ share whole_seq() {
    return {(int32_t)blockIdx.x, 0, 1};
}

/* The first of a sequence's blocks, of many_blocks(). */
static __device__ __forceinline__ int32_t first_block(const hd_seqs &seqs, int32_t seq) {
    const int64_t none = seqs.first_row[0];
    const int64_t rows = max(seqs.first_row[seqs.n] - none, (int64_t)1);
    return seq + (int32_t)((seqs.first_row[seq] - none) * ROW_BLOCKS / rows);
}

static __device__ __forceinline__ share own_share(const hd_seqs &seqs) {
    const int32_t block = (int32_t)blockIdx.x;
    int32_t low = 0,
            high =
                seqs.n; /* sequences whose first block is, and is not, this one or before it */
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        const bool before = first_block(seqs, middle) <= block;
        low = before ? middle : low;
        high = before ? high : middle;
    }
    const int32_t first = first_block(seqs, low);
    return {low, block - first, first_block(seqs, low + 1) - first};
}

/* A row has ROW_THREADS of a block, so that rows do not wait for each other; a thread has EACH columns on their
 * way. Column(i) of them is there if it is below the width. */
constexpr int ROW_THREADS = 128, EACH = 8;

struct row_share {
    int group, groups, thread, threads;
    __device__ int32_t column(int32_t first, int i) const {
        return first + i * threads;
    }
};

static __device__ __forceinline__ row_share own_rows() {
    const int groups = max((int)blockDim.x / ROW_THREADS, 1),
              threads = (int)blockDim.x / groups;
    const int group = (int)threadIdx.x / threads; /* behind the last: none */
    return {group, groups, (int)threadIdx.x % threads, threads};
}

/* Position p of a sequence: its kv row and its gate row. */
struct token_row {
    const float *kv, *gate;
};

template <typename Args>
static __device__ __forceinline__ token_row token_at(const Args &a, int32_t seq, int32_t pos) {
    const int32_t wide_row = a.state.width / 2;
    const int64_t row = row_at(a.seqs, seq, pos);
    if (row >= 0) return {a.kv + row * wide_row, a.gate + row * wide_row};
    const float *state = ring_row(a.state, seq, pos);
    return {state, state + wide_row};
}

/* Slots first, first + 1, ... of channel c, as many as there are. */
struct slot_values {
    float gate[AT_ONCE], kv[AT_ONCE];
};

static __device__ __forceinline__ slot_values load_slots(const token_row *slot, int32_t first,
                                                         int32_t n, int32_t earlier,
                                                         int32_t later, int32_t c, bool kv) {
    slot_values v;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        const int32_t at = min(first + i, n - 1); /* the last again changes no maximum */
        const int32_t channel = at < earlier ? c : c + later;
        v.gate[i] = load_now(slot[at].gate + channel, true);
        v.kv[i] = load_now(slot[at].kv + channel, kv);
    }
    return v;
}

/* Channel c of an entry: softmax(gate) . kv over n slots, in all but the first `earlier` of which
 * it is channel c + later. */
static __device__ float mix_channel(const token_row *slot, int32_t n, int32_t earlier,
                                    int32_t later, int32_t c) {
    float top = -CUDART_INF_F;
    double total = 0.0, sum = 0.0;
    slot_values v = {};
    for (int32_t first = 0; first < n; first += AT_ONCE) {
        v = load_slots(slot, first, n, earlier, later, c, n <= AT_ONCE);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) top = fmaxf(top, v.gate[i]);
    }
    for (int32_t first = 0; first < n; first += AT_ONCE) {
        if (n > AT_ONCE) v = load_slots(slot, first, n, earlier, later, c, true);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (first + i >= n) break;
            const double p = (double)expf(v.gate[i] - top);
            total += p;
            sum += p * (double)v.kv[i];
        }
    }
    return (float)(sum / total);
}

/* Turns x[2 * pairs] at position pos; all threads of a block. */
static __device__ void rotate(float *x, const float *freq, int32_t pairs, int32_t pos) {
    for (int32_t i = threadIdx.x; i < pairs; i += (int32_t)blockDim.x) {
        const float angle = rope_angle(pos, freq[i]), c = cosf(angle), sn = sinf(angle);
        const float p = x[2 * i], q = x[2 * i + 1];
        x[2 * i] = p * c - q * sn;
        x[2 * i + 1] = p * sn + q * c;
    }
}

/* Whether a later row of the step has the same place in the page's ring. */
template <typename Args>
static __device__ bool is_replaced(const Args &a, int32_t seq, int32_t pos) {
    const int32_t last = a.seqs.pos[a.seqs.first_row[seq + 1] - 1], page = a.state.page_tokens;
    for (int32_t p = pos + a.state.ring; p <= last && p / page == pos / page;
         p += a.state.ring) {
        if (row_at(a.seqs, seq, p) >= 0) return true;
    }
    return false;
}

/* Leaves the step's positions for later steps, as many as a page's ring can hold. */
template <typename Args>
static __device__ void save_rows(const Args &a, const share &own) {
    const int32_t seq = own.seq, wide_row = a.state.width / 2;
    const int32_t first = a.seqs.first_row[seq], end = a.seqs.first_row[seq + 1];
    const row_share s = own_rows();
    if (s.group >= s.groups) return;
    for (int32_t r = first + own.first * s.groups + s.group; r < end;
         r += own.step * s.groups) {
        const int32_t pos = a.seqs.pos[r];
        if (is_replaced(a, seq, pos)) continue;
        const float *kv = a.kv + (int64_t)r * wide_row, *gate = a.gate + (int64_t)r * wide_row;
        float *state = ring_row(a.state, seq, pos);
        for (int32_t base = s.thread; base < wide_row; base += EACH * s.threads) {
            float x[EACH], y[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int32_t c = s.column(base, i);
                x[i] = load_now(kv + c, c < wide_row);
                y[i] = load_now(gate + c, c < wide_row);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int32_t c = s.column(base, i);
                if (c < wide_row) state[c] = x[i];
                if (c < wide_row) state[wide_row + c] = y[i];
            }
        }
    }
}

/* ---- V4 ---- */

static __device__ void add_bias(const hd_compress_args &a, const share &own) {
    const int32_t seq = own.seq, wide_row = a.state.width / 2;
    const int32_t first = a.seqs.first_row[seq], end = a.seqs.first_row[seq + 1];
    const row_share s = own_rows();
    if (s.group >= s.groups) return;
    for (int32_t r = first + own.first * s.groups + s.group; r < end;
         r += own.step * s.groups) {
        const float *ape = a.ape + (int64_t)(a.seqs.pos[r] % a.ratio) * wide_row;
        float *gate = a.gate + (int64_t)r * wide_row;
        for (int32_t base = s.thread; base < wide_row; base += EACH * s.threads) {
            float x[EACH], bias[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int32_t c = s.column(base, i);
                x[i] = load_now(gate + c, c < wide_row);
                bias[i] = load_now(ape + c, c < wide_row);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int32_t c = s.column(base, i);
                if (c < wide_row) gate[c] = x[i] + bias[i];
            }
        }
    }
}

/* Norm and rotation of mixed[width], which becomes block b's entry. */
static __device__ void finish_entry(const hd_compress_args &a, int32_t seq, int32_t b,
                                    float *mixed) {
    const int32_t width = a.entries.width, own = (int32_t)threadIdx.x;
    const float weight = load_now(a.norm + own, own < width); /* on its way */
    double sum = 0.0;
    for (int32_t c = own; c < width; c += MIX_THREADS) {
        sum += (double)mixed[c] * (double)mixed[c];
    }
    sum = block_sum<MIX_THREADS>(sum);
    const float scale = (float)(1.0 / sqrt(sum / width + (double)a.eps));
    for (int32_t c = own; c < width; c += MIX_THREADS) {
        mixed[c] = mixed[c] * scale * (c == own ? weight : a.norm[c]);
    }
    __syncthreads();
    rotate(mixed + width - 2 * a.pairs, a.freq, a.pairs, b * a.ratio);
    __syncthreads();
    put_entry(a.entries, seq, b, mixed);
    __syncthreads(); /* mixed is used again */
}

/* slot: [2 * ratio] in shared memory, then mixed [width]. Of the blocks between the first and
 * the last position those are made whose last position is in the step. */
static __device__ void mix_entries(const hd_compress_args &a, const share &own,
                                   token_row *slot) {
    float *mixed = reinterpret_cast<float *>(slot + 2 * a.ratio);
    const int32_t seq = own.seq, first = a.seqs.first_row[seq];
    const int32_t last = a.seqs.first_row[seq + 1] - 1;
    if (last < first) return;
    const int32_t end = a.seqs.pos[last] + 1;
    const int32_t from = a.entries_from ? a.entries_from[seq] : 0;
    for (int32_t b = max(a.seqs.pos[first], from) / a.ratio + own.first;
         (b + 1) * a.ratio <= end; b += own.step) {
        if (row_at(a.seqs, seq, (b + 1) * a.ratio - 1) < 0) continue;
        const int32_t earlier = a.overlap && b > 0 ? a.ratio : 0, n = earlier + a.ratio;
        const int32_t later = a.overlap ? a.entries.width : 0;
        for (int32_t i = threadIdx.x; i < n; i += MIX_THREADS) {
            slot[i] = token_at(a, seq, b * a.ratio - earlier + i);
        }
        __syncthreads();
        for (int32_t c = threadIdx.x; c < a.entries.width; c += MIX_THREADS) {
            mixed[c] = mix_channel(slot, n, earlier, later, c);
        }
        finish_entry(a, seq, b, mixed);
    }
}

static __global__ void __launch_bounds__(MAX_THREADS) add_position_bias(hd_compress_args a) {
    add_bias(a, own_share(a.seqs));
}

static __global__ void __launch_bounds__(MIX_THREADS) make_entries(hd_compress_args a) {
    extern __shared__ __align__(16) token_row slot[];
    mix_entries(a, own_share(a.seqs), slot);
}

static __global__ void __launch_bounds__(MAX_THREADS) save_state(hd_compress_args a) {
    save_rows(a, own_share(a.seqs));
}

/* A block per sequence. */
static __global__ void __launch_bounds__(MIX_THREADS, 1) compress_small_m(hd_compress_args a) {
    begin_early(rows_of(a.seqs));
    extern __shared__ __align__(16) token_row slot[];
    const share own = whole_seq();
    add_bias(a, own);
    __syncthreads();
    mix_entries(a, own, slot);
    __syncthreads(); /* what entries were made of is overwritten now */
    save_rows(a, own);
}

void hd_compress_cuda(hd_stream *s, const hd_compress_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    if (a->seqs.n == 0 || !writes_entries(s, a->entries)) return;
    const unsigned grid = many_blocks(a->seqs);
    const size_t shared =
        2 * (size_t)a->ratio * sizeof(token_row) + (size_t)a->entries.width * sizeof(float);
    const unsigned threads = threads_for(a->state.width / 2);
    if (a->seqs.most_rows > 0 && a->seqs.most_rows <= SMALL_M_ROWS) {
        launch_early(queue, rows_of(a->seqs), compress_small_m, dim3((unsigned)a->seqs.n),
                     MIX_THREADS, shared, 1, *a);
    } else {
        add_position_bias<<<grid, threads, 0, queue>>>(*a);
        make_entries<<<grid, MIX_THREADS, shared, queue>>>(*a);
        save_state<<<grid, threads, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "compress");
}

/* ---- V4.1 ---- */

/* A thread per channel of a row; slot: [ratio] in shared memory. */
static __device__ void mix_groups(const hd_group_latents_args &a, const share &own,
                                  token_row *slot) {
    const int32_t width = a.state.width / 2;
    const int32_t first = a.seqs.first_row[own.seq], end = a.seqs.first_row[own.seq + 1];
    for (int32_t r = first + own.first; r < end; r += own.step) {
        const int32_t pos = a.seqs.pos[r];
        const bool ends = (pos + 1) % a.ratio == 0;
        __syncthreads(); /* the slots of the row before are read */
        for (int32_t i = threadIdx.x; ends && i < a.ratio; i += (int32_t)blockDim.x) {
            slot[i] = token_at(a, own.seq, pos + 1 - a.ratio + i);
        }
        __syncthreads();
        for (int32_t c = threadIdx.x; c < width; c += (int32_t)blockDim.x) {
            a.out[(int64_t)r * width + c] = ends ? mix_channel(slot, a.ratio, 0, 0, c) : 0.0f;
        }
    }
}

static __global__ void __launch_bounds__(MAX_THREADS) make_latents(hd_group_latents_args a) {
    extern __shared__ __align__(16) token_row slot[];
    mix_groups(a, own_share(a.seqs), slot);
}

static __global__ void __launch_bounds__(MAX_THREADS) save_groups(hd_group_latents_args a) {
    save_rows(a, own_share(a.seqs));
}

/* A block per sequence. */
static __global__ void __launch_bounds__(MAX_THREADS) latents_small_m(hd_group_latents_args a) {
    begin_early(rows_of(a.seqs));
    extern __shared__ __align__(16) token_row slot[];
    mix_groups(a, whole_seq(), slot);
    __syncthreads(); /* what latents were made of is overwritten now */
    save_rows(a, whole_seq());
}

void hd_group_latents_cuda(hd_stream *s, const hd_group_latents_args *a) {
    cudaStream_t queue = hd_cuda_stream(s);
    const size_t shared = (size_t)a->ratio * sizeof(token_row);
    const unsigned threads = threads_for(a->state.width / 2);
    if (a->seqs.n == 0) return;
    if (a->seqs.most_rows > 0 && a->seqs.most_rows <= SMALL_M_ROWS) {
        launch_early(queue, rows_of(a->seqs), latents_small_m, dim3((unsigned)a->seqs.n),
                     (int)threads, shared, 1, *a);
    } else {
        make_latents<<<many_blocks(a->seqs), threads, shared, queue>>>(*a);
        save_groups<<<many_blocks(a->seqs), threads, 0, queue>>>(*a);
    }
    hd_cuda_check(s, "group_latents");
}

/* A block per row. */
static __global__ void __launch_bounds__(BLOCK) store_groups(hd_store_groups_args a) {
    begin_kernel();
    extern __shared__ float made[];
    const int32_t r = (int32_t)blockIdx.x, pos = a.pos[r], width = a.entries.width;
    if ((pos + 1) % a.ratio != 0) return;
    for (int32_t c = threadIdx.x; c < width; c += BLOCK) made[c] = a.x[(int64_t)r * width + c];
    __syncthreads();
    rotate(made + width - 2 * a.pairs, a.freq, a.pairs, pos + 1 - a.ratio);
    __syncthreads();
    put_entry(a.entries, a.seq[r], pos / a.ratio, made);
}

void hd_store_groups_cuda(hd_stream *s, const hd_store_groups_args *a) {
    if (a->rows == 0 || !writes_entries(s, a->entries)) return;
    const size_t shared = (size_t)a->entries.width * sizeof(float);
    launch_kernel(hd_cuda_stream(s), store_groups, dim3((unsigned)a->rows), BLOCK, shared, 1,
                  *a);
    hd_cuda_check(s, "store_groups");
}
