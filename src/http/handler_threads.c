/* handler_threads.c - worker threads for slow handlers, in order of arrival. Parsing
 * megabytes of JSON or compiling a schema on an HTTP thread would delay all other
 * connections of that thread. There are several workers, so that one slow call does not
 * delay the next. */
#include <string.h>

#include "http/http_internal.h"

static void run(http_call *c) {
    pthread_mutex_lock(&c->lock);
    const bool gone = c->gone;
    pthread_mutex_unlock(&c->lock);
    if (gone) {
        /* not read by anyone, but it ends the call */
        http_reply(c, 503, "text/plain", "", 0);
    } else {
        c->route->handler(c, c->server);
    }
}

static void *handler_threads(void *user) {
    http_handler_threads *w = user;
    pthread_mutex_lock(&w->lock);
    while (w->first || !w->over) {
        http_call *c = w->first;
        if (!c) {
            pthread_cond_wait(&w->more, &w->lock);
            continue;
        }
        w->first = c->next_handler_threads;
        pthread_mutex_unlock(&w->lock);
        run(c);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

void http_handler_threads_init(http_handler_threads *w) {
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->more, NULL);
}

void http_handler_threads_deinit(http_handler_threads *w) {
    pthread_cond_destroy(&w->more);
    pthread_mutex_destroy(&w->lock);
}

hd_status http_handler_threads_start(http_handler_threads *w, hd_err *err) {
    for (; w->n_threads < HTTP_WORKERS; w->n_threads++) {
        const int code = pthread_create(&w->threads[w->n_threads], NULL, handler_threads, w);
        if (code) return HD_FAIL(err, HD_EIO, "cannot start a thread: %s", strerror(code));
    }
    return HD_OK;
}

void http_handler_threads_add(http_handler_threads *w, http_call *c) {
    c->handed_over = true;
    pthread_mutex_lock(&w->lock);
    http_call **link = w->first ? &w->last->next_handler_threads : &w->first;
    *link = c;
    w->last = c;
    pthread_cond_signal(&w->more);
    pthread_mutex_unlock(&w->lock);
}

bool http_hand_over(http_call *c) {
    if (c->handed_over) return false;
    http_handler_threads_add(&c->http->handler_threads, c);
    return true;
}

void http_handler_threads_stop(http_handler_threads *w) {
    pthread_mutex_lock(&w->lock);
    w->over = true;
    pthread_cond_broadcast(&w->more);
    pthread_mutex_unlock(&w->lock);
    for (; w->n_threads > 0; w->n_threads--) pthread_join(w->threads[w->n_threads - 1], NULL);
}
