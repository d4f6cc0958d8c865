/* attention_naive_keys_sm90.cu - keys and values of MLA's naive form, computed from the cached latents
 * for every head, in bfloat16.
 *
 * A block takes a tile of 128 latents and some heads. The latents stay in shared memory, while the
 * matrices of its heads, which a first kernel has made bfloat16, stream past them; two warpgroups
 * multiply 64 latents each.
 *
 * A value that is no finite number must not reach rows that do not see its key: a weight of zero
 * would not keep it away. It is replaced by zero, and its key by NaN, which makes the rows that
 * see it NaN. */
#include "ops/cuda_attention/attention_naive_internal.cuh"
#include "ops/cuda/unpack_internal.cuh"
#include "ops/cuda/weight_internal.cuh"
#include "ops/cuda/wgmma_internal.cuh"

constexpr int THREADS = 3 * WARPGROUP, STAGES = 3;
constexpr int A_BOXES = NAIVE_RANK / BOX_COLS, EIGHTS = NAIVE_RANK / 8;
constexpr int PACKED_GROUP = 128, PACKED_LATENT = NAIVE_RANK + 2 * NAIVE_ROPE + 4;
constexpr int STAGE_BYTES = NAIVE_MADE * 128;
constexpr size_t SHARED_BYTES = (size_t)A_BOXES * NAIVE_BOX + STAGES * STAGE_BYTES + 64;

/* ---- the matrix in bfloat16 ---- */

/* Which row of a head is the n-th of 32 in the product: a lane then has eight neighbors. */
static __device__ __forceinline__ int naive_row_of(int n) {
    return (n & ~31) + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
}

static __device__ __forceinline__ uint4 packed(const float (&x)[8]) {
    return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                      bf16_pair(x[6], x[7]));
}

static __global__ void __launch_bounds__(BLOCK)
    dequantize_weights(hd_weight w, naive_keys k, bool is_fp8) {
    begin_kernel();
    const int32_t at = (int32_t)(blockIdx.x * BLOCK + threadIdx.x), col = at % EIGHTS * 8;
    const int32_t to = at / EIGHTS, head = k.first_head + to / NAIVE_MADE;
    const int32_t row = head * NAIVE_MADE + naive_row_of(to % NAIVE_MADE);
    float x[8];
    if (is_fp8) { /* of one scale */
        const uint2 bits = *reinterpret_cast<const uint2 *>(
            static_cast<const uint8_t *>(w.data) + (int64_t)row * w.cols + col);
        const float scale = scale_at(w, row, col);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = e4m3_to_f32((uint8_t)((i < 4 ? bits.x : bits.y) >> i % 4 * 8)) * scale;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = weight_at(w, row, col + i);
    }
    *reinterpret_cast<uint4 *>(k.weights + (int64_t)to * NAIVE_RANK + col) = packed(x);
}

/* ---- keys and values ---- */

struct block_memory {
    uint8_t *latents, *weights;
    uint64_t *full, *empty; /* [STAGES] */
};

static __device__ __forceinline__ block_memory carve(uint8_t *shared) {
    block_memory m;
    m.latents = shared;
    m.weights = m.latents + A_BOXES * NAIVE_BOX;
    m.full = reinterpret_cast<uint64_t *>(m.weights + STAGES * STAGE_BYTES);
    m.empty = m.full + STAGES;
    return m;
}

/* Eight neighboring columns of a latent, as bfloat16; EIGHTS and on are rotated. */
template <bool PACKED>
static __device__ __forceinline__ uint4 load_eight(const uint8_t *latent, int eight) {
    if constexpr (PACKED) {
        const bool plain = eight >= EIGHTS;
        const uint32_t *at = reinterpret_cast<const uint32_t *>(
            latent + (plain ? NAIVE_RANK + (eight - EIGHTS) * 16 : eight * 8));
        if (plain) return make_uint4(at[0], at[1], at[2], at[3]);
        const uint32_t scale = latent[NAIVE_RANK + 2 * NAIVE_ROPE + eight / (PACKED_GROUP / 8)];
        const uint4 x = unpack_eight(at[0], at[1], first_factor(scale));
        return scale > LARGEST_FIRST ? multiply_eight(x, second_factor(scale)) : x;
    } else {
        return reinterpret_cast<const uint4 *>(latent)[eight];
    }
}

