/* step_cuda.cu - what varies in a step of a fixed shape: from cursors to rows and back.
 *
 * A block per sequence where page tables may have to be written, a thread elsewhere. */
#include "ops/cuda/cuda_internal.cuh"
#include "ops/cuda/philox_internal.cuh"

constexpr uint32_t DRAW_FORCED = 2; /* high counter word; the draws of tokens have 1 */
constexpr int LAY_THREADS = 128;

/* ---- before the forward pass ---- */

/* hd_philox_unit() */
static __device__ __forceinline__ float unit(uint32_t word) {
    return __fmul_rn((float)(word >> 9) + 0.5f, 1.0f / 8388608.0f);
}

/* How many of n drafts a benchmark lets stand. */
static __device__ int32_t forced(const hd_acceptance &p, uint64_t seed, int32_t position,
                                 int32_t n) {
    const float luck = unit(philox(seed, DRAW_FORCED, (uint64_t)position).x);
    int32_t standing = 0;
    while (standing < n && luck < p.least[standing]) standing++;
    return standing;
}

/* Where the sequence begins, and how many of its drafts may stand; -1 where it is nobody's. */
static __device__ int32_t begin(const hd_lay_step_args &a, int32_t i, hd_cursor *from) {
    const hd_step_seq &q = a.seqs[i];
    *from = {};
    if (i >= *a.n_live) return -1;
    const hd_cursor &at = q.fresh ? q.at : a.cursor[q.slot];
    if (!q.fresh && at.position + 2 * a.n_drafts >= q.room) return -1;
    *from = at;
    if (q.fresh) a.cursor[q.slot] = at;
    if (a.forced.least[0] <= 0.0f) return q.n_drafts;
    return forced(a.forced, a.params[q.slot].seed, at.position + 1, q.n_drafts);
}

static __device__ void lay_row(const hd_lay_step_args &a, int32_t i, int32_t k,
                               const hd_cursor &from, int32_t standing) {
    const int32_t row = i * (1 + a.n_drafts) + k;
    a.token[row] = k ? from.draft[k - 1] : from.token;
    a.pos[row] = from.position + k;
    a.seq[row] = i;
    a.logit_row[row] = row;
    a.live[row] = k <= standing;
    a.slot[row] = standing < 0 ? a.idle_slot : a.seqs[i].slot;
    a.position[row] = from.position + k + 1;
    a.n_drafted[row] = k;
    a.given[row] = a.forced.least[0] > 0.0f && k < standing ? from.draft[k] : -1;
}

static __global__ void __launch_bounds__(LAY_THREADS) lay_step(hd_lay_step_args a) {
    __shared__ hd_cursor from;
    __shared__ int32_t standing;
    const int32_t i = (int32_t)blockIdx.x, per_seq = 1 + a.n_drafts;
    if (threadIdx.x == 0) {
        standing = begin(a, i, &from);
        a.standing[i] = standing;
        a.first_row[i] = i * per_seq;
        a.start[i] = from.position;
        if (i == a.n - 1) a.first_row[a.n] = a.n * per_seq;
        if (i == 0) *a.turn = !*a.turn;
    }
    __syncthreads();
    for (int32_t k = threadIdx.x; k < per_seq; k += LAY_THREADS) {
        lay_row(a, i, k, from, standing);
    }
    if (standing >= 0) return;
    for (int32_t p = threadIdx.x; p < a.table_stride; p += LAY_THREADS) {
        a.table[0][(int64_t)i * a.table_stride + p] = a.scratch_page[0];
        a.table[1][(int64_t)i * a.table_stride + p] = a.scratch_page[1];
    }
}

void hd_lay_step_cuda(hd_stream *s, const hd_lay_step_args *a) {
    if (a->n == 0) return;
    lay_step<<<a->n, LAY_THREADS, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "lay_step");
}

/* ---- behind it: a thread per sequence ---- */

