/* silence.h - when the silence of another rank means that it is lost.
 *
 * A rank that sends no heartbeat may be stopped, cut off, or starved: its watch did not get a core. The
 * first two are lost after the limit of silence. A starved one is not: of a process on this host the
 * kernel says that it runs, or wants to, and it gets PATIENCE times the limit. */
#ifndef HD_COMM_SILENCE_H
#define HD_COMM_SILENCE_H

#include <stdbool.h>
#include <stdint.h>

enum { HD_SILENCE_PATIENCE = 10 };

/* Where a process is; it is sent to other ranks. */
typedef struct hd_place {
    /* Hash of the boot and of the namespaces of process numbers and of the network, since between two
     * networks a cable can be cut; 0: unknown. */
    uint64_t host;
    int32_t pid, pad;
} hd_place;

hd_place hd_place_here(void);

/* Whether a process is known to be of this host, and neither stopped nor ended. */
bool hd_place_runs(const hd_place *of, const hd_place *here);

/* Whether a process of this host has ended: none of its memory is mapped any more. */
bool hd_place_has_ended(const hd_place *of);

/* Whether a process of this host belongs to the user of this one. */
bool hd_place_is_of_user(const hd_place *of);

/* The milliseconds to count of those that passed between two looks, of which there are two or more in
 * beat_ms. Where the one who looks was starved itself, it has not heard what was sent meanwhile. */
int64_t hd_silence_passed(int64_t passed_ms, int32_t beat_ms);

/* Returns the limit that the silence of a rank has exceeded, or 0: it is not lost. */
int32_t hd_silence_exceeds(int64_t silent_ms, int32_t limit_ms, const hd_place *of,
                           const hd_place *here);

#endif
