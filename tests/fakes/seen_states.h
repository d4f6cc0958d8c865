/* seen_states.h - the states in which an exhaustive test has been: a table of their hashes, none of which is 0. */
#ifndef HD_TESTS_FAKES_SEEN_STATES_H
#define HD_TESTS_FAKES_SEEN_STATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* seen [size], 0 where it is free. Returns whether the state is new. The caller keeps the table half empty. */
static inline bool seen_states_add(uint64_t *seen, size_t size, uint64_t hash) {
    size_t at = hash % size;
    while (seen[at] && seen[at] != hash) at = (at + 1) % size;
    if (seen[at] == hash) return false;
    seen[at] = hash;
    return true;
}

#endif
