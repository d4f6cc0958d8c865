/* log.h - structured logging: one line per event, "time level event key=value ...".
 *
 *     2026-11-20T14:02:11.532Z info model_loaded path="/models/v4" seconds=1.93
 *
 * A process that is one of several of a world says which, before the event:
 *
 *     2026-11-20T14:02:11.532Z info rank 2@node-b model_loaded path="/models/v4" seconds=1.93
 *
 * The event is a fixed word. Values are quoted with escapes where necessary, so an event is
 * always one line. Thread-safe: a line is built on the stack and written in one write.
 * Writing never blocks: lines that a full pipe does not accept are dropped, counted, and
 * reported when there is space again. */
#ifndef HD_BASE_LOG_H
#define HD_BASE_LOG_H

#include <stdint.h>

#include "base/status.h"

HD_BEGIN_C

typedef enum hd_log_level { HD_LOG_INFO, HD_LOG_WARN, HD_LOG_ERROR } hd_log_level;

typedef enum hd_log_kind { HD_LOG_TEXT, HD_LOG_INT, HD_LOG_REAL } hd_log_kind;

typedef struct hd_log_field {
    const char *key;
    hd_log_kind kind;
    const char *text;
    int64_t integer;
    double real;
} hd_log_field;

static inline hd_log_field hd_log_text(const char *key, const char *value) {
    return (hd_log_field){key, HD_LOG_TEXT, value, 0, 0};
}

static inline hd_log_field hd_log_int(const char *key, int64_t value) {
    return (hd_log_field){key, HD_LOG_INT, NULL, value, 0};
}

static inline hd_log_field hd_log_real(const char *key, double value) {
    return (hd_log_field){key, HD_LOG_REAL, NULL, 0, value};
}

/* Writes one line to standard error. */
void hd_log_write(hd_log_level level, const char *event, const hd_log_field *fields, int n);

/* From now on lines name this rank and its host. Before other threads are started. */
void hd_log_name_rank(int32_t rank, const char *host);

int64_t hd_log_dropped(void); /* lines dropped so far */

/* HD_LOG(HD_LOG_INFO, "model_loaded", hd_log_text("path", dir), hd_log_real("seconds", s)); */
#define HD_LOG(level, event, ...)                                       \
    hd_log_write((level), (event), (const hd_log_field[]){__VA_ARGS__}, \
                 (int)HD_LEN(((const hd_log_field[]){__VA_ARGS__})))

HD_END_C

#endif