static __device__ __forceinline__ int32_t own_sequence() {
    return (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
}

static __device__ __forceinline__ bool has_penalty(const hd_sampling &p) {
    return (p.repetition_penalty != 0.0f && p.repetition_penalty != 1.0f) ||
           p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
}

static __device__ void count(const hd_settle_step_args &a, int32_t slot, const int32_t *token,
                             int32_t n) {
    uint16_t *counts = a.counts + (int64_t)a.params[slot].counts_row * a.vocab;
    for (int32_t k = 0; k < n; k++) {
        if (token[k] < 0) continue;
        if ((counts[token[k]] & HD_COUNT_OUTPUT) < HD_COUNT_OUTPUT) counts[token[k]]++;
    }
}

static __global__ void settle_step(hd_settle_step_args a) {
    const int32_t i = own_sequence();
    if (i >= a.n) return;
    const int32_t first = i * (1 + a.n_drafts), slot = a.seqs[i].slot;
    const int32_t standing = a.standing[i];
    const int32_t *token = a.token + first, *input = a.input + first;
    int32_t stood = 0;
    while (stood < standing && token[stood] == input[stood + 1]) stood++;
    a.accepted[i] = standing < 0 ? -1 : stood;
    a.wanted[i] = first + stood;
    for (int32_t k = 0; k <= a.n_drafts; k++) {
        a.next_token[first + k] = k <= stood ? max(token[k], 0) : 0;
    }
    if (standing < 0) return;
    a.cursor[slot].position += stood + 1;
    a.cursor[slot].token = max(token[stood], 0);
    if (has_penalty(a.params[slot])) count(a, slot, token, stood + 1);
}

void hd_settle_step_cuda(hd_stream *s, const hd_settle_step_args *a) {
    if (a->n == 0) return;
    settle_step<<<blocks_for(a->n, WARP), WARP, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "settle_step");
}

static __global__ void lay_draft(hd_lay_draft_args a) {
    const int32_t i = own_sequence();
    if (i >= a.n) return;
    const bool live = a.standing[i] >= 0;
    hd_cursor &c = a.cursor[a.seqs[i].slot];
    const int32_t guess = a.guess[i], before = a.at ? c.draft[a.at - 1] : c.token;
    const int32_t pos = live ? c.position + a.at : a.at;
    a.draft[i * a.n_drafts + a.at] = guess;
    a.token[i] = live ? before : 0;
    a.next_token[i] = guess;
    a.pos[i] = a.start[i] = pos;
    a.seq[i] = a.logit_row[i] = a.first_row[i] = i;
    if (i == a.n - 1) a.first_row[a.n] = a.n;
    if (live) c.draft[a.at] = guess;
}

void hd_lay_draft_cuda(hd_stream *s, const hd_lay_draft_args *a) {
    if (a->n == 0) return;
    lay_draft<<<blocks_for(a->n, WARP), WARP, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "lay_draft");
}

/* ---- to and from the host ---- */

static __global__ void __launch_bounds__(BLOCK) carry(hd_carry_args a) {
    const int32_t turn = *a.turn, bytes = a.bytes ? *a.bytes : a.most;
    const uint4 *from = static_cast<const uint4 *>(a.from[turn]);
    uint4 *to = static_cast<uint4 *>(a.to[turn]);
    const int32_t all = (int32_t)(gridDim.x * BLOCK), n = bytes / (int32_t)sizeof(uint4);
    const int32_t first = (int32_t)(blockIdx.x * BLOCK + threadIdx.x);
    for (int32_t i = first; i < n; i += all) to[i] = from[i];
    const uint8_t *rest = reinterpret_cast<const uint8_t *>(from + n);
    for (int32_t i = first; i < bytes % (int32_t)sizeof(uint4); i += all) {
        reinterpret_cast<uint8_t *>(to + n)[i] = rest[i];
    }
}

void hd_carry_cuda(hd_stream *s, const hd_carry_args *a) {
    const int32_t workers = hd_stream_workers(s);
    const unsigned wanted = blocks_for(a->most, BLOCK * sizeof(uint4));
    const unsigned grid = wanted < (unsigned)workers ? wanted : (unsigned)workers;
    if (grid == 0) return;
    carry<<<grid, BLOCK, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "carry");
}

static __global__ void stamp(hd_stamp_args a) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *a.at = (int64_t)now;
}

void hd_stamp_cuda(hd_stream *s, const hd_stamp_args *a) {
    stamp<<<1, 1, 0, hd_cuda_stream(s)>>>(*a);
    hd_cuda_check(s, "stamp");
}
