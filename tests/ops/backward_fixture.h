/* backward_fixture.h - compares gradients with those of a forward program in float64.
 *
 * A test writes the forward operator once more, in float64, as a loss of its inputs. The
 * derivative of the loss along random directions, from central differences, must be that of
 * the operator's gradients. */
#ifndef HD_TESTS_BACKWARD_FIXTURE_H
#define HD_TESTS_BACKWARD_FIXTURE_H

#include "ops/backward.h"
#include "ops/ops_fixture.h"

enum { MAX_INPUTS = 6 };

typedef struct gradient_input {
    const char *name;
    const float *value;
    const float *grad; /* as the operator computed it */
    int64_t n;
} gradient_input;

typedef struct gradient_case {
    const char *op;
    gradient_input in[MAX_INPUTS]; /* ended by one without a name */
    const void *args;
    double (*loss)(const void *args, double *const *in);
} gradient_case;

/* Fails unless every input's gradient is within 1e-6 of the differences (1e-5 of tables that sum
 * in float32), relative to the length of the gradient, and a tenth of that for sums that
 * cancel. */
void check_gradient(const gradient_case *c);

/* The table under test, filled, and the stream that it runs on. Every test runs once for each
 * table that this machine has. */
const hd_backward_ops *backward_ops(void);
hd_stream *backward_stream(void);

/* Returns n zeros, for gradients that are added to. */
float *take_zeros(int64_t n);

/* tests of the files test_backward*.c */
#define BACKWARD_TESTS_LIST(X)          \
    X(weight_grad_sums_products)        \
    X(grouped_gradients)                \
    X(rms_norm_gradients)               \
    X(rows_go_back)                     \
    X(swiglu_gradients)                 \
    X(router_gradients)                 \
    X(combine_gradients)                \
    X(loss_gradients)                   \
    X(attention_gradients)              \
    X(naive_attention_gradients)        \
    X(indexer_gradients)                \
    X(layer_norm_gradients)             \
    X(compress_gradients)               \
    X(hc_post_gradients)                \
    X(hc_pre_gradients)                 \
    X(hc_head_gradients)                \
    X(pieces_give_the_same_bits)        \
    X(squares_have_one_order)           \
    X(adamw_has_one_order)              \
    X(muon_has_one_order)               \
    X(rounding_is_that_of_updates)      \
    X(rounding_marks_what_does_not_fit) \
    X(sequences_are_summed_alone)       \
    X(experts_are_summed_by_sequence)   \
    X(vectors_are_summed_by_sequence)   \
    X(entries_are_summed_by_sequence)   \
    X(transposed_products)
#define X(test) void test(void **state);
BACKWARD_TESTS_LIST(X)
#undef X

#endif
