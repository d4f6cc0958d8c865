/* shm.h - messages between ranks that are processes of one host, through memory that they share.
 *
 * Each rank makes a segment of shared memory. It has a line for each message that may be under way to
 * each other rank (group, lane and ticket, messages.h), and rooms with their bytes, which the others read in
 * place: bytes for several ranks are written once. A line's flag names epoch and ticket and is
 * written last. Nobody but the owner writes a segment, except for its bell, by which the others wake
 * the owner when it sleeps.
 *
 * A line or a room is written again when all have released what was there: the order of exchanges
 * in messages.c ensures that. Segments are System V's: of this user alone, never executable, and
 * gone with their last process, since they are marked so at once. A number names a segment; a word
 * that only a rank of the same epoch can make proves that it is the one meant. */
#ifndef HD_COMM_SHM_H
#define HD_COMM_SHM_H

#include "comm/messages.h"

typedef struct comm_shm comm_shm;

/* Makes the segment of `rank`, of limits->world ranks; limits must outlive it. Memory is taken as rooms are
 * written, and what a ticket's rooms had before they grew is given back with the next ticket of its place: see
 * comm_shm_memory(). HD_EUNSUPPORTED: the system has no such memory. */
hd_status comm_shm_open(comm_shm **out, int32_t rank, const hd_message_limits *limits,
                        hd_err *err);
void comm_shm_close(comm_shm *s); /* NULL is fine */

/* Bytes of the messages that a rank sends with one ticket, the most of each lane of each group; those for several
 * ranks that are the same once. */
typedef struct comm_shm_most {
    uint64_t bytes[HD_N_GROUPS][HD_N_MESSAGE_LANES];
} comm_shm_most;

/* Returns the memory that the segment of one of `world` ranks takes, at most, when there have been as large
 * messages, with those of the preflight. */
uint64_t comm_shm_memory(const comm_shm_most *most, int32_t world);

/* The number of this rank's segment, which the others attach by it. */
int32_t comm_shm_number(const comm_shm *s);

/* HD_EUNSUPPORTED: the segment of another host, user or epoch, or of another size. */
hd_status comm_shm_attach(comm_shm *s, int32_t other, int32_t number, hd_err *err);

/* Returns n bytes for a message, aligned for float, which comm_shm_send() then need not copy. NULL: the
 * segment is full. */
void *comm_shm_room(comm_shm *s, hd_group group, hd_message_lane lane, uint64_t ticket,
                    uint64_t n);

/* Long messages are better written past the caches where a core reads another's cache slowly, as between far
 * cores of a virtual machine: a rank that reads several of them slowly says so, for some time. */
enum { COMM_SHM_LONG = 1 << 16 };
void comm_shm_was_read(comm_shm *s, uint64_t n,
                       int64_t ns); /* n bytes of another rank, in so long */
bool comm_shm_streams(const comm_shm *s,
                      uint64_t n); /* n is long, and one of the others has said so */

/* Sends m->n bytes of data, which may change then, unless they are in a room. False: the segment is full. */
bool comm_shm_send(comm_shm *s, int32_t to, const hd_message *m, const void *data);

typedef enum comm_shm_news {
    COMM_SHM_NONE,
    COMM_SHM_CAME, /* *out is the message; its bytes stay where they are */
    COMM_SHM_WRONG /* a later one, or one outside the sender's segment */
} comm_shm_news;

comm_shm_news comm_shm_look(const comm_shm *s, int32_t from, hd_group group,
                            hd_message_lane lane, uint64_t ticket, hd_received *out);

/* Whether the rank was last seen on the core of this thread, so that it can only work while this thread does
 * not. */
bool comm_shm_shares_core(const comm_shm *s, int32_t with);

/* To sleep until `from` sends: lie down, look once more, sleep for at most limit_ms (-1: no limit), unless it
 * was there, get up. Returns what sleep needs. */
uint32_t comm_shm_lie_down(comm_shm *s, int32_t from);
void comm_shm_sleep(comm_shm *s, uint32_t bell, int32_t limit_ms);
void comm_shm_get_up(comm_shm *s);

/* Ends this rank's own sleep, also one that has not begun. Any thread. */
void comm_shm_wake(comm_shm *s);

#endif
