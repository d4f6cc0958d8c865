/* answer.c - see answer.h. */
#include "cli/answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/terminal/prompt_bar.h"
#include "cli/terminal/screen.h"

typedef struct shown {
    answer *answer;
    size_t n_content, n_reasoning;
    screen out;
    prompt_bar bar;
} shown;

static bool keep(char **text, size_t *n, const hd_delta *p) {
    char *grown = realloc(*text, *n + p->n + 1);
    if (!grown) return false;
    memcpy(grown + *n, p->text, p->n);
    *n += p->n;
    grown[*n] = '\0';
    *text = grown;
    return true;
}

static bool show_part(shown *s, const hd_delta *p) {
    answer *a = s->answer;
    switch (p->kind) {
    case HD_DELTA_REASONING:
        screen_turn_to(&s->out, true);
        screen_write(&s->out, p->text, p->n);
        return keep(&a->reasoning, &s->n_reasoning, p);
    case HD_DELTA_CONTENT:
        screen_turn_to(&s->out, false);
        screen_write(&s->out, p->text, p->n);
        return keep(&a->content, &s->n_content, p);
    default:
        return true; /* no tools are offered */
    }
}

static bool show_event(shown *s, const hd_event *e) {
    bool kept = true;
    prompt_bar_end(&s->bar);
    for (size_t i = 0; i < e->n_deltas; i++) kept = show_part(s, &e->deltas[i]) && kept;
    fflush(stdout);
    return kept;
}

static hd_status follow(shown *s, hd_engine *e, uint64_t id, int64_t start_ns,
                        const volatile int *stop, hd_err *err) {
    answer *a = s->answer;
    hd_event event;
    do {
        if (*stop && !a->stopped) {
            hd_engine_cancel(e, id);
            a->stopped = true;
        }
        event = (hd_event){0};
        if (!hd_engine_poll(e, &event, PROMPT_BAR_LOOK_NS)) {
            prompt_bar_draw(&s->bar, e);
            continue;
        }
        if (!show_event(s, &event))
            return HD_FAIL(err, HD_ENOMEM, "no memory for the response");
        a->end_ns = hd_now_ns() - start_ns;
        if (!a->first_ns && event.step.n_tokens) a->first_ns = a->end_ns;
    } while (event.step.finish_reason == HD_FINISH_NONE);
    a->prompt_tokens = event.prompt_tokens;
    a->cached_tokens = event.step.n_cached;
    a->output_tokens = event.output_tokens;
    a->drafted = event.drafted;
    a->accepted = event.accepted;
    a->finish_reason = event.step.finish_reason;
    if (event.step.finish_reason != HD_FINISH_ERROR) return HD_OK;
    return HD_FAIL(err, HD_EDEVICE, "%s", event.why ? event.why : "the computation failed");
}

hd_status answer_run(answer *out, hd_engine *e, const hd_request *g, const volatile int *stop,
                     hd_err *err) {
    *out = (answer){.content = strdup(""), .reasoning = strdup("")};
    if (!out->content || !out->reasoning) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for the response");
    }
    shown s = {.answer = out};
    char why[600];
    screen_open(&s.out, stdout);
    s.bar.quiet = !isatty(STDOUT_FILENO) || !isatty(STDERR_FILENO);
    const int64_t start_ns = hd_now_ns();
    const uint64_t id = hd_engine_submit(e, g, NULL, why, sizeof why);
    if (!id) return HD_FAIL(err, HD_EINVAL, "%s", why);
    const hd_status st = follow(&s, e, id, start_ns, stop, err);
    prompt_bar_end(&s.bar);
    screen_end(&s.out);
    fputc('\n', stdout);
    fflush(stdout);
    return st;
}

void answer_deinit(answer *a) {
    free(a->content);
    free(a->reasoning);
    *a = (answer){0};
}
