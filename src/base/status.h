/* status.h - error handling: status codes, and one error sentence for the user.
 *
 * A function that can fail returns hd_status. If a user may want to read the reason, it also
 * takes hd_err as its last argument and stores one sentence there. The first failure wins:
 * hd_fail() never overwrites, so callers only pass it on. */
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

typedef struct hd_err {
    hd_status code;    /* HD_OK: nothing recorded yet */
    const char *where; /* "src/kv/pool.c:120" */
    /* One sentence, control characters escaped, lower case, no full stop. The middle of a
     * longer one is left out. */
    char msg[600];
} hd_err;

/* Records the failure, unless one is recorded already, and returns code. err may be NULL.
 * Untrusted bytes may be passed as %s: control characters are escaped as \xNN. */
hd_status hd_fail(hd_err *err, hd_status code, const char *where, const char *fmt, ...)
    HD_PRINTF(4, 5);

/* Used as: return HD_FAIL(err, HD_EIO, "cannot read %s", path); */
#ifdef __clang_analyzer__ /* sees one file at a time: tell it that a failure is not HD_OK */
#define HD_FAIL(err, code, ...) \
    (hd_fail((err), (code), __FILE__ ":" HD_STR(__LINE__), __VA_ARGS__), (code))
#else
#define HD_FAIL(err, code, ...) \
    hd_fail((err), (code), __FILE__ ":" HD_STR(__LINE__), __VA_ARGS__)
#endif

/* The only macro of the project that may return. */
#define HD_TRY(call)                          \
    do {                                      \
        hd_status hd_try_ = (call);           \
        if (hd_try_ != HD_OK) return hd_try_; \
    } while (0)

HD_END_C

#endif
