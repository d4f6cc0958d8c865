/* resident_cuda.cu - entries that rows choose come from host memory into a buffer on the device
 * (HiSparse).
 *
 * A pass is three kernels. The first looks every choice up. A missing entry is claimed by the first
 * choice of it: row_of is -2 less the number of that choice. The second, one block, takes rows for the
 * missing entries, in the order of their claims. The third copies them. Without misses the last two
 * end at once. */
#include "ops/check_internal.h"
#include "ops/cuda/cuda_internal.cuh"

constexpr int TAKE_THREADS = HD_RESIDENT_AGES, TAKE_WARPS = TAKE_THREADS / WARP;
static_assert(TAKE_WARPS == WARP, "a warp adds up what all warps count");

static __global__ void forget_entries(hd_forget_entries_args a) {
    begin_kernel();
    const int32_t r = (int32_t)(blockIdx.x * BLOCK + threadIdx.x);
    if (r >= a.rows || (a.pos[r] + 1) % a.ratio) return;
    a.row_of[paged_row(a.entries, a.seq[r], a.pos[r] / a.ratio)] = -1;
}

void hd_forget_entries_cuda(hd_stream *s, const hd_forget_entries_args *a) {
    if (a->rows == 0) return;
    launch_kernel(hd_cuda_stream(s), forget_entries, dim3(blocks_for(a->rows, BLOCK)), BLOCK, 0,
                  1, *a);
    hd_cuda_check(s, "forget_entries");
}

/* ---- looking up ---- */

/* The lowest claim stays. */
static __device__ void claim(int32_t *row_of, int32_t choice) {
    const int32_t mine = -2 - choice;
    int32_t seen = *row_of;
    while (seen >= -1 || seen < mine) {
        const int32_t before = atomicCAS(row_of, seen, mine);
        if (before == seen) return;
        seen = before;
    }
}

/* out = the row, and of a missing entry -2 - entry. */
static __global__ void look_up(hd_resident_args a) {
    begin_kernel();
    const hd_resident &b = a.buffer;
    const int32_t i = (int32_t)(blockIdx.x * BLOCK + threadIdx.x), n = a.rows * a.top_k;
    const bool is_selected = i < n && a.selected[i] >= 0;
    bool lacking = false;
    if (i < n && !is_selected) a.out[i] = -1;
    if (is_selected) {
        const int32_t entry = (int32_t)paged_row(a.entries, a.seq[i / a.top_k], a.selected[i]);
        const int32_t row = *static_cast<volatile int32_t *>(&b.row_of[entry]);
        lacking = row < 0 || b.owner[row] != entry + 1;
        a.out[i] = lacking ? -2 - entry : row;
        if (lacking) {
            claim(&b.row_of[entry], i);
        } else {
            b.used[row] = b.state->pass + 1;
        }
    }
    const int n_selected = __syncthreads_count(is_selected),
              n_lacking = __syncthreads_count(lacking);
    if (threadIdx.x > 0) return;
    if (n_selected) atomicAdd(&b.state->n_selected, n_selected);
    if (n_lacking) atomicAdd(&b.state->n_lacking, n_lacking);
}

/* ---- taking rows ---- */

/* The sum over the threads before this one, and over all; of one block. */
static __device__ int32_t sum_before(int32_t x, int32_t *all) {
    __shared__ int32_t of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int32_t sum = x;
    for (int step = 1; step < WARP; step *= 2) {
        const int32_t other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    int32_t before = 0, total = 0;
    for (int w = 0; w < TAKE_WARPS; w++) {
        if (w < warp) before += of_warp[w];
        total += of_warp[w];
    }
    __syncthreads();
    *all = total;
    return before + sum - x;
}

/* Calls place(k, i) for the k-th i below n for which is(i), in ascending order. A warp has a stretch of
 * them. Returns how many there are. */
template <typename Is, typename Place>
static __device__ int32_t list(int32_t n, Is is, Place place) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int32_t each = (n + TAKE_THREADS - 1) / TAKE_THREADS * WARP;
    const int32_t first = warp * each, end = min(first + each, n);
    int32_t count = 0, all;
    for (int32_t i = first + lane; i < end; i += WARP) count += is(i);
    count = __reduce_add_sync(ALL_LANES, count);
    int32_t at = sum_before(lane == 0 ? count : 0, &all);
    at = __shfl_sync(ALL_LANES, at, 0);
    for (int32_t i = first + lane; i - lane < end; i += WARP) {
        const bool yes = i < end && is(i);
        const unsigned set = __ballot_sync(ALL_LANES, yes);
        if (yes) place(at + __popc(set & ((1u << lane) - 1)), i);
        at += __popc(set);
    }
    __syncthreads();
    return all;
}

static __device__ __forceinline__ int32_t age_of(const hd_resident &b, int32_t row) {
    const int64_t age = b.state->pass + 1 - b.used[row];
    return age < HD_RESIDENT_AGES ? (int32_t)age : HD_RESIDENT_AGES - 1;
}

/* All rows of more than age `least` take an entry, and the first `of_least` of that age. */
struct oldest {
    int32_t least, of_least;
};

