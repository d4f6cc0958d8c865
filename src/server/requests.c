/* requests.c - GET /engine/requests: state of the requests that a client sent under one id.
 * A stream sends nothing before its first token; meanwhile this endpoint tells how many
 * requests wait before it. Only calls with the same API key are found. */
#include <stdlib.h>

#include "server/server_internal.h"

enum { MOST_IDS = 64, MOST_REQUESTS = 65536 };

static bool contains(const uint64_t *ids, size_t n, uint64_t id) {
    for (size_t i = 0; i < n; i++) {
        if (ids[i] == id) return true;
    }
    return false;
}

/* NULL: no memory. */
static json_t *describe(hd_engine *e, const uint64_t *ids, size_t n_ids) {
    json_t *list = json_array();
    hd_request_status *r = n_ids ? calloc(MOST_REQUESTS, sizeof *r) : NULL;
    if (!list || (n_ids && !r)) {
        json_decref(list);
        free(r);
        return NULL;
    }
    const size_t n = r ? hd_engine_read_requests(e, r, MOST_REQUESTS) : 0;
    json_int_t ahead = 0; /* the list contains waiting requests in queue order */
    bool whole = true;
    for (size_t i = 0; i < n && whole; i++) {
        const bool waits = r[i].phase == HD_PHASE_WAITING;
        if (contains(ids, n_ids, r[i].id)) {
            json_t *one = live_request(&r[i]);
            whole = json_object_set_new(one, "ahead", json_integer(waits ? ahead : 0)) == 0 &&
                    json_array_append(list, one) == 0;
            json_decref(one);
        }
        ahead += waits;
    }
    free(r);
    if (whole) return list;
    json_decref(list);
    return NULL;
}

void server_on_requests(http_call *c, void *user) {
    server *s = user;
    const char *id = http_query(c, "request_id");
    if (!id || !*id) {
        http_error(c, 400, "invalid_request_error", "missing_field", "request_id",
                   "request_id is missing: the X-Request-Id of the requests in question");
        return;
    }
    uint64_t ids[MOST_IDS];
    const size_t n = records_find(s->records, id, http_salt(c), ids, MOST_IDS);
    json_t *list = describe(s->engine, ids, n);
    server_reply_json(c, 200, list ? json_pack("{s:o}", "requests", list) : NULL);
}
