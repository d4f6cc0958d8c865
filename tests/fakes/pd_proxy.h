/* pd_proxy.h - a thread between two servers of src/pd that knows their secret: it passes frames on,
 * and does something wrong with one of them. */
#ifndef HD_TESTS_FAKES_PD_PROXY_H
#define HD_TESTS_FAKES_PD_PROXY_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "pd/link.h"

typedef enum proxy_fault {
    PROXY_DROP,        /* it is lost */
    PROXY_TWICE,       /* it comes twice */
    PROXY_SWAP,        /* it comes after the next one */
    PROXY_FIRST_BYTE,  /* a byte is another, and the MAC is right: the kind of message */
    PROXY_MIDDLE_BYTE, /* in the middle */
    PROXY_LAST_BYTE,
    PROXY_GARBLE, /* a byte is another, and the MAC is wrong */
    PROXY_CUT,    /* both connections are closed before it */
    PROXY_FREEZE, /* from it on nothing passes, until the next order */
    PROXY_MUTE,   /* from it on nothing of its sender passes, until the next order */
    PROXY_FLOOD,  /* it comes PROXY_MANY times, a large one a few times */
    PROXY_N_FAULTS
} proxy_fault;

enum { PROXY_MANY = 100000, PROXY_MANY_LARGE = 20 };

typedef struct proxy {
    char at[32]; /* "127.0.0.1:PORT" where it listens */
    const char *target;
    int listener, wake[2];
    pthread_t thread;
    hd_channel ends[2]; /* to the server that fetches, to the other one */
    uint8_t *held;      /* a payload that is passed on after the next one */
    hd_frame held_head;
    int held_from;

    pthread_mutex_t lock; /* guards the following */
    bool closing, frozen, thaws;
    bool mute[2];  /* the end's frames are lost */
    int from;      /* end whose frame it is; -1: no order */
    int32_t index; /* of the messages that this end sends after the order */
    proxy_fault fault;
    int32_t n_applied;
} proxy;

void proxy_open(proxy *p, const char *target);

/* Orders a fault of the index-th message that end `from` sends from now on; pings do not count.
 * from -1: none. What was frozen or mute is cut. */
void proxy_order(proxy *p, int from, int32_t index, proxy_fault fault);

int32_t proxy_applied(proxy *p); /* how many orders were carried out */
void proxy_close(proxy *p);

#endif
