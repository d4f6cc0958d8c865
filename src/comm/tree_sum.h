/* tree_sum.h - the order in which the members of a group are added (comm.h): a binary tree. */
#ifndef HD_COMM_TREE_SUM_H
#define HD_COMM_TREE_SUM_H

#include <stdint.h>

enum { HD_TREE_SUM_BLOCK = 256 };

/* out[n] = the sum of x[0 .. m - 1], elements at .. at + n - 1; n at most HD_TREE_SUM_BLOCK. */
void hd_tree_sum(float *out, const float *const *x, int32_t m, int64_t at, int32_t n);

#endif
