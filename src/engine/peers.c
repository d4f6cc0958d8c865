/* peers.c - see peers.h. */
#include "engine/peers.h"

#include <stdlib.h>
#include <string.h>

#include "comm/address.h"
#include "comm/silence.h"
#include "engine/experts.h"

/* What a rank tells the others of itself. */
typedef struct peer_card {
    uint64_t host; /* as in hd_place; 0: unknown */
    char address[HD_PIECE_ADDRESS];
} peer_card;

struct engine_peers {
    hd_piece_server *server;
    char *secret; /* NULL: none */
    peer_card card;
    hd_piece_reader *readers[HD_UCX_MAX_RANKS];
    int32_t n_readers;
};

/* ---- opening ---- */

hd_status engine_peers_open(engine_rank *rank, const hd_engine_options *o, hd_err *err) {
    const hd_world_options *w = &o->world;
    if (!engine_fetches(rank->engine) || engine_process_is_on_one_host(o)) return HD_OK;
    engine_peers *p = calloc(1, sizeof *p);
    rank->peers = p;
    if (p && w->key) p->secret = strdup(w->key);
    if (!p || (w->key && !p->secret)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for ranks on other hosts");
    }
    HD_TRY(hd_piece_server_open(&p->server, w->rendezvous, w->key, err));
    p->card.host = hd_place_here().host;
    memcpy(p->card.address, hd_piece_server_address(p->server), sizeof p->card.address);
    return HD_OK;
}

hd_status engine_peers_serve(engine_rank *rank, hd_err *err) {
    const hd_engine *e = rank->engine;
    if (!rank->peers) return HD_OK;
    const hd_piece_source source = {.find = hd_expert_fetch_find,
                                    .ctx = e->whole,
                                    .n_layers = e->spec->n_layers + e->spec->n_mtp,
                                    .n_experts = e->spec->route.n_experts};
    return hd_piece_server_start(rank->peers->server, &source, err);
}

void engine_peers_close(engine_rank *rank) {
    if (!rank->peers) return;
    engine_peers_leave(rank);
    hd_piece_server_close(rank->peers->server);
    free(rank->peers->secret);
    free(rank->peers);
}

const void *engine_peers_card(const engine_rank *rank, uint32_t *n) {
    *n = rank->peers ? sizeof rank->peers->card : 0;
    return rank->peers ? &rank->peers->card : NULL;
}

/* ---- the ranks of a place ---- */

/* Returns whether the rank of a place is on another host, and its card. */
static bool is_elsewhere(const engine_rank *rank, int32_t place, peer_card *out) {
    const engine_peers *p = rank->peers;
    const void *card = p ? hd_comm_ucx_card(rank->engine->ucx, place) : NULL;
    if (!card) return false;
    memcpy(out, card, sizeof *out);
    out->address[sizeof out->address - 1] = 0;
    return (!out->host || out->host != p->card.host) && hd_address_is_valid(out->address);
}

/* The slots of all ranks are the experts, in their order, and then some of them again. */
static hd_status add_source(engine_rank *rank, int32_t place, const peer_card *card,
                            hd_fetch_source *out, hd_err *err) {
    const hd_model_spec *spec = rank->engine->spec;
    engine_peers *p = rank->peers;
    const hd_shard shard = hd_shard_of(&rank->parallel, place, spec);
    *out = (hd_fetch_source){"peer", rank->engine->whole, NULL, shard.held};
    out->held.first = (shard.expert0 + shard.held.first) % spec->route.n_experts;
    if (!card) return HD_OK;
    HD_TRY(hd_piece_reader_open(&p->readers[p->n_readers], card->address, p->secret,
                                rank->index, err));
    out->reader = p->readers[p->n_readers++];
    return HD_OK;
}

hd_status engine_peers_sources(engine_rank *rank, hd_fetch_source **out, int32_t *n,
                               hd_err *err) {
    const int32_t ranks = rank->parallel.dwdp, own = rank->place % ranks;
    hd_fetch_source *sources = calloc((size_t)ranks, sizeof *sources);
    hd_status st = HD_OK;
    *n = 0;
    *out = sources;
    if (!sources) return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %d ranks", ranks);
    for (int32_t far = 0; far < 2; far++) { /* a copy on this host is nearer than any other */
        for (int32_t i = 1; st == HD_OK && i < ranks; i++) {
            const int32_t place = rank->place - own + (own + i) % ranks;
            peer_card card;
            if (is_elsewhere(rank, place, &card) != far) continue;
            st = add_source(rank, place, far ? &card : NULL, &sources[(*n)++], err);
        }
    }
    return st;
}

void engine_peers_leave(engine_rank *rank) {
    engine_peers *p = rank->peers;
    for (int32_t i = 0; p && i < p->n_readers; i++) hd_piece_reader_close(p->readers[i]);
    if (p) p->n_readers = 0;
}

void engine_peers_read(engine_rank *rank) {
    const engine_peers *p = rank->peers;
    hd_expert_figures *f = &rank->totals.experts;
    hd_piece_server_figures served;
    if (!p) return;
    hd_piece_server_read_figures(p->server, &served);
    f->refused = served.refused;
    for (int32_t i = 0; i < p->n_readers; i++) {
        hd_piece_reader_figures r;
        hd_piece_reader_read_figures(p->readers[i], &r);
        f->network_bytes += r.bytes;
        f->file_bytes += r.file_bytes;
        f->failed += r.failures;
    }
}
