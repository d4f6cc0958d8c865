/* drive_grammar.c - the grammar's matcher and masks, line by line, for tests in other languages.
 *
 * Reads one JSON object per line: kind (object, schema, regex, choice, calls), text, choices,
 * space; where there are tools, format (a number), spelled (markers are no tokens), hold, most;
 * texts to judge; walks, the number of random texts to make through masks, from seed. Answers
 * with one line: error, or states, bytes, accepted (per text), walks (texts that ended), and
 * wrong: tokens whose mask bit disagreed with advance(). A walk of calls is given with its
 * markers in text, and as the parser of replies takes it apart. With a model directory as argument the
 * tokens are its tokenizer's; otherwise a few hundred short ones. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "base/philox.h"
#include "grammar/grammar_internal.h"

enum {
    MARKS = (1 << GRAM_N_MARKS) - 1,
    MAX_TOY = 1024,
    MAX_WALK = 1 << 16,
    SAMPLE = 400,
    STEPS = 60,
    GIVE_UP = 3000
};

typedef struct driver {
    hd_tokenizer *tokenizer;
    hd_grammar_vocab *vocab;
    hd_grammar_masks *masks;
    const uint8_t *pieces[MAX_TOY];
    size_t bytes[MAX_TOY];
    uint8_t storage[MAX_TOY][16];
    int32_t n_tokens, eos;
    uint32_t *mask;
    uint64_t seed, draws;
    int64_t wrong;
    double slowest_us, total_us; /* of masks */
    int64_t n_slow;              /* above 500 us */
} driver;

static uint32_t draw(driver *d, uint32_t below) {
    return hd_philox_at(d->seed, 0, d->draws++).v[0] % below;
}

static void add_toy(driver *d, const char *text, size_t n) {
    memcpy(d->storage[d->n_tokens], text, n);
    d->pieces[d->n_tokens] = d->storage[d->n_tokens];
    d->bytes[d->n_tokens++] = n;
}

/* All single bytes, joints of JSON, and pieces that begin and end inside of characters. */
static void make_toys(driver *d) {
    static const char *const more[] = {"\"",
                                       "\",",
                                       "\":",
                                       "\": ",
                                       "\", \"",
                                       "\"}",
                                       "\"]",
                                       "}}",
                                       "]}",
                                       "},",
                                       "{\"",
                                       "[\"",
                                       "[[",
                                       "true",
                                       "false",
                                       "null",
                                       "nul",
                                       "e",
                                       "\":\"",
                                       "\":[",
                                       "\":{",
                                       "10",
                                       "123",
                                       "-1",
                                       "0.5",
                                       "e+",
                                       "1e",
                                       "\\u",
                                       "\\ud83",
                                       "\\\"",
                                       "\\\\",
                                       "\\n",
                                       "abc",
                                       "ab",
                                       "aa",
                                       "aab",
                                       "name",
                                       "type",
                                       "value",
                                       "a\":",
                                       "é",
                                       "ß",
                                       "\xc3",
                                       "\xa9",
                                       "\xe2\x82",
                                       "\xac",
                                       "€",
                                       "\xf0\x9f",
                                       "\x98\x80",
                                       "😀",
                                       "a\xc3",
                                       "\xa9\"",
                                       " ",
                                       "  ",
                                       ", ",
                                       ": ",
                                       "\n",
                                       "\n  ",
                                       "2024-",
                                       "-0",
                                       "00",
                                       "::",
                                       "\":1",
                                       ",\"a",
                                       "}]",
                                       "[]",
                                       "{}",
                                       "[1,",
                                       "1]",
                                       "\"\"",
                                       "\n\n<",
                                       "</",
                                       ">\n",
                                       "\">\n",
                                       "invoke",
                                       "tool_calls",
                                       "parameter",
                                       "name=\"",
                                       "string=\"",
                                       "｜DSML｜",
                                       "<｜",
                                       "<tool_calls>",
                                       "<invoke name=\"",
                                       "```",
                                       "\n```"};
    for (int c = 0; c < 256; c++) add_toy(d, (char[]){(char)c}, 1);
    for (size_t i = 0; i < HD_LEN(more); i++) add_toy(d, more[i], strlen(more[i]));
}

static const uint8_t *piece(const driver *d, int32_t id, size_t *n) {
    if (d->tokenizer) {
        if (hd_tokenizer_is_added(d->tokenizer, id)) return NULL;
        return hd_tokenizer_piece(d->tokenizer, id, n);
    }
    *n = d->bytes[id];
    return d->pieces[id];
}

static bool allowed(const driver *d, int32_t id) {
    return d->mask[id >> 5] >> (id & 31) & 1;
}

