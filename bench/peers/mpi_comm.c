/* mpi_comm.c - Open MPI's collectives at the sizes of `hadal bench comm`, in its columns:
 *
 *     mpicc -O2 bench/peers/mpi_comm.c -o build/mpi_comm && mpirun -n 2 build/mpi_comm [ROUNDS]
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { SIZES = 7, MAX_ROUNDS = 10000, SMALL = 16384, MOST = 16 << 20 };

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void call(int op, float *x, float *y, int n, int rank, int ranks) {
    if (op == 0) MPI_Allreduce(x, y, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (op == 1)
        MPI_Allgather(x + n / ranks * rank, n / ranks, MPI_FLOAT, y, n / ranks, MPI_FLOAT,
                      MPI_COMM_WORLD);
    if (op == 2) MPI_Bcast(x, n, MPI_FLOAT, 0, MPI_COMM_WORLD);
    if (op == 3) MPI_Reduce_scatter_block(x, y, n / ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void measure(int op, int bytes, int rounds, float *x, float *y) {
    static const char *const names[] = {"all_reduce", "all_gather", "broadcast",
                                        "reduce_scatter"};
    static double us[MAX_ROUNDS];
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (bytes > SMALL) rounds = (int)((long long)rounds * SMALL / bytes);
    if (rounds < 5) rounds = 5;
    const int n = bytes / (int)sizeof *x;
    for (int i = 0; i < rounds / 10 + 1; i++) call(op, x, y, n, rank, ranks);
    for (int i = 0; i < rounds; i++) {
        const double start = MPI_Wtime();
        call(op, x, y, n, rank, ranks);
        us[i] = (MPI_Wtime() - start) * 1e6;
    }
    qsort(us, (size_t)rounds, sizeof *us, compare);
    const double median = us[rounds / 2];
    if (rank == 0)
        printf("%-14s %-21s %8d %10.2f %9.0f\n", "Open MPI", names[op], bytes, median,
               bytes / median);
}

int main(int argc, char **argv) {
    static const int sizes[SIZES] = {64, 4096, 8192, SMALL, 32768, 1 << 20, MOST};
    int rounds = argc > 1 ? atoi(argv[1]) : 2000;
    MPI_Init(&argc, &argv);
    float *x = calloc(1, MOST), *y = calloc(1, MOST);
    if (!x || !y) MPI_Abort(MPI_COMM_WORLD, 1);
    if (rounds < 5 || rounds > MAX_ROUNDS) rounds = 2000;
    for (int op = 0; op < 4; op++)
        for (int i = 0; i < SIZES; i++) measure(op, sizes[i], rounds, x, y);
    free(x);
    free(y);
    MPI_Finalize();
    return 0;
}
