/* resident_cuda.cu - entries that rows choose come from host memory into a buffer on the device
 * (HiSparse).
 *
 * A pass is three kernels. The first looks every choice up. A missing entry is claimed by the first
 * choice of it: row_of is -2 less the number of that choice. The second, one cluster on Hopper and one
 * block elsewhere, takes rows for the missing entries, in the order of their claims. The third copies them.
 * Without misses the last two end at once. */
#include "ops/check_internal.h"
#include "ops/cuda/cuda_internal.cuh"

constexpr int TAKE_BLOCKS = 8, TAKE_THREADS = HD_RESIDENT_AGES,
              TAKE_WARPS = TAKE_THREADS / WARP;
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
static __device__ int2 sum_before(int2 x, int2 *all) {
    __shared__ int2 of_warp[WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int2 sum = x;
    for (int step = 1; step < WARP; step *= 2) {
        const int a = __shfl_up_sync(ALL_LANES, sum.x, step);
        const int b = __shfl_up_sync(ALL_LANES, sum.y, step);
        if (lane >= step) sum = {sum.x + a, sum.y + b};
    }
    if (lane == WARP - 1) of_warp[warp] = sum;
    __syncthreads();
    int2 before = {0, 0}, total = {0, 0};
    for (int w = 0; w < TAKE_WARPS; w++) {
        if (w < warp) before = {before.x + of_warp[w].x, before.y + of_warp[w].y};
        total = {total.x + of_warp[w].x, total.y + of_warp[w].y};
    }
    __syncthreads();
    *all = total;
    return {before.x + sum.x - x.x, before.y + sum.y - x.y};
}

/* The numbers below n that a warp looks at: every block of the cluster and every warp of it has a
 * stretch, in ascending order. */
struct stretch {
    int32_t first, end;
};

template <int BLOCKS>
static __device__ stretch stretch_of(int32_t n) {
    constexpr int ALL = BLOCKS * TAKE_WARPS;
    const int32_t each = (n + ALL * WARP - 1) / (ALL * WARP) * WARP;
    const int32_t warp = (int32_t)cluster_rank() * TAKE_WARPS + (int32_t)threadIdx.x / WARP;
    return {min(warp * each, n), min((warp + 1) * each, n)};
}

/* Calls place(numbers before i of the first kind, of the second, i) for each i below n of either kind:
 * kind(i) is {1, 0}, {0, 1} or {0, 0}. before: of blocks before this one. */
template <typename Kind, typename Place>
static __device__ void list(stretch s, int2 before, int2 own, Kind kind, Place place) {
    const int lane = threadIdx.x % WARP;
    const unsigned lower = (1u << lane) - 1;
    int2 all, at = sum_before(lane == 0 ? own : int2{0, 0}, &all);
    at = {__shfl_sync(ALL_LANES, at.x, 0) + before.x,
          __shfl_sync(ALL_LANES, at.y, 0) + before.y};
    for (int32_t i = s.first + lane; i - lane < s.end; i += WARP) {
        const int2 is = i < s.end ? kind(i) : int2{0, 0};
        const unsigned a = __ballot_sync(ALL_LANES, is.x), b = __ballot_sync(ALL_LANES, is.y);
        if (is.x || is.y) place(at.x + __popc(a & lower), at.y + __popc(b & lower), i);
        at = {at.x + __popc(a), at.y + __popc(b)};
    }
}

/* How many of a warp's stretch are of each kind; the same in all lanes. */
template <typename Kind>
static __device__ int2 count(stretch s, Kind kind) {
    int2 n = {0, 0};
#pragma unroll 4
    for (int32_t i = s.first + (int32_t)threadIdx.x % WARP; i < s.end; i += WARP) {
        const int2 is = kind(i);
        n = {n.x + is.x, n.y + is.y};
    }
    return {(int)__reduce_add_sync(ALL_LANES, n.x), (int)__reduce_add_sync(ALL_LANES, n.y)};
}

/* Lists the missing entries. Returns how many there are. */
template <int BLOCKS>
static __device__ int32_t list_missed(const hd_resident_args &a) {
    __shared__ int32_t of_block;
    const hd_resident &b = a.buffer;
    const stretch s = stretch_of<BLOCKS>(a.rows * a.top_k);
    const auto is_claimed = [&](int32_t i) {
        const int32_t entry = -2 - a.out[i];
        return int2{entry >= 0 && b.row_of[entry] == -2 - i, 0};
    };
    const int2 own = count(s, is_claimed);
    int2 all;
    sum_before(threadIdx.x % WARP == 0 ? own : int2{0, 0}, &all);
    if (threadIdx.x == 0) of_block = all.x;
    cluster_sync();
    int2 before = {0, 0};
    int32_t n_missed = 0;
    for (int k = 0; k < BLOCKS; k++) {
        const int32_t n = *cluster_at(&of_block, (unsigned)k);
        if (k < (int)cluster_rank()) before.x += n;
        n_missed += n;
    }
    list(s, before, own, is_claimed,
         [&](int32_t k, int32_t, int32_t i) { b.missed[k] = -2 - a.out[i]; });
    return n_missed;
}

static __device__ __forceinline__ int32_t age_of(const hd_resident &b, int32_t row) {
    const int64_t age = b.state->pass + 1 - b.used[row];
    return age < HD_RESIDENT_AGES ? (int32_t)age : HD_RESIDENT_AGES - 1;
}

/* All rows of more than age `least` take an entry, and the first `of_least` of that age. before: rows
 * of the blocks before this one that are older, and that have that age. */
struct oldest {
    int32_t least, of_least;
    int2 before;
};

template <int BLOCKS>
static __device__ oldest find_age(const hd_resident &b, stretch s, int32_t n_missed) {
    __shared__ int32_t rows_of[HD_RESIDENT_AGES];
    __shared__ oldest found;
    rows_of[threadIdx.x] = 0;
    __syncthreads();
    for (int32_t r = s.first + (int32_t)threadIdx.x % WARP; r < s.end; r += WARP) {
        const int32_t age = age_of(b, r);
        const unsigned same = __match_any_sync(__activemask(), age);
        if ((int)(threadIdx.x % WARP) == __ffs(same) - 1)
            atomicAdd(&rows_of[age], __popc(same));
    }
    cluster_sync();
    const int32_t age = HD_RESIDENT_AGES - 1 - (int32_t)threadIdx.x;
    int32_t before = 0, n = 0;
    for (int k = 0; k < BLOCKS; k++) {
        const int32_t of_block = cluster_at(rows_of, (unsigned)k)[age];
        if (k < (int)cluster_rank()) before += of_block;
        n += of_block;
    }
    int2 all;
    const int2 older = sum_before({n, before}, &all);
    if (older.x < n_missed && n_missed <= older.x + n)
        found = {
            age, n_missed - older.x, {older.y, before}
        };
    __syncthreads();
    return found;
}

/* In ascending order, after list_missed(). */
template <int BLOCKS>
static __device__ void take_rows(const hd_resident &b, int32_t n_missed) {
    const stretch s = stretch_of<BLOCKS>(b.n);
    const oldest old = find_age<BLOCKS>(b, s, n_missed);
    const auto kind = [&](int32_t r) {
        const int32_t age = age_of(b, r);
        return int2{age > old.least, age == old.least};
    };
    list(s, old.before, count(s, kind), kind, [&](int32_t older, int32_t least, int32_t r) {
        if (age_of(b, r) == old.least && least >= old.of_least) return;
        const int32_t k = older + min(least, old.of_least), entry = b.missed[k];
        b.victim[k] = r;
        b.row_of[entry] = r;
        b.owner[r] = entry + 1;
        b.used[r] = b.state->pass + 1;
    });
}

template <int BLOCKS>
static __global__ void __launch_bounds__(TAKE_THREADS) take(hd_resident_args a) {
    begin_kernel();
    const hd_resident &b = a.buffer;
    int32_t n_missed = 0;
    if (b.state->n_lacking > 0) {
        n_missed = list_missed<BLOCKS>(a);
        take_rows<BLOCKS>(b, n_missed);
        cluster_sync(); /* nobody leaves while its counts are read */
    }
    if (cluster_rank() == 0 && threadIdx.x == 0) b.state->n_missed = n_missed;
}

/* ---- fetching: a warp copies an entry ---- */

/* All reads of a lane are under way at once, as the bus is far away. */
template <typename T>
static __device__ void copy_entry(const hd_resident_args &a, int32_t k, int32_t bytes) {
    constexpr int AT_ONCE = 4;
    const int64_t n = bytes / (int)sizeof(T);
    const T *from = static_cast<const T *>(a.entries.rows.data) + n * a.buffer.missed[k];
    T *to = static_cast<T *>(a.buffer.rows.data) + n * a.buffer.victim[k];
    for (int32_t c = (int32_t)threadIdx.x % WARP; c < n; c += AT_ONCE * WARP) {
        T x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (c + i * WARP < n) x[i] = from[c + i * WARP];
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (c + i * WARP < n) to[c + i * WARP] = x[i];
        }
    }
}

