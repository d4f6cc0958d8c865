/* step_cuda.cu - what varies in a step of a fixed shape: from cursors to rows and back.
 *
 * A block per sequence where page tables may have to be written, a thread elsewhere. */
#include "ops/cuda/sample_internal.cuh"

constexpr uint32_t DRAW_FORCED = 2; /* high counter word; the draws of tokens have 1 */
constexpr int PREPARE_THREADS = 128;

/* ---- before the forward pass ---- */

/* hd_philox_unit() */
static __device__ __forceinline__ float unit(uint32_t word) {
    return __fmul_rn((float)(word >> 9) + 0.5f, 1.0f / 8388608.0f);
}

/* How many of n drafts a benchmark accepts. */
static __device__ int32_t forced(const hd_acceptance &p, uint64_t seed, int32_t position,
                                 int32_t n) {
    const float luck = unit(philox(seed, DRAW_FORCED, (uint64_t)position).x);
    int32_t verifiable = 0;
    while (verifiable < n && luck < p.least[verifiable]) verifiable++;
    return verifiable;
}

/* Where the sequence begins, and how many of its drafts may be accepted; -1: padding. */
static __device__ int32_t begin(const hd_prepare_step_args &a, int32_t i, hd_cursor *from) {
    const hd_step_seq &q = a.seqs[i];
    *from = {};
    if (i >= *a.n_live) return -1;
    const hd_cursor &at = q.fresh ? q.at : a.cursor[q.slot];
    if (!q.fresh && at.position + 2 * a.n_drafts >= q.capacity) return -1;
    *from = at;
    if (q.fresh) a.cursor[q.slot] = at;
    if (a.forced.least[0] <= 0.0f) return q.n_drafts;
    return forced(a.forced, a.params[q.slot].seed, at.position + 1, q.n_drafts);
}

static __device__ void prepare_row(const hd_prepare_step_args &a, int32_t i, int32_t k,
                                   int32_t row, const hd_cursor &from, int32_t verifiable) {
    const int32_t at = i * (1 + a.n_drafts) + k;
    const hd_step_seq &q = a.seqs[i];
    const bool of_prompt = verifiable >= 0 && (q.n_before > 0 || q.known > 0);
    const int32_t phase = of_prompt        ? HD_ROW_PREFILL
                          : verifiable > 0 ? HD_ROW_VERIFY
                                           : HD_ROW_DECODE;
    a.token[row] = a.input[at] = k ? from.draft[k - 1] : from.token;
    a.pos[row] = from.position + k;
    a.seq[row] = i;
    a.phase[row] = k > verifiable ? HD_ROW_PADDING : phase;
    a.logit_row[at] = row;
    a.slot[at] = verifiable < 0 ? a.idle_slot : q.slot;
    a.position[at] = from.position + k + 1;
    a.n_drafted[at] = k;
    a.given[at] = a.forced.least[0] > 0.0f && k < verifiable ? from.draft[k] : -1;
    if (of_prompt && k == 0 && q.known) a.given[at] = q.known - 1;
}

/* Rows of a prompt before the one that may sample; tokens NULL: of the padding sequence. */
static __device__ void prepare_before(const hd_prepare_step_args &a, int32_t i, int32_t row,
                                      int32_t n, const int32_t *tokens, const hd_cursor &to) {
    for (int32_t k = threadIdx.x; k < n; k += PREPARE_THREADS) {
        a.token[row + k] = tokens ? tokens[k] : 0;
        a.next_token[row + k] = !tokens ? 0 : k + 1 < n ? tokens[k + 1] : to.token;
        a.pos[row + k] = tokens ? to.position - n + k : k;
        a.seq[row + k] = i;
        a.phase[row + k] = tokens ? HD_ROW_PREFILL : HD_ROW_PADDING;
    }
}

/* The rows before of all sequences before i. */
static __device__ int32_t rows_before(const hd_prepare_step_args &a, int32_t i) {
    int32_t sum = 0;
    for (int32_t q = 0; q < min(i, *a.n_live); q++) sum += a.seqs[q].n_before;
    return sum;
}

