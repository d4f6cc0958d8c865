/* wgmma_probe_sm90.cu - which products of Hopper's tensor cores have the same bits; design D8 rests on it.
 *
 * 64 rows `a` times 256 rows `b`, transposed, chained over their columns from zero. A row is K bytes of E4M3 or
 * of bfloat16. wgmma of 8 outputs at a time is compared with every other N, with b rotated through all
 * columns, with a in registers, with a and b exchanged, and with mma.sync. */
#include "ops/wgmma_probe.h"

#include <stdlib.h>
#include <string.h>

#include "ops/cuda/wgmma_internal.cuh"

namespace {

constexpr int A = WGMMA_PROBE_A, B = WGMMA_PROBE_B, ROW = WGMMA_PROBE_BYTES, BOX = 128;
constexpr int BOXES = ROW / BOX, STEPS = BOX / 32; /* of a row; instructions of a box */
constexpr int A_BYTES = A * BOX, B_BYTES = B * BOX;
constexpr int SHARED = BOXES * (A_BYTES + B_BYTES) + 1024;

template <bool E4M3, int N>
struct wgmma;

/* M: N / 2, and M + 1 .. M + 5 as numbers. */
#define PROBED(E4M3, KIND, TAIL, N, M, M1, M2, M3, M4, M5)                                  \
    template <>                                                                             \
    struct wgmma<E4M3, N> {                                                                 \
        static __device__ __forceinline__ void tiles(float (&d)[M], uint64_t a, uint64_t b, \
                                                     int add) {                             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #M2 ", 0;\n"                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" ACCS_##M          \
                         "}, %" #M ", %" #M1 ", p, 1, 1" TAIL ";\n}"                        \
                         : OUTS_##M(d, 0)                                                   \
                         : "l"(a), "l"(b), "r"(add));                                       \
        }                                                                                   \
        static __device__ __forceinline__ void registers(float (&d)[M], const uint32_t *a,  \
                                                         uint64_t b, int add) {             \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #M5 ", 0;\n"                  \
                         "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" ACCS_##M          \
                         "}, {%" #M ", %" #M1 ", %" #M2 ", %" #M3 "}, %" #M4                \
                         ", p, 1, 1" REGISTER_TAIL_##E4M3 ";\n}"                            \
                         : OUTS_##M(d, 0)                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));   \
        }                                                                                   \
    }

/* Of bfloat16 each operand in shared memory may be transposed: here none. */
#define REGISTER_TAIL_true  ""
#define REGISTER_TAIL_false ", 0"
#define BOTH(...)                                       \
    PROBED(true, "k32.f32.e4m3.e4m3", "", __VA_ARGS__); \
    PROBED(false, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)

BOTH(8, 4, 5, 6, 7, 8, 9);
BOTH(16, 8, 9, 10, 11, 12, 13);
BOTH(32, 16, 17, 18, 19, 20, 21);
BOTH(64, 32, 33, 34, 35, 36, 37);
BOTH(128, 64, 65, 66, 67, 68, 69);
BOTH(192, 96, 97, 98, 99, 100, 101);
BOTH(256, 128, 129, 130, 131, 132, 133);

/* Rows as boxes of 128 bytes, swizzled; row i of `to` is row (i + turn) % rows of `from`. */
__device__ void swizzle(uint8_t *to, const uint8_t *from, int rows, int turn) {
    for (int i = (int)threadIdx.x; i < rows * ROW / 16; i += WARPGROUP) {
        const int row = i / (ROW / 16), chunk = i % (ROW / 16), box = chunk / 8;
        const uint4 *x =
            reinterpret_cast<const uint4 *>(from + (row + turn) % rows * ROW) + chunk;
        *reinterpret_cast<uint4 *>(to + box * rows * BOX + box_at(row, chunk % 8)) = *x;
    }
}

/* The same bytes of a row in both types: four of rows l / 4 and eight further, then 16 bytes further. */
__device__ void load_a(uint32_t *r, const uint8_t *rows, int row, int byte) {
    const int lane = (int)threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const int at = row + lane / 4 + i % 2 * 8;
        r[i] = *reinterpret_cast<const uint32_t *>(rows + at * ROW + byte + lane % 4 * 4 +
                                                   i / 2 * 16);
    }
}