/* The tile's latents into shared memory, zeros behind the last; one block also copies what is
 * rotated. All threads' work. */
template <bool PACKED>
static __device__ void load_latents(const hd_attention_naive_args &a, const naive_keys &k,
                                    const block_memory &m, const naive_tile &t) {
    constexpr int64_t BYTES = PACKED ? PACKED_LATENT : 2 * (NAIVE_RANK + NAIVE_ROPE);
    const int32_t n = a.seqs.pos[a.seqs.first_row[t.seq + 1] - 1] + 1,
                  first = t.tile * NAIVE_KEYS;
    const uint8_t *pool = static_cast<const uint8_t *>(a.latents.rows.data);
    const uint32_t to = shared_address(m.latents);
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < NAIVE_KEYS * EIGHTS; i += THREADS) {
        const int key = i / EIGHTS, eight = i % EIGHTS;
        const bool live = first + key < n;
        const uint8_t *from =
            pool + paged_row(a.latents, t.seq, live ? first + key : first) * BYTES;
        const uint32_t at = to + (uint32_t)(eight / 8 * NAIVE_BOX) + box_at(key, eight % 8);
        if constexpr (PACKED) {
            const uint4 x = live ? load_eight<true>(from, eight) : uint4{};
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x),
                         "r"(x.y), "r"(x.z), "r"(x.w)
                         : "memory");
        } else {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at),
                         "l"(from + eight * 16), "r"(live ? 16 : 0)
                         : "memory");
        }
    }
    constexpr int EACH = NAIVE_ROPE / 8;
    uint4 *rotated = reinterpret_cast<uint4 *>(k.rotated) +
                     (int64_t)(t.first_key + t.tile) * NAIVE_KEYS * EACH;
    for (int i = (int)threadIdx.x; blockIdx.y == 0 && i < NAIVE_KEYS * EACH; i += THREADS) {
        const int32_t key = first + i / EACH;
        const uint8_t *from = pool + paged_row(a.latents, t.seq, key < n ? key : first) * BYTES;
        rotated[i] = key < n ? load_eight<PACKED>(from, EIGHTS + i % EACH) : uint4{};
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_proxy_async();
}

/* The largest that is finite in bfloat16 too. */
constexpr float LARGEST = 3.3895e38f;

/* One key and value of a thread's two: eight neighbors of every 32. */
static __device__ __forceinline__ void put_made(float (&d)[128], int half, __nv_bfloat16 *to) {
    bool bad = false;
#pragma unroll
    for (int i = 64; i < 128; i++) {
        if (i / 2 % 2 == half) bad = bad || !(fabsf(d[i]) <= LARGEST);
    }
    if (__any_sync(ALL_LANES, bad)) {
        for (int step = 1; step < 4; step *= 2)
            bad |= __shfl_xor_sync(ALL_LANES, (int)bad, step) != 0;
#pragma unroll
        for (int i = 64; i < 128; i++) {
            if (i / 2 % 2 == half && !(fabsf(d[i]) <= LARGEST)) d[i] = 0.0f;
        }
        if (bad) d[2 * half] = CUDART_NAN_F;
    }
#pragma unroll
    for (int group = 0; group < 8; group++) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = d[16 * group + i / 2 * 4 + 2 * half + i % 2];
        *reinterpret_cast<uint4 *>(to + 32 * group + threadIdx.x % 4 * 8) = packed(x);
    }
}

