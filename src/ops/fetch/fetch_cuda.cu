/* fetch_cuda.cu - experts in host memory: one block finds what a round lacks, gives it slots and decides what
 * the host computes; a few others write the rows for the host, and copy the experts. */
#include "ops/cuda/block_internal.cuh"
#include "ops/cuda/cuda_internal.cuh"

namespace {

constexpr int PLAN_THREADS = HD_MAX_FETCH_EXPERTS;
/* 16 blocks have a megabyte under way, several times what a bus of 64 GB/s and its latency ask for. */
constexpr int COPY_BLOCKS = 16, COPY_THREADS = 512, AT_ONCE = 8;
constexpr int JOIN_BLOCKS = 8;
constexpr int SPINS = 64; /* between two looks at the clock */

/* The sum of x over the threads up to this one. */
__device__ int32_t sum_upto(int32_t x) {
    int32_t all;
    return x + scan_before<PLAN_THREADS>(x, &all);
}

/* ---- rows that the host computes ---- */

/* Of an expert that is missing: how many the host would take before it, and their rows. */
struct place_in_line {
    int32_t before, rows_before;
};

/* Thread t has expert t; all threads call it. */
__device__ place_in_line stand_in_line(const hd_moe_fetch_args &a, bool lacks, int32_t rows,
                                       int64_t now) {
    __shared__ uint64_t key[HD_MAX_FETCH_EXPERTS]; /* rows, then the turn */
    const int32_t t = (int32_t)threadIdx.x;
    const uint64_t own = (uint64_t)rows << 32 | (uint64_t)((t + now) % a.n_experts);
    place_in_line p = {};
    if (t < a.n_experts) key[t] = lacks ? own : ~0ull;
    __syncthreads();
    for (int32_t k = 0; lacks && k < a.n_experts; k++) {
        if (key[k] >= own) continue;
        p.before++;
        p.rows_before += (int32_t)(key[k] >> 32);
    }
    return p;
}

/* How many of n missing experts the host takes; what the round takes then. All threads call it. */
__device__ int32_t count_sent(const hd_host_rows &h, const place_in_line &p, bool lacks,
                              int32_t rows, int32_t n, int64_t now, int64_t *predicted) {
    __shared__ unsigned long long
        best; /* the time, and how many: of the most, or of the least time */
    const int64_t fetch_ns = h.desk->fetch_ns;
    const volatile hd_host_mail *m = h.mail;
    const int64_t expert_ns = m->expert_ns, row_ns = m->row_ns;
    const bool pause =
        !h.always && (expert_ns <= 0 || fetch_ns <= 0 || now % HD_HOST_PAUSE == 0);
    const auto time_of = [&](int64_t k, int64_t all_rows) {
        return max(k * expert_ns + all_rows * row_ns, (n - k) * fetch_ns);
    };
    const int32_t k = p.before + 1, all = p.rows_before + rows;
    if (threadIdx.x == 0) best = h.always ? 0 : (unsigned long long)(n * fetch_ns) << 11;
    __syncthreads();
    if (lacks && !pause && all <= h.most) {
        if (h.always) {
            atomicMax(&best, (unsigned long long)k);
        } else {
            atomicMin(&best, (unsigned long long)time_of(k, all) << 11 | (unsigned)k);
        }
    }
    __syncthreads();
    const int32_t sent = (int32_t)(best & 0x7ff);
    *predicted = (int64_t)(best >> 11);
    if (!h.always || sent == 0) return sent;
    __shared__ int64_t longer;
    if (lacks && k == sent) longer = time_of(k, all);
    __syncthreads();
    *predicted = longer;
    return sent;
}

struct sent_expert {
    bool own;  /* this thread's */
    int32_t n; /* of all */
};

/* Decides what the host computes, and writes it down for both. All threads call it. */
__device__ sent_expert share(const hd_moe_fetch_args &a, bool lacks, int32_t rows, int32_t n,
                             int64_t now) {
    hd_host_desk *d = a.host.desk;
    hd_host_mail *m = a.host.mail;
    const int32_t t = (int32_t)threadIdx.x;
    if (t == 0) {
        d->begun_ns = (int64_t)hd_cuda_clock_ns();
        d->n = d->rows = 0;
    }
    if (n == 0) return {};
    int64_t predicted;
    const place_in_line p = stand_in_line(a, lacks, rows, now);
    const int32_t sent = count_sent(a.host, p, lacks, rows, n, now, &predicted);
    const bool own = lacks && p.before < sent;
    if (!own) return {false, sent};
    d->expert[p.before] = m->expert[p.before] = t;
    d->first[p.before] = m->first[p.before] = p.rows_before;
    if (p.before == sent - 1) {
        d->n = m->n = sent;
        d->rows = d->first[sent] = m->first[sent] = p.rows_before + rows;
        d->asked++;
        m->layer = a.layer;
        a.counts->sent += sent;
        a.counts->sent_rows += p.rows_before + rows;
        a.counts->predicted_ns += predicted;
    }
    return {own, sent};
}

/* ---- the plan ---- */

/* When a slot is given away: the lowest first. */
struct turn {
    int64_t used;
    bool later, kept; /* its expert has its turn in a later round, in this one */
};

__device__ __forceinline__ bool goes_first(const turn &x, int32_t i, const turn &y, int32_t k) {
    if (x.later != y.later) return y.later;
    return x.used != y.used ? x.used < y.used : i < k;
}

/* at: a slot, or place -1 - at of the set */
__device__ __forceinline__ uint8_t *memory_at(const hd_moe_fetch_args &a, int32_t at) {
    return at >= 0 ? a.slots.memory + at * a.slots.slot_bytes
                   : a.set + (-1 - at) * a.slots.slot_bytes;
}

__device__ void set_table(const hd_moe_fetch_args &a, int32_t expert, int32_t at) {
    uint8_t *slot = memory_at(a, at);
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) {
        hd_weight w = a.from[m * a.n_experts + expert];
        w.data = slot + a.layout.data_at[m];
        if (a.layout.scale_bytes[m]) w.scale = slot + a.layout.scale_at[m];
        a.table[m * a.n_experts + expert] = w;
    }
}