static __device__ void end_pass(const hd_resident &b) {
    hd_resident_state &s = *b.state;
    s.pass++;
    s.all.selected += s.n_selected;
    s.all.fetched += s.n_missed;
    s.n_selected = s.n_lacking = 0;
    *b.counts = s.all;
}

template <typename T>
static __global__ void fetch(hd_resident_args a, int32_t bytes) {
    begin_kernel();
    const hd_resident &b = a.buffer;
    const int32_t n_missed = b.state->n_missed, n = a.rows * a.top_k;
    const int32_t thread = (int32_t)(blockIdx.x * BLOCK + threadIdx.x);
    const int32_t threads = (int32_t)gridDim.x * BLOCK;
    if (thread == 0) end_pass(b);
    if (n_missed == 0) return;
    for (int32_t k = thread / WARP; k < n_missed; k += threads / WARP)
        copy_entry<T>(a, k, bytes);
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
                   workers = 2 * (unsigned)hd_stream_workers(s);
    const uintptr_t all =
        (uintptr_t)a->entries.rows.data | (uintptr_t)a->buffer.rows.data | (uintptr_t)bytes;
    const auto copy = all % sizeof(uint4) == 0      ? fetch<uint4>
                      : all % sizeof(uint2) == 0    ? fetch<uint2>
                      : all % sizeof(uint32_t) == 0 ? fetch<uint32_t>
                                                    : fetch<uint16_t>;
    launch_kernel(queue, look_up, dim3(blocks_for(n, BLOCK)), BLOCK, 0, 1, *a);
    if (hd_cuda_is_sm90()) {
        launch_kernel(queue, take<TAKE_BLOCKS>, dim3(TAKE_BLOCKS), TAKE_THREADS, 0, TAKE_BLOCKS,
                      *a);
    } else {
        launch_kernel(queue, take<1>, dim3(1), TAKE_THREADS, 0, 1, *a);
    }
    launch_kernel(queue, copy, dim3(warps < workers ? warps : workers), BLOCK, 0, 1, *a, bytes);
    hd_cuda_check(s, "resident");
}
