/* status.h - error handling: status codes, and one error sentence for the user.
 *
 * A function that can fail returns hd_status. If a user may want to read the reason, it also
 * takes hd_err as its last argument and stores one sentence there. The first failure wins:
 * hd_fail() never overwrites, so callers only pass it on. Programs read status, code and
 * field; the sentence is for people only. */
#ifndef HD_BASE_STATUS_H
#define HD_BASE_STATUS_H

#include <stdarg.h>
#include <stddef.h>

#ifdef __cplusplus
#define HD_BEGIN_C extern "C" {
#define HD_END_C   }
#else
#define HD_BEGIN_C
#define HD_END_C
#endif

#if defined(__GNUC__)
#define HD_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define HD_PRINTF(fmt, args)
#endif

#define HD_LEN(array) (sizeof(array) / sizeof((array)[0]))
#define HD_STR_(x)    #x
#define HD_STR(x)     HD_STR_(x)

HD_BEGIN_C

typedef enum hd_status {
    HD_OK = 0,
    HD_ENOMEM = -1,
    HD_EINVAL = -2,      /* the caller's input is invalid */
    HD_EIO = -3,         /* the operating system refused: permission, disk, socket */
    HD_EFORMAT = -4,     /* input bytes do not have the format they claim */
    HD_EDEVICE = -5,     /* a device failed or is missing; its rank ends */
    HD_EPEER = -6,       /* another rank failed or does not respond */
    HD_EAGAIN = -7,      /* not a failure: not possible now, try again */
    HD_EUNSUPPORTED = -8 /* valid, but this build or machine does not support it */
} hd_status;

enum { HD_MAX_FIELD = 128 };

typedef struct hd_err {
    hd_status status;  /* HD_OK: nothing recorded yet */
    const char *where; /* "src/kv/pool.c:120" */
    /* What failed, as a constant string: "schema_cycle"; NULL if status says enough. */
    const char *code;
    /* The parameter that was wrong, as a path: "messages[3].content"; "" if it is unknown. */
    char field[HD_MAX_FIELD];
    /* One sentence, control characters escaped, lower case, no full stop. The middle of a
     * longer one is left out. */
    char msg[600];
} hd_err;

/* Records the failure, unless one is recorded already, and returns status. err may be NULL.
 * Untrusted bytes may be passed as %s: control characters are escaped as \xNN. */
hd_status hd_fail(hd_err *err, hd_status status, const char *where, const char *fmt, ...)
    HD_PRINTF(4, 5);
/* The same with code and field, each of which may be NULL. */
hd_status hd_refuse(hd_err *err, hd_status status, const char *where, const char *code,
                    const char *field, const char *fmt, ...) HD_PRINTF(6, 7);

/* Names the field of a recorded failure that names none. err may be NULL. */
void hd_err_set_field(hd_err *err, const char *field);

/* A formatted field, for one call: hd_field_of("tools[%zu]", i).path */
typedef struct hd_field {
    char path[HD_MAX_FIELD];
} hd_field;

hd_field hd_field_of(const char *fmt, ...) HD_PRINTF(1, 2);

/* Used as: return HD_FAIL(err, HD_EIO, "cannot read %s", path); */
#ifdef __clang_analyzer__ /* sees one file at a time: tell it that a failure is not HD_OK */
#define HD_FAIL(err, status, ...) \
    (hd_fail((err), (status), __FILE__ ":" HD_STR(__LINE__), __VA_ARGS__), (status))
#define HD_REFUSE(err, status, ...) \
    (hd_refuse((err), (status), __FILE__ ":" HD_STR(__LINE__), __VA_ARGS__), (status))
#else
#define HD_FAIL(err, status, ...) \
    hd_fail((err), (status), __FILE__ ":" HD_STR(__LINE__), __VA_ARGS__)
/* HD_REFUSE(err, HD_EINVAL, code, field, "...") */
#define HD_REFUSE(err, status, ...) \
    hd_refuse((err), (status), __FILE__ ":" HD_STR(__LINE__), __VA_ARGS__)
#endif

/* The only macro of the project that may return. */
#define HD_TRY(call)                          \
    do {                                      \
        hd_status hd_try_ = (call);           \
        if (hd_try_ != HD_OK) return hd_try_; \
    } while (0)

HD_END_C

#endif