__device__ int64_t bytes_of(const hd_expert_layout &l) {
    int64_t bytes = 0;
    for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++)
        bytes += l.data_bytes[m] + l.scale_bytes[m];
    return bytes;
}

/* Lists in victim the first n slots to be given away, and frees them. Thread t has slot t. */
__device__ void choose_victims(const hd_moe_fetch_args &a, int32_t *victim, int32_t first,
                               int32_t end, int32_t n) {
    __shared__ turn turns[HD_MAX_FETCH_EXPERTS];
    const hd_expert_slots &s = a.slots;
    const int32_t t = (int32_t)threadIdx.x;
    int32_t expert = -1;
    if (t < s.n_slots) {
        expert = s.holder[t];
        const bool wanted = expert >= first && a.offset[expert + 1] > a.offset[expert];
        turns[t] = {s.used[t], wanted && expert >= end, wanted && expert < end};
    }
    __syncthreads();
    if (t >= s.n_slots || turns[t].kept) return;
    int32_t before = 0;
    for (int32_t k = 0; k < s.n_slots; k++) {
        before += k != t && !turns[k].kept && goes_first(turns[k], k, turns[t], t);
    }
    if (before >= n) return;
    victim[before] = t;
    if (expert >= 0) s.slot[expert] = -1;
}

/* Thread t has expert t, and slot t. */
__global__ void __launch_bounds__(PLAN_THREADS)
    plan_fetch(const __grid_constant__ hd_moe_fetch_args a) {
    begin_kernel();
    __shared__ int32_t victim[HD_MAX_FETCH_EXPERTS]; /* or slots without an expert */
    const hd_expert_slots &s = a.slots;
    const int32_t t = (int32_t)threadIdx.x, first = a.before ? a.before[1] : 0;
    const int64_t now = *s.clock + (!a.before && !a.set);
    const bool is_expert = t < a.n_experts, is_slot = t < s.n_slots;
    const int32_t rows = !is_expert || t < first ? 0
                         : a.offset              ? a.offset[t + 1] - a.offset[t]
                                                 : 1;
    const int32_t had = rows > 0 ? s.slot[t] : -1;
    const bool is_empty = a.set && is_slot && s.holder[t] < 0;
    const int32_t nth_empty = a.set ? sum_upto(is_empty) : 0;
    const int32_t n_empty = a.set ? __syncthreads_count(is_empty) : 0;
    const int32_t selected = sum_upto(rows > 0), missing = sum_upto(rows > 0 && had < 0);
    const bool fits =
        is_expert && (a.set || selected <= s.n_slots) && missing - n_empty <= a.most;
    const int32_t end =
        __syncthreads_count(fits); /* of those from 0 on: before first all fit */
    const bool own = rows > 0 && t < end, lacks = own && had < 0;
    const int32_t n_selected = __syncthreads_count(own), n_missing = __syncthreads_count(lacks);
    sent_expert sent = {};
    if (a.host.mail) sent = share(a, lacks, rows, n_missing, now);
    const bool fetched = lacks && !sent.own;
    const int32_t nth = sum_upto(fetched),
                  n = n_missing - sent.n; /* of those that are fetched */

    if (!a.set) {
        choose_victims(a, victim, first, end, n);
    } else if (is_empty) {
        victim[nth_empty - 1] = t;
    }
    __syncthreads();
    if (own) {
        int32_t at = lacks ? 0 : had;
        if (fetched) {
            const bool in_slot = !a.set || nth <= n_empty;
            at = in_slot ? victim[nth - 1] : n_empty - nth;
            a.todo[nth] = t;
            a.todo[a.n_experts + nth] = at;
            if (in_slot) {
                s.slot[t] = at;
                s.holder[at] = t;
            }
        }
        if (at >= 0 && !sent.own && (fetched || !a.set)) s.used[at] = now;
        set_table(a, t, at);
    }
    if (a.round_offset) {
        const int32_t low = a.offset[first], high = a.offset[end];
        for (int32_t e = t; e <= a.n_experts; e += PLAN_THREADS) {
            a.round_offset[e] = min(max(a.offset[e], low), high);
        }
    }
    __syncthreads(); /* every thread has read `before`, and the counts are those of the host's rows */
    if (t > 0) return;
    *s.clock = now;
    a.range[0] = first;
    a.range[1] = end;
    a.todo[0] = n;
    hd_fetch_counts c = *a.counts;
    c.used += n_selected;
    c.staged += n_selected - n_missing;
    c.fetched += n;
    c.fetched_bytes += n * bytes_of(a.layout);
    *a.counts = c;
    if (a.seen) *a.seen = c;
}

