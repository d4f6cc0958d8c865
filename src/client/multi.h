/* multi.h - many transfers of libcurl on one thread: its sockets in an epoll set, its timers and the
 * caller's own in one timerfd. So the cost of an event does not grow with the transfers, and times
 * are not rounded to milliseconds. One thread owns it; any thread may wake it. */
#ifndef HD_CLIENT_MULTI_H
#define HD_CLIENT_MULTI_H

#include <curl/curl.h>
#include <stdint.h>

#include "base/status.h"

typedef struct client_multi {
    CURLM *multi; /* transfers are added to it and taken from it by its owner */
    int epoll, timer, wake;
    int64_t curl_due_ns; /* when libcurl wants to be called; -1: not by time */
    int64_t timer_ns;    /* when the timerfd will fire; -1: it will not */
} client_multi;

/* The address of m must not change. Close also after a failure. */
hd_status client_multi_open(client_multi *m, hd_err *err);
void client_multi_close(client_multi *m);

/* Waits for bytes, for a wake, or until due_ns (-1: none), 200 ms at most; lets libcurl work. */
hd_status client_multi_step(client_multi *m, int64_t due_ns, hd_err *err);

/* Ends the present step, or the next one. Any thread may call. */
void client_multi_wake(client_multi *m);

#endif
