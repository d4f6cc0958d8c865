/* grammar_marks_internal.h - bytes that stand for markers of calls, for literals of
 * gram_marked(). */
#ifndef HD_GRAMMAR_GRAMMAR_MARKS_INTERNAL_H
#define HD_GRAMMAR_GRAMMAR_MARKS_INTERNAL_H

#include "grammar/grammar_internal.h"

#define CALLS_BEGIN "\xf8"
#define CALLS_END   "\xf9"
#define CALL_BEGIN  "\xfa"
#define CALL_END    "\xfb"
#define SEPARATOR   "\xfc"
#define DSML        "\xfd"

_Static_assert(HD_GRAMMAR_MARK + GRAM_MARK_DSML == 0xfd, "the literals are the marks' bytes");

#endif
