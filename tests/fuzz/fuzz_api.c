/* fuzz_api.c - any bytes as the body of any endpoint: no fault, exactly one answer that is JSON
 * or a stream, and nothing outlives the call.
 *
 * The first byte of the input chooses the endpoint, the rest is the body. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/resume.h"
#include "fakes/api_rig.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char *const paths[] = {"/v1/chat/completions",
                                    "/v1/completions",
                                    "/generate",
                                    "/v1/messages",
                                    "/v1/responses",
                                    "/tokenize",
                                    "/detokenize",
                                    "/apply-template",
                                    "/parse_function_call",
                                    "/separate_reasoning",
                                    "/v1/messages/count_tokens"};

static void demand(bool so, const char *what) {
    if (so) return;
    fprintf(stderr, "fuzz_api: %s\n", what);
    abort();
}

/* Any text as the place of a stream that goes on here. */
static void check_place(const char *text) {
    static const api_format format = {.chunk_object = "chunk"};
    api_choice choices[3] = {0};
    api_job job = {.format = &format, .choices = choices, .n_choices = 3, .w.stream = true};
    api_resume_begin(&job, text);
    for (int32_t i = 0; i < 3; i++) demand(choices[i].skip >= 0, "a place below 0");
    api_puts(&job.out, "x");
    api_resume_tell(&job);
    demand(job.out.n > 10, "no place is told");
    api_text_deinit(&job.out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static rig r;
    static bool open;
    if (n < 1) return 0;
    if (!open) rig_init(&r);
    open = true;
    char *body = malloc(n);
    memcpy(body, data + 1, n - 1);
    body[n - 1] = 0;
    check_place(body);
    rig_call *c =
        rig_post_bytes(&r, paths[data[0] % (sizeof paths / sizeof paths[0])], body, n - 1);
    rig_play(&r);
    demand(rig_ended(c), "no answer");
    const char *text = rig_text(c);
    if (strncmp(text, "data: ", 6) != 0 && strncmp(text, "event: ", 7) != 0) {
        json_t *whole = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        demand(whole != NULL, "an answer is no JSON");
        json_decref(whole);
    }
    demand(rig_release(c), "a call outlives its answer");
    free(body);
    return 0;
}