static void check_one(driver *d, const hd_grammar *g, const hd_grammar_state *s, int32_t id) {
    static hd_grammar_state next;
    size_t n = 0;
    const uint8_t *bytes = piece(d, id, &n);
    if (id == d->eos) {
        d->wrong += allowed(d, id) != hd_grammar_can_end(g, s);
        return;
    }
    hd_grammar_copy(&next, s);
    bool fine = bytes && n > 0 && n < 255 && hd_grammar_advance(g, &next, bytes, n);
    if (fine != allowed(d, id)) d->wrong++;
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* exclude other load of the computer */
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void compute_mask(driver *d, const hd_grammar *g, const hd_grammar_state *s) {
    double start = now_us();
    hd_grammar_mask(d->masks, g, s, d->mask);
    double us = now_us() - start;
    d->total_us += us;
    d->n_slow += us > 500;
    if (us > d->slowest_us) d->slowest_us = us;
}

static void check_mask(driver *d, const hd_grammar *g, const hd_grammar_state *s) {
    compute_mask(d, g, s);
    if (!d->tokenizer) {
        for (int32_t id = 0; id < d->n_tokens; id++) check_one(d, g, s, id);
        return;
    }
    for (int32_t i = 0; i < SAMPLE; i++) {
        check_one(d, g, s, (int32_t)draw(d, (uint32_t)d->n_tokens));
    }
}

/* Returns a random allowed token; late in a walk one that closes something, or begins to, if
 * there is one. */
static int32_t choose(driver *d, int32_t step) {
    static const char *const closers[] = {"\"",  "}",    "]",  "\xfd", "｜DSML｜",
                                          "<｜", "\xf8", "</", "<"};
    bool close = draw(d, 4) < (step > STEPS ? 3 : 1);
    if (close && allowed(d, d->eos) && (step > STEPS || draw(d, 3) == 0)) return d->eos;
    const uint32_t first = draw(d, HD_LEN(closers));
    for (size_t i = 0; close && i < HD_LEN(closers); i++) {
        const char *closer = closers[(first + i) % HD_LEN(closers)];
        for (int32_t id = 0; id < d->n_tokens; id++) {
            size_t n = 0;
            const uint8_t *bytes = allowed(d, id) ? piece(d, id, &n) : NULL;
            if (bytes && n == strlen(closer) && memcmp(bytes, closer, n) == 0) return id;
        }
    }
    for (int32_t i = 0; i < 200; i++) {
        int32_t id = (int32_t)draw(d, (uint32_t)d->n_tokens);
        if (allowed(d, id)) return id;
    }
    int32_t start = (int32_t)draw(d, (uint32_t)d->n_tokens);
    for (int32_t i = 0; i < d->n_tokens; i++) {
        int32_t id = (start + i) % d->n_tokens;
        if (allowed(d, id)) return id;
    }
    return -1;
}

/* ---- replies ---- */

typedef struct taken {
    json_t *content, *calls, *notes; /* calls: name, arguments, whether whole */
    json_t *call;
    hd_bytes text, arguments;
} taken;

static void take(void *user, const hd_reply_event *e) {
    taken *t = user;
    if (e->kind == HD_REPLY_CONTENT) hd_bytes_append(&t->text, e->text, e->n, NULL);
    if (e->kind == HD_REPLY_ARGUMENTS) hd_bytes_append(&t->arguments, e->text, e->n, NULL);
    if (e->kind == HD_REPLY_CALL_BEGIN) t->call = json_pack("[s%]", e->text, e->n);
    if (e->kind == HD_REPLY_NOTE) {
        json_array_append_new(t->notes, json_string(hd_reply_note_text(e->note)));
    }
    if (e->kind != HD_REPLY_CALL_END) return;
    json_array_append_new(t->call, json_stringn(t->arguments.data, t->arguments.n));
    json_array_append_new(t->call, json_boolean(e->end == HD_REPLY_COMPLETE));
    json_array_append_new(t->calls, t->call);
    t->arguments.n = 0;
}

/* Feeds text[n] as its tokens would be, with markers as special tokens. */
static void feed(hd_reply *r, const char *text, size_t n, hd_bytes *shown) {
    for (size_t at = 0, end; at < n; at = end) {
        const bool special = (uint8_t)text[at] >= HD_GRAMMAR_MARK;
        const char *piece =
            special ? gram_mark_text[(uint8_t)text[at] - HD_GRAMMAR_MARK] : text + at;
        for (end = at + 1; !special && end < n && (uint8_t)text[end] < HD_GRAMMAR_MARK;) end++;
        const size_t bytes = special ? strlen(piece) : end - at;
        hd_reply_feed(r, piece, bytes, special, NULL);
        hd_bytes_append(shown, piece, bytes, NULL);
    }
}

static json_t *parse(const hd_grammar_calls *calls, json_t *tools, const char *text, size_t n) {
    taken t = {.calls = json_array(), .notes = json_array()};
    hd_bytes shown = {0};
    hd_reply_tools offered;
    hd_reply *r;
    json_t *wrapped = json_array(), *tool;
    size_t i;
    json_array_foreach(tools, i, tool) {
        json_array_append_new(wrapped, json_pack("{s:O}", "function", tool));
    }
    hd_reply_tools_init(&offered, wrapped, NULL);
    const hd_reply_options o = {.format = calls->format,
                                .parse_tools = true,
                                .own_spelling = true,
                                .flagged = calls->flagged,
                                .dsml_flagged = calls->flagged,
                                .tools = offered.tools,
                                .n_tools = offered.n_tools};
    hd_reply_open(&r, &o, take, &t, NULL);
    feed(r, text, n, &shown);
    hd_reply_finish(r, HD_FINISH_STOP, NULL);
    hd_reply_close(r);
    json_t *answer =
        json_pack("{s:s%, s:s%, s:o, s:o}", "text", shown.data, shown.n, "content",
                  t.text.data ? t.text.data : "", t.text.n, "calls", t.calls, "notes", t.notes);
    hd_bytes_deinit(&shown);
    hd_bytes_deinit(&t.text);
    hd_bytes_deinit(&t.arguments);
    hd_reply_tools_deinit(&offered);
    json_decref(wrapped);
    return answer;
}

/* ---- walks ---- */

/* Returns the text of one random walk; NULL if it did not end in time; *stuck if no token is
 * allowed. */
static json_t *walk(driver *d, const hd_grammar *g, const hd_grammar_calls *calls,
                    json_t *tools, bool *stuck) {
    static hd_grammar_state s;
    static char text[MAX_WALK];
    size_t at = 0;
    hd_grammar_start(g, &s);
    for (int32_t step = 0; step < GIVE_UP; step++) {
        check_mask(d, g, &s);
        int32_t id = choose(d, step);
        if (id < 0) {
            *stuck = true;
            return NULL;
        }
        if (id == d->eos) {
            return tools ? parse(calls, tools, text, at) : json_stringn(text, at);
        }
        size_t n;
        const uint8_t *bytes = piece(d, id, &n);
        if (at + n > sizeof text) return NULL;
        memcpy(text + at, bytes, n);
        at += n;
        if (!hd_grammar_advance(g, &s, bytes, n)) {
            *stuck = true;
            return NULL;
        }
    }
    return NULL;
}

static bool accepts(const hd_grammar *g, const char *text, size_t n) {
    static hd_grammar_state s;
    hd_grammar_start(g, &s);
    return hd_grammar_advance(g, &s, (const uint8_t *)text, n) && hd_grammar_can_end(g, &s);
}

static json_t *judge(driver *d, const hd_grammar *g, const hd_grammar_args *a,
                     const json_t *job) {
    json_t *tools = NULL;
    hd_err err = {0};
    if (a->calls.tools) {
        hd_json_parse(&tools, a->calls.tools, a->calls.n_tools, "the tools", &err);
    }
    json_t *accepted = json_array(), *walks = json_array();
    const json_t *texts = json_object_get(job, "texts");
    bool stuck = false;
    d->wrong = 0;
    d->slowest_us = d->total_us = 0;
    d->n_slow = 0;
    d->seed = (uint64_t)json_integer_value(json_object_get(job, "seed"));
    d->draws = 0;
    for (size_t i = 0; i < json_array_size(texts); i++) {
        const json_t *text = json_array_get(texts, i);
        bool fine = accepts(g, json_string_value(text), json_string_length(text));
        json_array_append_new(accepted, json_boolean(fine));
    }
    json_int_t n = json_integer_value(json_object_get(job, "walks"));
    json_int_t unfinished = 0;
    for (json_int_t i = 0; i < n; i++) {
        json_t *text = walk(d, g, &a->calls, tools, &stuck);
        if (text) {
            json_array_append_new(walks, text);
        } else {
            unfinished++;
        }
    }
    json_decref(tools);
    hd_grammar_masks_stats stats = hd_grammar_masks_get_stats(d->masks);
    return json_pack("{s:o, s:o, s:I, s:b, s:I, s:i, s:I, s:f, s:f, s:I, s:I, s:I}", "accepted",
                     accepted, "walks", walks, "wrong", (json_int_t)d->wrong, "stuck", stuck,
                     "unfinished", unfinished, "states", (int)g->n_states, "bytes",
                     (json_int_t)hd_grammar_bytes(g), "slowest_us", d->slowest_us, "total_us",
                     d->total_us, "slow", (json_int_t)d->n_slow, "hits", (json_int_t)stats.hits,
                     "misses", (json_int_t)stats.misses);
}

static json_t *serve(driver *d, const json_t *job) {
    static const char *const kinds[] = {"object", "schema", "regex", "choice", "calls"};
    const bool spelled = json_is_true(json_object_get(job, "spelled"));
    const json_t *list = json_object_get(job, "choices"), *text = json_object_get(job, "text");
    const char *kind = json_string_value(json_object_get(job, "kind"));
    size_t n = json_array_size(list);
    const char **choices = calloc(n + 1, sizeof *choices);
    size_t *bytes = calloc(n + 1, sizeof *bytes);
    for (size_t i = 0; i < n; i++) {
        choices[i] = json_string_value(json_array_get(list, i));
        bytes[i] = json_string_length(json_array_get(list, i));
    }
    hd_grammar_args a = {.text = json_string_value(text),
                         .n = json_string_length(text),
                         .choices = choices,
                         .choice_bytes = bytes,
                         .n_choices = (int32_t)n,
                         .free_space =
                             (int32_t)json_integer_value(json_object_get(job, "space"))};
    a.calls = (hd_grammar_calls){
        .format = (hd_reply_format)json_integer_value(json_object_get(job, "format")),
        .marks = spelled        ? 0
                 : d->tokenizer ? hd_grammar_vocab_marks(d->vocab)
                                : MARKS,
        .flagged = !spelled,
        .tools = json_string_value(json_object_get(job, "tools")),
        .n_tools = json_string_length(json_object_get(job, "tools")),
        .hold = json_is_true(json_object_get(job, "hold")),
        .most = (int32_t)json_integer_value(json_object_get(job, "most"))};
    for (size_t i = 0; i < HD_LEN(kinds); i++) {
        if (kind && strcmp(kinds[i], kind) == 0) a.kind = (hd_grammar_kind)i;
    }
    hd_grammar *g;
    hd_err err = {0};
    double start = now_us();
    hd_status status = hd_grammar_open(&g, &a, &err);
    double us = now_us() - start;
    json_t *answer =
        status == HD_OK ? judge(d, g, &a, job) : json_pack("{s:s}", "error", err.msg);
    json_object_set_new(answer, "compile_us", json_real(us));
    hd_grammar_close(g);
    free(choices);
    free(bytes);
    return answer;
}

static hd_status open_vocab(driver *d, const char *dir, hd_err *err) {
    if (dir) {
        HD_TRY(hd_tokenizer_open(&d->tokenizer, dir, err));
        d->n_tokens = hd_tokenizer_vocab_size(d->tokenizer);
        d->eos = hd_tokenizer_eos(d->tokenizer);
        return hd_grammar_vocab_open_tokenizer(&d->vocab, d->tokenizer, d->n_tokens, &d->eos, 1,
                                               err);
    }
    make_toys(d);
    d->eos = d->n_tokens;
    d->pieces[d->n_tokens++] = NULL;
    const hd_grammar_vocab_args a = {.pieces = d->pieces,
                                     .piece_bytes = d->bytes,
                                     .n_pieces = d->n_tokens,
                                     .n_rows = d->n_tokens,
                                     .eos = &d->eos,
                                     .n_eos = 1};
    return hd_grammar_vocab_open(&d->vocab, &a, err);
}

int main(int argc, char **argv) {
    static driver d;
    hd_err err = {0};
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    if (open_vocab(&d, argc > 1 ? argv[1] : NULL, &err) != HD_OK ||
        hd_grammar_masks_open(&d.masks, d.vocab, (size_t)64 << 20, &err) != HD_OK) {
        fprintf(stderr, "error: %s\n", err.msg);
        return 2;
    }
    d.mask = calloc((size_t)hd_grammar_vocab_words(d.vocab), sizeof *d.mask);
    while (d.mask && (n = getline(&line, &cap, stdin)) > 0) {
        json_t *job;
        if (hd_json_parse(&job, line, (size_t)n, "a job", &err) != HD_OK) break;
        json_t *answer = serve(&d, job);
        json_dumpf(answer, stdout, JSON_COMPACT);
        printf("\n");
        fflush(stdout);
        json_decref(answer);
        json_decref(job);
    }
    free(line);
    free(d.mask);
    hd_grammar_masks_close(d.masks);
    hd_grammar_vocab_close(d.vocab);
    hd_tokenizer_close(d.tokenizer);
    if (err.code != HD_OK) fprintf(stderr, "error: %s\n", err.msg);
    return err.code == HD_OK ? 0 : 2;
}
