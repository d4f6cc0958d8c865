/* fuzz_events.c - any bytes as a streamed answer: what is read does not depend on how they were cut
 * into pieces, and counts are never negative. The first byte says where they are cut. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/events.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static bool same_text(const client_text *a, const client_text *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->at, b->at, a->n) == 0);
}

static void check_counts(const client_events *e, int64_t with_text) {
    must(e->with_text == with_text, "events were counted twice");
    must(!e->has_usage || (e->prompt_tokens >= 0 && e->completion_tokens >= 0),
         "negative usage");
    must(!e->has_cached || e->cached_tokens >= 0, "negative cached tokens");
    must(e->failed == (e->error[0] != '\0') || e->failed, "an error without a failure");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    client_events whole = {.keep = true}, cut = {.keep = true};
    if (n == 0) return 0;
    const size_t piece = 1 + data[0] % 32;
    const char *bytes = (const char *)data + 1;
    n--;
    check_counts(&whole, client_events_feed(&whole, bytes, n));
    int64_t with_text = 0;
    for (size_t at = 0; at < n; at += piece) {
        with_text += client_events_feed(&cut, bytes + at, n - at < piece ? n - at : piece);
    }
    check_counts(&cut, with_text);
    must(whole.with_text == cut.with_text && whole.done == cut.done &&
             whole.finished == cut.finished && whole.failed == cut.failed &&
             whole.has_usage == cut.has_usage && strcmp(whole.error, cut.error) == 0,
         "pieces make a difference");
    must(same_text(&whole.content, &cut.content) && same_text(&whole.reasoning, &cut.reasoning),
         "pieces change the text");
    client_events_deinit(&whole);
    client_events_deinit(&cut);
    return 0;
}
