/* groups.h - the unit test groups, one per line: X(group) means int test_group(void) in
 * test_group.c, which runs a cmocka group and returns its number of failures. */
#ifndef HD_TESTS_GROUPS_H
#define HD_TESTS_GROUPS_H

/* clang-format off */
#define HD_TEST_GROUPS(X) \
    X(base) \
    X(dtype) \
    X(log) \
    X(cores) \
    X(device) \
    X(options) \
    X(engine_options) \
    X(op_shapes) \
    X(screen) \
    X(tokenizer) \
    X(chat) \
    X(reply) \
    X(ops) \
    X(backward) \
    X(model_backward) \
    X(op_profiler) \
    X(sample) \
    X(config) \
    X(schema) \
    X(placement) \
    X(safetensors) \
    X(grammar) \
    X(weights) \
    X(dummy) \
    X(shard) \
    X(expert_slots) \
    X(eplb) \
    X(cache) \
    X(comm) \
    X(model) \
    X(lanes) \
    X(ranks) \
    X(sched) \
    X(draft_depth) \
    X(engine) \
    X(engine_ranks) \
    X(answers) \
    X(constraint) \
    X(calls) \
    X(token_history) \
    X(simulation) \
    X(drafts) \
    X(model_runner) \
    X(decode_graph) \
    X(stream) \
    X(server) \
    X(tokenizer_pattern)
/* clang-format on */

#define X(group) int test_##group(void);
HD_TEST_GROUPS(X)
#undef X

#endif