static __device__ void compute(const naive_keys &k, const block_memory &m, int64_t first_key,
                               int32_t head, int32_t end) {
    const int group = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARP;
    const uint64_t latents = box_descriptor(shared_address(m.latents) + group * BOX_BYTES);
    const int64_t row = first_key + group * 64 + threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    uint32_t n = 0;
    for (; head < end; head++) {
        float d[128];
#pragma unroll
        for (int box = 0; box < A_BOXES; box++, n++) {
            const uint32_t stage = n % STAGES;
            const uint64_t w = box_descriptor(shared_address(m.weights) + stage * STAGE_BYTES);
            mbarrier_wait(m.full + stage, n / STAGES & 1);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; step++) {
                wgmma_m64n256k16(d, latents + box * (NAIVE_BOX >> 4) + step * 2, w + step * 2,
                                 box + step > 0);
            }
            wgmma_commit_group();
            if (box == 0) continue;
            wgmma_wait_group<1>();
            if (lane == 0) mbarrier_arrive(m.empty + (n - 1) % STAGES);
        }
        wgmma_wait_group<0>();
        if (lane == 0) mbarrier_arrive(m.empty + (n - 1) % STAGES);
        __nv_bfloat16 *to = k.made + ((int64_t)head * k.tiles * NAIVE_KEYS + row) * NAIVE_MADE;
        put_made(d, 0, to);
        put_made(d, 1, to + 8 * NAIVE_MADE);
    }
}

/* Block y of gridDim.y has that share of the heads. */
template <bool PACKED>
static __global__ void __launch_bounds__(THREADS, 1)
    make_keys(const __grid_constant__ CUtensorMap weights, hd_attention_naive_args a,
              naive_keys k) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const block_memory m = carve(shared);
    const int32_t head = (int32_t)((int64_t)k.heads * blockIdx.y / gridDim.y);
    const int32_t end = (int32_t)((int64_t)k.heads * (blockIdx.y + 1) / gridDim.y);
    begin_kernel();
    const naive_tile t = find_naive_tile<true>(a.seqs, (int32_t)blockIdx.x);
    if (t.seq < 0) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(m.full + i, 1);
            mbarrier_init(m.empty + i, 2 * WARPGROUP / WARP);
        }
        fence_mbarrier_init();
    }
    load_latents<PACKED>(a, k, m, t);
    __syncthreads();
    if (threadIdx.x / WARPGROUP < 2) {
        setmaxnreg_inc<232>();
        compute(k, m, (int64_t)(t.first_key + t.tile) * NAIVE_KEYS, head, end);
        return;
    }
    setmaxnreg_dec<40>();
    if (threadIdx.x != 2 * WARPGROUP) return;
    uint32_t n = 0;
    for (int32_t h = head; h < end; h++) {
        for (int box = 0; box < A_BOXES; box++, n++) {
            const uint32_t stage = n % STAGES;
            mbarrier_wait(m.empty + stage, (n / STAGES & 1) ^ 1);
            mbarrier_arrive_expect_tx(m.full + stage, STAGE_BYTES);
            bulk_copy_2d(m.weights + stage * STAGE_BYTES, &weights, m.full + stage,
                         box * BOX_COLS, h * NAIVE_MADE, EVICT_LAST);
        }
    }
}

void naive_make_keys(hd_stream *s, const hd_attention_naive_args &a, const naive_keys &k) {
    const hd_weight &w = *a.w;
    const bool is_fp8 =
        w.type == HD_E4M3 && (uintptr_t)w.data % 8 == 0 && w.scale && w.block_cols % 8 == 0;
    const box of = {
        2,
        {(cuuint64_t)NAIVE_RANK,             (cuuint64_t)k.heads * NAIVE_MADE},
        {NAIVE_RANK * sizeof(__nv_bfloat16)},
        {BOX_COLS,                        NAIVE_MADE                                }
    };
    CUtensorMap map;
    if (!describe_as(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B,
                     k.weights, of)) {
        hd_stream_fail(s, HD_EUNSUPPORTED, "naive attention: the driver has no tensor maps");
        return;
    }
    cudaStream_t queue = hd_cuda_stream(s);
    launch_kernel(queue, dequantize_weights,
                  blocks_for((int64_t)k.heads * NAIVE_MADE * EIGHTS, BLOCK), BLOCK, 0, 1, w, k,
                  is_fp8);
    const int32_t shares = (int32_t)blocks_for(hd_stream_workers(s), k.tiles);
    const dim3 grid((unsigned)k.tiles, (unsigned)(shares < k.heads ? shares : k.heads));
    const auto make = a.latents.rows.type == HD_E4M3 ? make_keys<true> : make_keys<false>;
    hd_cuda_allow_shared((const void *)make, SHARED_BYTES);
    launch_kernel(queue, make, grid, THREADS, SHARED_BYTES, 1, map, a, k);
}
