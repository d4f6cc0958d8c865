/* metrics.c - what /metrics says of leases, transfers and peers. */
#include "base/checked.h"
#include "pd/pd.h"

static const char *const sides[] = {"send", "receive"};

static void put_head(FILE *out, const char *name, const char *type, const char *help) {
    fprintf(out, "# HELP hadal_pd_%s %s\n# TYPE hadal_pd_%s %s\n", name, help, name, type);
}

static void put(FILE *out, const char *label, const char *name, const char *type,
                const char *help, double value) {
    put_head(out, name, type, help);
    fprintf(out, "hadal_pd_%s{%s} %.17g\n", name, label, value);
}

static void put_leases(FILE *out, const char *label, const pd_stats *s) {
    put_head(out, "leases", "gauge", "open leases, by side and state");
    for (int side = 0; side < 2; side++) {
        for (int i = HD_LEASE_RESERVED; i <= HD_LEASE_ABORTING; i++) {
            fprintf(out, "hadal_pd_leases{%s,side=\"%s\",state=\"%s\"} %d\n", label,
                    sides[side], hd_lease_state_name((hd_lease_state)i), s->open[side][i]);
        }
    }
    put_head(out, "leases_total", "counter", "leases opened, by side");
    for (int side = 0; side < 2; side++) {
        fprintf(out, "hadal_pd_leases_total{%s,side=\"%s\"} %llu\n", label, sides[side],
                (unsigned long long)s->leases.opened[side]);
    }
    put_head(out, "leases_owned_total", "counter", "leases whose pages all arrived, by side");
    for (int side = 0; side < 2; side++) {
        fprintf(out, "hadal_pd_leases_owned_total{%s,side=\"%s\"} %llu\n", label, sides[side],
                (unsigned long long)s->leases.owned[side]);
    }
}

static void put_reasons(FILE *out, const char *label, const char *name, const char *help,
                        const uint64_t counts[HD_N_LEASE_REASONS]) {
    put_head(out, name, "counter", help);
    for (int i = HD_LEASE_DONE + 1; i < HD_N_LEASE_REASONS; i++) {
        fprintf(out, "hadal_pd_%s{%s,reason=\"%s\"} %llu\n", name, label,
                hd_lease_reason_name((hd_lease_reason)i), (unsigned long long)counts[i]);
    }
}

static void put_pages(FILE *out, const char *label, const pd_stats *s) {
    put(out, label, "requests_total", "counter", "requests that named a prefill server",
        (double)s->asked);
    put_head(out, "skipped_total", "counter",
             "requests that named a prefill server and were not sent there, by reason");
    for (int i = 0; i < PD_N_SKIPS; i++) {
        fprintf(out, "hadal_pd_skipped_total{%s,reason=\"%s\"} %lld\n", label,
                pd_skip_name((pd_skip)i), (long long)s->skipped[i]);
    }
    put_head(out, "pages_total", "counter", "pages sent, and put into the cache");
    fprintf(out, "hadal_pd_pages_total{%s,side=\"send\"} %lld\n", label,
            (long long)s->pages_out);
    fprintf(out, "hadal_pd_pages_total{%s,side=\"receive\"} %lld\n", label,
            (long long)s->pages_in);
    put(out, label, "received_tokens_total", "counter",
        "prompt tokens that other servers computed", (double)s->tokens_in);
    put(out, label, "wait_seconds_total", "counter",
        "time that requests waited for the end of their leases", (double)s->wait_ns * 1e-9);
}

/* A series of every server. */
static void put_peers(FILE *out, const char *label, pd *p, const char *name, const char *more,
                      uint64_t (*value)(const pd_peer_status *q)) {
    pd_peer_status q;
    for (int32_t i = 0; pd_read_peer(p, i, &q); i++) {
        if (!q.name[0]) continue;
        fprintf(out, "hadal_pd_%s{%s,peer=\"%s\",side=\"%s\"%s} %llu\n", name, label, q.name,
                sides[!q.fetches], more, (unsigned long long)value(&q));
    }
}

static uint64_t up_of(const pd_peer_status *q) {
    return q->up;
}

static uint64_t bytes_in_of(const pd_peer_status *q) {
    return q->bytes_in;
}

static uint64_t bytes_out_of(const pd_peer_status *q) {
    return q->bytes_out;
}

static uint64_t wrong_of(const pd_peer_status *q) {
    return q->suspicion;
}

static void put_links(FILE *out, const char *label, pd *p) {
    put_head(out, "peer_up", "gauge", "whether the server is connected");
    put_peers(out, label, p, "peer_up", "", up_of);
    put_head(out, "peer_bytes_total", "counter", "bytes on the connections to a server");
    put_peers(out, label, p, "peer_bytes_total", ",direction=\"in\"", bytes_in_of);
    put_peers(out, label, p, "peer_bytes_total", ",direction=\"out\"", bytes_out_of);
    put_head(out, "peer_wrong_total", "counter",
             "pages and counts of a server that were wrong");
    put_peers(out, label, p, "peer_wrong_total", "", wrong_of);
}

void pd_put_metrics(FILE *out, const char *label, pd *p) {
    pd_stats s;
    pd_read_stats(p, &s);
    put_leases(out, label, &s);
    put_reasons(out, label, "leases_aborted_total", "leases that ended early, by reason",
                s.leases.aborted);
    put_reasons(out, label, "messages_discarded_total",
                "messages and late events that changed nothing, by reason", s.leases.discarded);
    put_pages(out, label, &s);
    put_links(out, label, p);
}