/* out [A, B] from column `first` of the turned b on. */
template <bool E4M3, int N, bool REGISTERS>
__global__ void __launch_bounds__(WARPGROUP)
    by_wgmma(float *out, const uint8_t *a, const uint8_t *b, int turn) {
    extern __shared__ uint8_t room[];
    uint8_t *shared = room + (1024 - shared_address(room) % 1024) % 1024;
    uint8_t *left = shared, *right = shared + BOXES * A_BYTES;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    swizzle(left, a, A, 0);
    swizzle(right, b, B, turn);
    fence_proxy_async();
    __syncthreads();
    for (int first = 0; first + N <= B; first += N) {
        float d[N / 2];
        uint32_t r[BOXES * STEPS][4];
        for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
#pragma unroll
        for (int step = 0; step < BOXES * STEPS; step++) {
            if (REGISTERS) load_a(r[step], a, 16 * warp, 32 * step);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BOXES * STEPS; step++) {
            const int box = step / STEPS, byte = step % STEPS * 32;
            const uint64_t x =
                box_descriptor(shared_address(left) + (uint32_t)(box * A_BYTES + byte));
            const uint64_t y = box_descriptor(shared_address(right) +
                                              (uint32_t)(box * B_BYTES + first * BOX + byte));
            if constexpr (REGISTERS) {
                wgmma<E4M3, N>::registers(d, r[step], y, step > 0);
            } else {
                wgmma<E4M3, N>::tiles(d, x, y, step > 0);
            }
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        for (int i = 0; i < N / 2; i++) {
            const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
            const int col = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
            out[row * B + col] = d[i];
        }
    }
}

/* b's rows as the first operand, a's as the second. */
template <bool E4M3>
__global__ void __launch_bounds__(WARPGROUP)
    exchanged(float *out, const uint8_t *a, const uint8_t *b) {
    extern __shared__ uint8_t room[];
    uint8_t *shared = room + (1024 - shared_address(room) % 1024) % 1024;
    uint8_t *right = shared, *left = shared + BOXES * A_BYTES;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    swizzle(right, a, A, 0);
    swizzle(left, b, B, 0);
    fence_proxy_async();
    __syncthreads();
    for (int first = 0; first < B; first += 64) {
        float d[A / 2];
        for (int i = 0; i < A / 2; i++) d[i] = 0.0f;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BOXES * STEPS; step++) {
            const int box = step / STEPS, byte = step % STEPS * 32;
            const uint32_t x = (uint32_t)(box * B_BYTES + first * BOX + byte);
            wgmma<E4M3, A>::tiles(
                d, box_descriptor(shared_address(left) + x),
                box_descriptor(shared_address(right) + (uint32_t)(box * A_BYTES + byte)),
                step > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        for (int i = 0; i < A / 2; i++) {
            const int col = first + 16 * warp + lane / 4 + i / 2 % 2 * 8;
            out[(i / 4 * 8 + lane % 4 * 2 + i % 2) * B + col] = d[i];
        }
    }
}

/* Warp w has rows 16 w and on. */
template <bool E4M3>
__global__ void __launch_bounds__(WARPGROUP)
    by_mma_sync(float *out, const uint8_t *a, const uint8_t *b) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int first = 0; first < B; first += 8) {
        float d[4] = {};
        for (int step = 0; step < ROW / 32; step++) {
            const uint8_t *y = b + (first + lane / 4) * ROW + 32 * step + lane % 4 * 4;
            const uint32_t b0 = *reinterpret_cast<const uint32_t *>(y);
            const uint32_t b1 = *reinterpret_cast<const uint32_t *>(y + 16);
            uint32_t x[4];
            load_a(x, a, 16 * warp, 32 * step);
            if (E4M3) {
                asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, "
                    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(b0), "r"(b1));
            } else {
                asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                    "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(b0), "r"(b1));
            }
        }
        for (int i = 0; i < 4; i++) {
            out[(16 * warp + lane / 4 + i / 2 * 8) * B + first + lane % 4 * 2 + i % 2] = d[i];
        }
    }
}

/* What a probe has: rows on the GPU, and outputs there and here. */
struct probe {
    uint8_t *a, *b;
    float *out, *base, *got;
    wgmma_probe_counts *counts;
};

/* Runs a kernel; how many outputs differ from those of N = 8, whose b has not been turned. */
template <typename Kernel, typename... More>
int32_t differing(const probe &p, Kernel *kernel, int n, int turn, More... more) {
    const int cols = B / n * n;
    int32_t differ = 0;
    cudaMemset(p.out, 0xff, A * B * sizeof(float));
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    kernel<<<1, WARPGROUP, SHARED>>>(p.out, p.a, p.b, more...);
    cudaMemcpy(p.got, p.out, A * B * sizeof(float), cudaMemcpyDeviceToHost);
    for (int i = 0; i < A * B; i++) {
        const int col = i % B;
        if (col >= cols) continue;
        const float *want = p.base + i / B * B + (col + turn) % B;
        differ += memcmp(p.got + i, want, sizeof *want) != 0;
        p.counts->compared++;
    }
    return differ;
}

template <bool E4M3, int N>
void probe_width(const probe &p) {
    for (int turn = 0; turn < B; turn += turn < 9 ? 1 : 13) {
        p.counts->widths += differing(p, by_wgmma<E4M3, N, false>, N, turn, turn);
    }
    p.counts->registers += differing(p, by_wgmma<E4M3, N, true>, N, 0, 0);
}

template <bool E4M3>
void probe_all(const probe &p) {
    cudaFuncSetAttribute(by_wgmma<E4M3, 8, false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         SHARED);
    by_wgmma<E4M3, 8, false><<<1, WARPGROUP, SHARED>>>(p.out, p.a, p.b, 0);
    cudaMemcpy(p.base, p.out, A * B * sizeof(float), cudaMemcpyDeviceToHost);
    probe_width<E4M3, 8>(p);
    probe_width<E4M3, 16>(p);
    probe_width<E4M3, 32>(p);
    probe_width<E4M3, 64>(p);
    probe_width<E4M3, 128>(p);
    probe_width<E4M3, 192>(p);
    probe_width<E4M3, 256>(p);
    p.counts->exchanged += differing(p, exchanged<E4M3>, B, 0);
    p.counts->mma_sync += differing(p, by_mma_sync<E4M3>, B, 0);
}

} // namespace

const char *wgmma_probe(bool e4m3, const uint8_t *a, const uint8_t *b, float *base,
                        wgmma_probe_counts *counts) {
    probe p = {};
    p.base = base;
    p.got = static_cast<float *>(malloc(A * B * sizeof(float)));
    p.counts = counts;
    cudaMalloc(&p.a, A * ROW);
    cudaMalloc(&p.b, B * ROW);
    cudaMalloc(&p.out, A * B * sizeof(float));
    cudaMemcpy(p.a, a, A * ROW, cudaMemcpyHostToDevice);
    cudaMemcpy(p.b, b, B * ROW, cudaMemcpyHostToDevice);
    if (p.got) (e4m3 ? probe_all<true> : probe_all<false>)(p);
    const cudaError_t status = cudaGetLastError();
    cudaFree(p.a);
    cudaFree(p.b);
    cudaFree(p.out);
    free(p.got);
    return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