/* ---- copies ---- */

/* The part of an array that the grid's threads copy together, in words that both ends are aligned
 * for. */
template <typename T>
__device__ void copy_words(uint8_t *to, const uint8_t *from, int64_t n, int64_t thread,
                           int64_t n_threads) {
    T *out = reinterpret_cast<T *>(to);
    const T *in = reinterpret_cast<const T *>(from);
    int64_t i = thread;
    for (; i + (AT_ONCE - 1) * n_threads < n; i += AT_ONCE * n_threads) {
        T word[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) word[k] = __ldcs(in + i + k * n_threads);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) out[i + k * n_threads] = word[k];
    }
    for (; i < n; i += n_threads) out[i] = __ldcs(in + i);
}

/* A matrix of a file may lie at any address. */
__device__ void copy_array(uint8_t *to, const void *source, int64_t bytes, int64_t thread,
                           int64_t n_threads) {
    const uint8_t *from = static_cast<const uint8_t *>(source);
    const uintptr_t at = reinterpret_cast<uintptr_t>(from);
    const int64_t whole = bytes / 16 * 16;
    if (at % 16 == 0) {
        copy_words<uint4>(to, from, whole / 16, thread, n_threads);
    } else if (at % 8 == 0) {
        copy_words<uint2>(to, from, whole / 8, thread, n_threads);
    } else if (at % 4 == 0) {
        copy_words<unsigned int>(to, from, whole / 4, thread, n_threads);
    } else {
        copy_words<unsigned char>(to, from, whole, thread, n_threads);
    }
    copy_words<unsigned char>(to + whole, from + whole, bytes - whole, thread, n_threads);
}

/* Whether this block is the last one that counts; what the others wrote is there then. */
__device__ bool is_last(uint32_t *counter) {
    __threadfence_system(); /* the host reads it too */
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
        if (last) *counter = 0;
    }
    return __syncthreads_or(last);
}

/* Every block writes some of the rows; the last one asks the host for them. */
__device__ void write_rows(const hd_moe_fetch_args &a) {
    const hd_host_rows &h = a.host;
    hd_host_desk *d = h.desk;
    for (int32_t r = (int32_t)blockIdx.x; r < d->rows; r += (int32_t)gridDim.x) {
        int32_t i = 0;
        while (d->first[i + 1] <= r) i++;
        const int32_t assignment = a.assignment[a.offset[d->expert[i]] + r - d->first[i]];
        const cuda_act *x = acts(a.x) + (int64_t)(assignment / a.top_k) * h.cols;
        for (int32_t c = (int32_t)threadIdx.x; c < h.cols; c += COPY_THREADS) {
            h.x[(int64_t)r * h.cols + c] = wide(x[c]);
        }
        if (threadIdx.x == 0) h.weight[r] = a.weight ? a.weight[assignment] : 1.0f;
    }
    if (!is_last(&d->written) || threadIdx.x > 0) return;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&h.mail->asked), "r"(d->asked)
                 : "memory");
}

