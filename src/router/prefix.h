/* prefix.h - the prompt of a request as hashes of its beginnings, so that the router sends prompts
 * that begin alike to the server that has computed the beginning before. */
#ifndef HD_ROUTER_PREFIX_H
#define HD_ROUTER_PREFIX_H

#include <stddef.h>
#include <stdint.h>

/* Blocks of 256 bytes at first; after every 16 of them twice as large: 257 KiB in all. What lies
 * behind is part of no hash. */
enum { ROUTER_PREFIX_BLOCKS = 96, ROUTER_PREFIX_BYTES = 256, ROUTER_PREFIX_STEP = 16 };

typedef struct router_prefix {
    uint64_t
        hashes[ROUTER_PREFIX_BLOCKS]; /* [n]: of all bytes up to the end of each full block */
    int32_t n;
    int64_t bytes; /* of the whole prompt */
} router_prefix;

/* Reads the members of a JSON body that make the prompt, in the order in which templates use them.
 * salt: keeps the prompts of keys apart. A body without a prompt, or that is no JSON, has no
 * blocks. key: all routers in front of a server have the same one. */
void router_prefix_of(router_prefix *out, const char *body, size_t n, uint64_t salt,
                      const uint64_t key[2]);

/* Returns how many bytes the first n blocks have. */
int64_t router_prefix_end(int32_t n);

#endif