/* A block per sequence; block n, if there is one, has the padding of rows before. */
static __global__ void __launch_bounds__(PREPARE_THREADS) prepare_step(hd_prepare_step_args a) {
    __shared__ hd_cursor from;
    __shared__ int32_t verifiable, used;
    const int32_t i = (int32_t)blockIdx.x, per_seq = 1 + a.n_drafts;
    if (threadIdx.x == 0) {
        used = a.n_before ? rows_before(a, i) : 0;
        verifiable = i < a.n ? begin(a, i, &from) : -1;
        if (i < a.n) a.verifiable[i] = verifiable;
        a.first_row[i] = i * per_seq + used;
        if (i == a.n - 1 && !a.n_before) a.first_row[a.n] = a.n * per_seq;
        if (i == a.n) a.first_row[a.n + 1] = a.n * per_seq + a.n_before;
        if (i == 0) *a.parity = !*a.parity;
    }
    __syncthreads();
    const int32_t row = i * per_seq + used;
    if (i == a.n) {
        prepare_before(a, i, row, a.n_before - used, nullptr, from);
    } else {
        const int32_t before = a.n_before && i < *a.n_live ? a.seqs[i].n_before : 0;
        prepare_before(a, i, row, before, a.before + used, from);
        for (int32_t k = threadIdx.x; k < per_seq; k += PREPARE_THREADS) {
            prepare_row(a, i, k, row + before + k, from, verifiable);
        }
    }
    if (verifiable >= 0) return;
    for (int32_t p = threadIdx.x; p < a.table_stride; p += PREPARE_THREADS) {
        a.table[0][(int64_t)i * a.table_stride + p] = a.scratch_page[0];
        a.table[1][(int64_t)i * a.table_stride + p] = a.scratch_page[1];
    }
}

void hd_prepare_step_cuda(hd_stream *s, const hd_prepare_step_args *a) {
    if (a->n == 0) return;
    prepare_step<<<a->n + (a->n_before > 0), PREPARE_THREADS, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "prepare_step");
}

/* ---- behind it: a thread per sequence ---- */

static __device__ __forceinline__ int32_t own_sequence() {
    return (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
}

static __device__ void count(const hd_commit_step_args &a, int32_t slot, const int32_t *token,
                             int32_t n) {
    uint16_t *counts = a.counts + (int64_t)a.params[slot].counts_row * a.vocab;
    for (int32_t k = 0; k < n; k++) {
        if (token[k] < 0) continue;
        if ((counts[token[k]] & HD_COUNT_OUTPUT) < HD_COUNT_OUTPUT) counts[token[k]]++;
    }
}

static __global__ void commit_step(hd_commit_step_args a) {
    const int32_t i = own_sequence();
    if (i >= a.n) return;
    const int32_t first = i * (1 + a.n_drafts), slot = a.seqs[i].slot;
    const int32_t verifiable = a.verifiable[i];
    const int32_t *token = a.token + first, *input = a.input + first;
    int32_t n_accepted = 0;
    while (n_accepted < verifiable && token[n_accepted] == input[n_accepted + 1]) n_accepted++;
    a.accepted[i] = verifiable < 0 ? -1 : n_accepted;
    a.wanted[i] = a.logit_row[first + n_accepted];
    for (int32_t k = 0; k <= a.n_drafts; k++) {
        a.next_token[a.logit_row[first + k]] = k <= n_accepted ? max(token[k], 0) : 0;
    }
    if (verifiable < 0) return;
    a.cursor[slot].position += n_accepted + 1;
    a.cursor[slot].token = max(token[n_accepted], 0);
    if (!a.seqs[i].known && has_penalty(a.params[slot])) count(a, slot, token, n_accepted + 1);
}

void hd_commit_step_cuda(hd_stream *s, const hd_commit_step_args *a) {
    if (a->n == 0) return;
    commit_step<<<blocks_for(a->n, WARP), WARP, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "commit_step");
}

