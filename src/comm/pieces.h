/* pieces.h - arrays of experts that a rank reads from the memory of a rank on another host.
 *
 * A server is a thread that answers requests, whatever its rank computes meanwhile: no rank waits for
 * another's step. A reader is a thread for each such rank, with a connection and a queue. Both ends have
 * the same model, so a request names bytes: layer, expert, array, where in the array, how many. The answer
 * is these bytes, in the order of the requests. Frames are those of comm/channel.h: authenticated, their
 * lengths checked. Whoever sends what is no request loses the connection, and nobody else notices.
 *
 * A read never fails. What the other rank does not send in time, the reader copies from the model's
 * files, which it has as well. */
#ifndef HD_COMM_PIECES_H
#define HD_COMM_PIECES_H

#include "comm/channel.h"

enum {
    HD_PIECE_ARRAYS = 6, /* of an expert: elements and scales of gate, up and down */
    HD_PIECE_MOST_BYTES = 256 << 10, /* of an answer */
    HD_PIECE_ADDRESS = 56
};

typedef enum hd_piece_frame {
    HD_PIECE_CHALLENGE = HD_FRAME_CHALLENGE, /* nonce of the server */
    HD_PIECE_JOIN = HD_FRAME_JOIN,           /* nonce of the reader */
    HD_PIECE_ASK,                            /* hd_piece */
    HD_PIECE_BYTES,                          /* what was asked for */
    HD_N_PIECE_FRAMES
} hd_piece_frame;

/* A request. */
typedef struct hd_piece {
    int32_t layer, expert, array;
    uint32_t n;  /* bytes, 1 .. HD_PIECE_MOST_BYTES */
    uint64_t at; /* the first of them in the array */
} hd_piece;

/* Returns an array of an expert in host memory, which stays, and its bytes; NULL: there is none. */
typedef const void *hd_piece_find_fn(void *ctx, int32_t layer, int32_t expert, int32_t array,
                                     size_t *bytes);

typedef struct hd_piece_source {
    hd_piece_find_fn *find;
    void *ctx;
    int32_t n_layers, n_experts;
} hd_piece_source;

/* Finds the bytes of a request of n_payload bytes. HD_EFORMAT: its length, or what it names, is wrong. */
hd_status hd_piece_check(hd_piece *out, const void **bytes, const void *payload,
                         uint32_t n_payload, const hd_piece_source *source, hd_err *err);

/* ---- server ---- */

typedef struct hd_piece_server hd_piece_server;

typedef struct hd_piece_server_figures {
    int64_t readers;       /* connected now */
    int64_t pieces, bytes; /* sent */
    int64_t refused;       /* connections that were ended for what they sent */
} hd_piece_server_figures;

/* Listens at a free port of the address of this host from which it reaches `towards`, "HOST:PORT". The secret is
 * that of the ranks. */
hd_status hd_piece_server_open(hd_piece_server **out, const char *towards, const char *secret,
                               hd_err *err);
const char *hd_piece_server_address(const hd_piece_server *s); /* "HOST:PORT" */
/* Answers from now on. The source is called on the server's thread, until close. */
hd_status hd_piece_server_start(hd_piece_server *s, const hd_piece_source *source, hd_err *err);
void hd_piece_server_read_figures(const hd_piece_server *s, hd_piece_server_figures *out);
void hd_piece_server_close(hd_piece_server *s); /* NULL is fine */

/* ---- reader ---- */

typedef struct hd_piece_reader hd_piece_reader;

/* Bytes of an array to be read. */
typedef struct hd_piece_read {
    int32_t layer, expert, array;
    uint64_t at;
    void *to;
    const void *file; /* the same bytes in the mapped file */
    size_t bytes;
} hd_piece_read;

typedef struct hd_piece_reader_figures {
    int64_t bytes;                 /* that came from the other rank */
    int64_t file_bytes;            /* that it did not send */
    int64_t failures;              /* connections that were lost or could not be made */
    char why[HD_CHANNEL_MAX_TEXT]; /* of the last one */
} hd_piece_reader_figures;

/* Connects when something is to be read. rank: of this end. */
hd_status hd_piece_reader_open(hd_piece_reader **out, const char *address, const char *secret,
                               int32_t rank, hd_err *err);

/* Queues a read, and returns its number. It is done when hd_piece_reader_await() has returned for that
 * number or a later one; until then *to is the reader's. One thread makes these calls. */
uint64_t hd_piece_reader_queue(hd_piece_reader *r, const hd_piece_read *read);
void hd_piece_reader_await(hd_piece_reader *r, uint64_t number);

void hd_piece_reader_read_figures(hd_piece_reader *r, hd_piece_reader_figures *out);
void hd_piece_reader_close(hd_piece_reader *r); /* ends the reads first; NULL is fine */

/* ---- both ---- */

/* The limits of frames to a server, or to a reader. */
hd_frame_limits hd_piece_limits(bool to_server);
void hd_piece_key(uint64_t key[2], const char *secret);

#endif