/* An eighth of the new figure, so that one layer does not decide. */
__device__ void time_copies(hd_host_desk *d, int32_t n) {
    if (!is_last(&d->copied) || threadIdx.x > 0) return;
    const int64_t each = max((int64_t)1, ((int64_t)hd_cuda_clock_ns() - d->begun_ns) / n);
    d->fetch_ns = d->fetch_ns ? (7 * d->fetch_ns + each) / 8 : each;
}

__global__ void __launch_bounds__(COPY_THREADS)
    copy_experts(const __grid_constant__ hd_moe_fetch_args a) {
    begin_kernel();
    const int32_t n = a.todo[0];
    const int64_t n_threads = (int64_t)gridDim.x * COPY_THREADS;
    const int64_t thread = (int64_t)blockIdx.x * COPY_THREADS + threadIdx.x;
    if (a.host.mail && a.host.desk->n > 0) write_rows(a);
    for (int32_t i = 1; i <= n; i++) {
        uint8_t *slot = memory_at(a, a.todo[a.n_experts + i]);
        for (int32_t m = 0; m < HD_EXPERT_MATRICES; m++) {
            const hd_weight &w = a.from[m * a.n_experts + a.todo[i]];
            copy_array(slot + a.layout.data_at[m], w.data, a.layout.data_bytes[m], thread,
                       n_threads);
            copy_array(slot + a.layout.scale_at[m], w.scale, a.layout.scale_bytes[m], thread,
                       n_threads);
        }
    }
    if (a.host.mail && n > 0) time_copies(a.host.desk, n);
}

/* ---- rounds and joins ---- */

__global__ void __launch_bounds__(BLOCK) name_rows(hd_moe_round_args a) {
    begin_kernel();
    const int32_t low = a.offset[a.range[0]], high = a.offset[a.range[1]];
    for (int32_t e = (int32_t)threadIdx.x; e <= a.n_experts; e += BLOCK) {
        a.round_offset[e] = min(max(a.offset[e], low), high);
    }
}

__device__ bool await_host(hd_host_mail *m, uint32_t asked) {
    volatile int32_t *ended = &m->ended;
    const uint64_t begun = hd_cuda_clock_ns();
    for (;;) {
        for (int i = 0; i < SPINS; i++) {
            uint32_t done;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(done)
                         : "l"(&m->done)
                         : "memory");
            if (done == asked) return true;
        }
        if (*ended) return false;
        if (hd_cuda_clock_ns() - begun < HD_HOST_MAX_SECONDS * 1000000000ull) continue;
        *static_cast<volatile int32_t *>(&m->late) = 1;
        return false;
    }
}

__global__ void __launch_bounds__(BLOCK) join_rows(hd_moe_join_args a) {
    begin_kernel();
    const hd_host_rows &h = a.host;
    hd_host_desk *d = h.desk;
    if (d->n == 0) return;
    const bool came = threadIdx.x > 0 || await_host(h.mail, d->asked);
    if (!__syncthreads_and(came)) return;
    for (int32_t r = (int32_t)blockIdx.x; r < d->rows; r += (int32_t)gridDim.x) {
        int32_t i = 0;
        while (d->first[i + 1] <= r) i++;
        cuda_act *y = acts(a.y) + (int64_t)(a.offset[d->expert[i]] + r - d->first[i]) * h.cols;
        const volatile float *from = h.y + (int64_t)r * h.cols;
#pragma unroll 4
        for (int32_t c = (int32_t)threadIdx.x; c < h.cols; c += BLOCK) y[c] = narrow(from[c]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        a.counts->taken_ns += (int64_t)hd_cuda_clock_ns() - d->begun_ns;
    }
}

} // namespace

void hd_moe_fetch_cuda(hd_stream *s, const hd_moe_fetch_args *a) {
    if (a->n_experts > HD_MAX_FETCH_EXPERTS || a->slots.n_slots > HD_MAX_FETCH_EXPERTS) {
        return hd_stream_fail(s, HD_EUNSUPPORTED, "moe_fetch: too many experts in a layer");
    }
    cudaStream_t queue = hd_cuda_stream(s);
    launch_kernel(queue, plan_fetch, dim3(1), PLAN_THREADS, 0, 1, *a);
    launch_kernel(queue, copy_experts, dim3(COPY_BLOCKS), COPY_THREADS, 0, 1, *a);
    hd_cuda_check(s, "moe_fetch");
}

void hd_moe_round_cuda(hd_stream *s, const hd_moe_round_args *a) {
    launch_kernel(hd_cuda_stream(s), name_rows, dim3(1), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "moe_round");
}

void hd_moe_join_cuda(hd_stream *s, const hd_moe_join_args *a) {
    launch_kernel(hd_cuda_stream(s), join_rows, dim3(JOIN_BLOCKS), BLOCK, 0, 1, *a);
    hd_cuda_check(s, "moe_join");
}
