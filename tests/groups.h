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
    X(prefetch) \
    X(device) \
    X(options) \
    X(engine_options) \
    X(op_shapes) \
    X(rl_tasks) \
    X(screen) \
    X(tokenizer) \
    X(chat) \
    X(reply) \
    X(ops) \
    X(backward) \
    X(model_backward) \
    X(gradients) \
    X(data_parallel) \
    X(optimizer) \
    X(policy) \
    X(reward) \
    X(samples) \
    X(init) \
    X(examples) \
    X(op_profiler) \
    X(sample) \
    X(config) \
    X(schema) \
    X(engram) \
    X(placement) \
    X(safetensors) \
    X(grammar) \
    X(weights) \
    X(dummy) \
    X(shard) \
    X(quantize) \
    X(update) \
    X(remote) \
    X(expert_slots) \
    X(device_shards) \
    X(expert_cache) \
    X(read_ahead) \
    X(pinned_experts) \
    X(fetch_order) \
    X(residency) \
    X(dwdp_sim) \
    X(expert_files) \
    X(expert_fetch) \
    X(staged_experts) \
    X(fetched_experts) \
    X(eplb) \
    X(record) \
    X(rebalance) \
    X(simulate) \
    X(kv) \
    X(cache) \
    X(cache_order) \
    X(cache_faults) \
    X(lease) \
    X(lease_world) \
    X(handover) \
    X(disk) \
    X(disk_tier) \
    X(saved) \
    X(comm) \
    X(address) \
    X(epochs) \
    X(comm_silence) \
    X(comm_ucx) \
    X(comm_shm) \
    X(preflight) \
    X(comm_ipc) \
    X(pieces) \
    X(model) \
    X(lanes) \
    X(ranks) \
    X(parts) \
    X(sched) \
    X(draft_depth) \
    X(load_costs) \
    X(pace) \
    X(engine) \
    X(engine_ranks) \
    X(engine_layouts) \
    X(capacity) \
    X(rank_memory) \
    X(engine_updates) \
    X(wire) \
    X(answers) \
    X(constraint) \
    X(tiers) \
    X(pages) \
    X(pd) \
    X(pd_faults) \
    X(calls) \
    X(token_history) \
    X(simulation) \
    X(drafts) \
    X(model_runner) \
    X(draft_dspark) \
    X(tails) \
    X(rebuild) \
    X(prompt_decoder) \
    X(decode_graph) \
    X(agreement) \
    X(stream) \
    X(server) \
    X(prefix_ring) \
    X(router) \
    X(tokenizer_pattern)
/* clang-format on */

#define X(group) int test_##group(void);
HD_TEST_GROUPS(X)
#undef X

#endif
