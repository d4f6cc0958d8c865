/* detail.c - what servers report beside their load, for people: which requests wait and why, leases by
 * state, bytes and rates of the connections between servers. Nothing of it chooses a server. */
#include <stdio.h>
#include <string.h>

#include "router/router_internal.h"

enum { MOST_COUNTS = 16, MOST_LINKS = 128, NAME_BYTES = 300 };

/* ---- reading ---- */

/* Printable, and without what labels of metrics would have to escape. */
static bool is_name(const char *name) {
    const size_t n = name ? strlen(name) : 0;
    for (size_t i = 0; i < n; i++) {
        if (name[i] <= ' ' || name[i] > '~' || name[i] == '"' || name[i] == '\\') return false;
    }
    return n > 0 && n < NAME_BYTES;
}

static bool is_count(const json_t *value) {
    return json_is_integer(value) && json_integer_value(value) >= 0;
}

static bool are_counts(json_t *counts) {
    const char *name;
    json_t *value;
    json_object_foreach(counts, name, value) {
        if (!is_name(name) || !is_count(value)) return false;
    }
    return json_is_object(counts) && json_object_size(counts) <= MOST_COUNTS;
}

static const char *text_of(const json_t *object, const char *name) {
    return json_string_value(json_object_get(object, name));
}

static bool are_links(const json_t *links) {
    size_t i;
    json_t *link;
    json_array_foreach(links, i, link) {
        if (!is_name(text_of(link, "peer")) || !is_name(text_of(link, "side")) ||
            !is_count(json_object_get(link, "in")) || !is_count(json_object_get(link, "out"))) {
            return false;
        }
    }
    return json_array_size(links) <= MOST_LINKS;
}

json_t *router_detail_of(const json_t *load) {
    json_t *from = json_object_get(load, "disagg");
    json_t *waiting = json_object_get(from, "waiting"),
           *leases = json_object_get(from, "leases");
    json_t *links = json_object_get(from, "links");
    json_t *share = json_object_get(load, "cache_hit_rate");
    const char *side;
    json_t *counts;
    if (!are_counts(waiting) || !json_is_number(share) || !are_links(links)) return NULL;
    json_object_foreach(leases, side, counts) {
        if (!is_name(side) || !are_counts(counts)) return NULL;
    }
    if (json_object_size(leases) > MOST_COUNTS) return NULL;
    return json_pack("{s:O, s:O, s:O*, s:O*}", "cached_share", share, "waiting_for", waiting,
                     "leases", leases, "links", links);
}

/* ---- rates ---- */

static const json_t *link_before(const json_t *links, const json_t *link) {
    size_t i;
    json_t *old;
    json_array_foreach(links, i, old) {
        if (strcmp(text_of(old, "peer"), text_of(link, "peer")) == 0 &&
            strcmp(text_of(old, "side"), text_of(link, "side")) == 0) {
            return old;
        }
    }
    return NULL;
}

/* Over the last second or so; a connection's bytes begin anew with its server. */
static void add_rate(json_t *link, const json_t *old, const char *bytes, const char *rate,
                     double seconds) {
    const double before = (double)json_integer_value(json_object_get(old, bytes));
    const double now = (double)json_integer_value(json_object_get(link, bytes));
    const double lately = json_number_value(json_object_get(old, rate));
    const double weight = seconds < 1 ? seconds : 1;
    const double fresh = old && seconds > 0 && now >= before ? (now - before) / seconds : 0;
    json_object_set_new(link, rate, json_real(lately + weight * (fresh - lately)));
}

void router_detail_take(router_reports *a, json_t *detail, int64_t now_ns) {
    const json_t *before = json_object_get(a->detail, "links");
    const double seconds = (double)(now_ns - a->detail_ns) * 1e-9;
    size_t i;
    json_t *link;
    json_array_foreach(json_object_get(detail, "links"), i, link) {
        const json_t *old = link_before(before, link);
        add_rate(link, old, "in", "in_per_s", seconds);
        add_rate(link, old, "out", "out_per_s", seconds);
    }
    json_decref(a->detail);
    a->detail = detail;
    a->detail_ns = now_ns;
}

/* ---- metrics ---- */

typedef struct row {
    hd_bytes *out;
    const router_peer *server;
} row;

static void put_head(hd_bytes *out, const char *name, const char *kind, const char *help) {
    char line[300];
    const int n =
        snprintf(line, sizeof line, "# HELP hadal_router_%s %s\n# TYPE hadal_router_%s %s\n",
                 name, help, name, kind);
    hd_bytes_append(out, line, (size_t)n, NULL);
}

static void put_row(row r, const char *name, const char *labels, double value) {
    char line[1600];
    const int n =
        snprintf(line, sizeof line, "hadal_router_%s{server=\"%s\",role=\"%s\"%s} %.17g\n",
                 name, r.server->name, router_role_name(r.server->role), labels, value);
    hd_bytes_append(r.out, line, (size_t)n, NULL);
}

static void put_share(row r, json_t *detail) {
    put_row(r, "server_cached_share", "",
            json_number_value(json_object_get(detail, "cached_share")));
}

static void put_waiting(row r, json_t *detail) {
    char labels[NAME_BYTES + 32];
    const char *reason;
    json_t *n;
    json_object_foreach(json_object_get(detail, "waiting_for"), reason, n) {
        snprintf(labels, sizeof labels, ",reason=\"%s\"", reason);
        put_row(r, "server_waiting", labels, json_number_value(n));
    }
}

static void put_leases(row r, json_t *detail) {
    char labels[2 * NAME_BYTES + 32];
    const char *side, *state;
    json_t *states, *n;
    json_object_foreach(json_object_get(detail, "leases"), side, states) {
        json_object_foreach(states, state, n) {
            snprintf(labels, sizeof labels, ",side=\"%s\",state=\"%s\"", side, state);
            put_row(r, "server_leases", labels, json_number_value(n));
        }
    }
}

static void put_links(row r, json_t *detail) {
    static const char *const directions[] = {"in", "out"};
    char labels[2 * NAME_BYTES + 64];
    size_t i;
    json_t *link;
    json_array_foreach(json_object_get(detail, "links"), i, link) {
        for (int k = 0; k < 2; k++) {
            snprintf(labels, sizeof labels, ",peer=\"%s\",side=\"%s\",direction=\"%s\"",
                     text_of(link, "peer"), text_of(link, "side"), directions[k]);
            put_row(r, "link_bytes_total", labels,
                    json_number_value(json_object_get(link, directions[k])));
        }
    }
}

void router_detail_put(hd_bytes *out, const router *r) {
    static const struct {
        const char *name, *kind, *help;
        void (*put)(row r, json_t *detail);
    } figures[] = {
        {"server_cached_share", "gauge",   "Cached share of all prompt tokens so far",  put_share  },
        {"server_waiting",      "gauge",   "Choices that wait, by reason",              put_waiting},
        {"server_leases",       "gauge",   "Open leases, by side and state",            put_leases },
        {"link_bytes_total",    "counter", "Bytes on a server's connections to others", put_links  },
    };
    for (size_t i = 0; i < HD_LEN(figures); i++) {
        put_head(out, figures[i].name, figures[i].kind, figures[i].help);
        for (int32_t k = 0; k < r->picture.n; k++) {
            json_t *detail = r->reports[k].detail;
            const router_peer *server = &r->picture.peers[k];
            if (detail && server->name[0]) figures[i].put((row){out, server}, detail);
        }
    }
}