static __device__ oldest find_age(const hd_resident &b, int32_t n_missed) {
    __shared__ int32_t rows_of[HD_RESIDENT_AGES];
    __shared__ oldest found;
    rows_of[threadIdx.x] = 0;
    __syncthreads();
    for (int32_t r = (int32_t)threadIdx.x; r < b.n; r += TAKE_THREADS) {
        const int32_t age = age_of(b, r);
        const unsigned same = __match_any_sync(__activemask(), age);
        if ((int)(threadIdx.x % WARP) == __ffs(same) - 1)
            atomicAdd(&rows_of[age], __popc(same));
    }
    __syncthreads();
    const int32_t age = HD_RESIDENT_AGES - 1 - (int32_t)threadIdx.x, own = rows_of[age];
    int32_t all;
    const int32_t older = sum_before(own, &all);
    if (older < n_missed && n_missed <= older + own) found = {age, n_missed - older};
    __syncthreads();
    return found;
}

static __device__ void take_rows(const hd_resident &b, int32_t n_missed) {
    __shared__ int32_t last_of_least;
    const oldest old = find_age(b, n_missed);
    list(
        b.n, [&](int32_t r) { return age_of(b, r) == old.least; },
        [&](int32_t k, int32_t r) {
            if (k == old.of_least - 1) last_of_least = r;
        });
    const int32_t last = last_of_least;
    list(
        b.n,
        [&](int32_t r) {
            const int32_t age = age_of(b, r);
            return age > old.least || (age == old.least && r <= last);
        },
        [&](int32_t k, int32_t r) {
            const int32_t entry = b.missed[k];
            b.victim[k] = r;
            b.row_of[entry] = r;
            b.owner[r] = entry + 1;
            b.used[r] = b.state->pass + 1;
        });
}

static __global__ void __launch_bounds__(TAKE_THREADS) take(hd_resident_args a) {
    begin_kernel();
    const hd_resident &b = a.buffer;
    const bool lacks = b.state->n_lacking > 0;
    int32_t n_missed = 0;
    __syncthreads(); /* thread 0 is about to clear it */
    if (lacks) {
        n_missed = list(
            a.rows * a.top_k,
            [&](int32_t i) { return a.out[i] < -1 && b.row_of[-2 - a.out[i]] == -2 - i; },
            [&](int32_t k, int32_t i) { b.missed[k] = -2 - a.out[i]; });
        take_rows(b, n_missed);
    }
    if (threadIdx.x > 0) return;
    hd_resident_state &s = *b.state;
    s.pass++;
    s.all.selected += s.n_selected;
    s.all.fetched += n_missed;
    s.n_selected = s.n_lacking = 0;
    s.n_missed = n_missed;
    *b.counts = s.all;
}

/* ---- fetching: a warp copies an entry ---- */

template <typename T>
static __device__ void copy_entry(const hd_resident_args &a, int32_t k, int32_t bytes) {
    const int64_t n = bytes / (int)sizeof(T);
    const T *from = static_cast<const T *>(a.entries.rows.data) + n * a.buffer.missed[k];
    T *to = static_cast<T *>(a.buffer.rows.data) + n * a.buffer.victim[k];
#pragma unroll 4
    for (int32_t c = (int32_t)threadIdx.x % WARP; c < n; c += WARP) to[c] = from[c];
}

static __global__ void fetch(hd_resident_args a, int32_t bytes) {
    begin_kernel();
    const hd_resident &b = a.buffer;
    const int32_t n_missed = b.state->n_missed, n = a.rows * a.top_k;
    const int32_t thread = (int32_t)(blockIdx.x * BLOCK + threadIdx.x);
    const int32_t threads = (int32_t)gridDim.x * BLOCK;
    const uintptr_t all =
        (uintptr_t)a.entries.rows.data | (uintptr_t)b.rows.data | (uintptr_t)bytes;
    if (n_missed == 0) return;
    for (int32_t k = thread / WARP; k < n_missed; k += threads / WARP) {
        if (all % sizeof(uint4) == 0) {
            copy_entry<uint4>(a, k, bytes);
        } else if (all % sizeof(uint2) == 0) {
            copy_entry<uint2>(a, k, bytes);
        } else if (all % sizeof(uint32_t) == 0) {
            copy_entry<uint32_t>(a, k, bytes);
        } else {
            copy_entry<uint16_t>(a, k, bytes);
        }
    }
    for (int32_t i = thread; i < n; i += threads) {
        if (a.out[i] < -1) a.out[i] = b.row_of[-2 - a.out[i]];
    }
}

void hd_resident_cuda(hd_stream *s, const hd_resident_args *a) {
    const int64_t n = (int64_t)a->rows * a->top_k;
    cudaStream_t queue = hd_cuda_stream(s);
    if (n == 0 || !ops_fits_buffer(s, a)) return;
    const int32_t bytes = (int32_t)hd_paged_entry_bytes(&a->entries);
    const unsigned warps = blocks_for(n, BLOCK / WARP),
                   workers = (unsigned)hd_stream_workers(s);
    launch_kernel(queue, look_up, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a);
    launch_kernel(queue, take, dim3(1), TAKE_THREADS, 0, 1, *a);
    launch_kernel(queue, fetch, dim3(warps < workers ? warps : workers), BLOCK, 0, 1, *a,
                  bytes);
    hd_cuda_check(s, "resident");
}