static __global__ void prepare_draft(hd_prepare_draft_args a) {
    const int32_t i = own_sequence();
    if (i >= a.n) return;
    const bool live = a.verifiable[i] >= 0;
    hd_cursor &c = a.cursor[a.seqs[i].slot];
    const int32_t guess = a.guess[i], before = a.at ? c.draft[a.at - 1] : c.token;
    const int32_t pos = live ? c.position + a.at : a.at;
    a.draft[i * a.n_drafts + a.at] = guess;
    a.token[i] = live ? before : 0;
    a.next_token[i] = guess;
    a.pos[i] = pos;
    a.phase[i] = live && a.at + 1 < a.seqs[i].n_wanted ? HD_ROW_DECODE : HD_ROW_PADDING;
    a.seq[i] = a.logit_row[i] = a.first_row[i] = i;
    if (i == a.n - 1) a.first_row[a.n] = a.n;
    if (live) c.draft[a.at] = guess;
}

/* A thread per row. */
static __global__ void prepare_block(hd_prepare_block_args a) {
    const int32_t row = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= a.n * a.block) return;
    const int32_t i = row / a.block, k = row % a.block;
    const bool live = a.verifiable[i] >= 0;
    const hd_cursor *c = &a.cursor[a.seqs[i].slot];
    const int32_t token = live ? c->token : 0, position = live ? c->position : 0;
    a.token[row] = k ? a.filler : token;
    a.pos[row] = position + k;
    a.last[row] = position + a.block - 1;
    a.phase[row] = live && a.seqs[i].n_wanted > 0 ? HD_ROW_DECODE : HD_ROW_PADDING;
    a.seq[row] = i;
    a.logit_row[k * a.n + i] = row;
    if (k > 0) return;
    a.guess[i] = token;
    a.first_row[i] = row;
    if (i == 0) a.first_row[a.n] = a.n * a.block;
}

void hd_prepare_block_cuda(hd_stream *s, const hd_prepare_block_args *a) {
    if (a->n == 0) return;
    prepare_block<<<blocks_for(a->n * a->block, WARP), WARP, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "prepare_block");
}

void hd_prepare_draft_cuda(hd_stream *s, const hd_prepare_draft_args *a) {
    if (a->n == 0) return;
    prepare_draft<<<blocks_for(a->n, WARP), WARP, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "prepare_draft");
}

/* ---- to and from the host ---- */

static __global__ void __launch_bounds__(BLOCK) mirror(hd_mirror_args a) {
    const int32_t parity = *a.parity, bytes = a.bytes ? *a.bytes : a.most;
    const uint4 *from = static_cast<const uint4 *>(a.from[parity]);
    uint4 *to = static_cast<uint4 *>(a.to[parity]);
    const int32_t all = (int32_t)(gridDim.x * BLOCK), n = bytes / (int32_t)sizeof(uint4);
    const int32_t first = (int32_t)(blockIdx.x * BLOCK + threadIdx.x);
    for (int32_t i = first; i < n; i += all) to[i] = from[i];
    const uint8_t *rest = reinterpret_cast<const uint8_t *>(from + n);
    for (int32_t i = first; i < bytes % (int32_t)sizeof(uint4); i += all) {
        reinterpret_cast<uint8_t *>(to + n)[i] = rest[i];
    }
}

void hd_mirror_cuda(hd_stream *s, const hd_mirror_args *a) {
    const int32_t workers = hd_stream_workers(s);
    const unsigned wanted = blocks_for(a->most, BLOCK * sizeof(uint4));
    const unsigned grid = wanted < (unsigned)workers ? wanted : (unsigned)workers;
    if (grid == 0) return;
    mirror<<<grid, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "mirror");
}

static __global__ void timestamp(hd_timestamp_args a) {
    *a.at = (int64_t)hd_cuda_clock_ns();
}

void hd_timestamp_cuda(hd_stream *s, const hd_timestamp_args *a) {
    timestamp<<<1, 1, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "timestamp");
}
