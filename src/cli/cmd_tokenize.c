/* cmd_tokenize.c - `hadal tokenize`: text to token ids and back, from standard input to
 * standard output. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "tokenizer/tokenizer.h"

enum { CHUNK_IDS = 1 << 16 };

typedef struct job {
    const char *dir;
    bool special, json_lines, bos, skip_special;
    hd_tokenizer *tokenizer;
    char *input;
    size_t n;
} job;

static void print_ids(const hd_ids *v) {
    char buffer[4096];
    size_t used = 0;
    buffer[used++] = '[';
    for (size_t i = 0; i < v->n; i++) {
        char digits[12];
        size_t d = sizeof digits;
        uint32_t id = (uint32_t)v->ids[i];
        do {
            digits[--d] = (char)('0' + id % 10);
            id /= 10;
        } while (id > 0);
        if (used + sizeof digits + 4 > sizeof buffer) {
            fwrite(buffer, 1, used, stdout);
            used = 0;
        }
        if (i > 0) buffer[used++] = ',';
        memcpy(buffer + used, digits + d, sizeof digits - d);
        used += sizeof digits - d;
    }
    buffer[used++] = ']';
    buffer[used++] = '\n';
    fwrite(buffer, 1, used, stdout);
}

static void print_json_string(const hd_bytes *text) {
    static const char names[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    size_t start = 0;
    putchar('"');
    for (size_t i = 0; i < text->n; i++) {
        unsigned char c = (unsigned char)text->data[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        const char *name = c ? strchr(names, c) : NULL;
        fwrite(text->data + start, 1, i - start, stdout);
        if (name) {
            printf("\\%c", letters[name - names]);
        } else {
            printf("\\u%04x", c);
        }
        start = i + 1;
    }
    if (text->n > start) fwrite(text->data + start, 1, text->n - start, stdout);
    puts("\"");
}

/* Takes the next line of the input; false at its end. A last line needs no line feed. */
static bool next_line(const job *j, size_t *at, const char **line, size_t *n) {
    if (*at >= j->n) return false;
    const char *feed = memchr(j->input + *at, '\n', j->n - *at);
    *line = j->input + *at;
    *n = feed ? (size_t)(feed - *line) : j->n - *at;
    *at += *n + 1;
    return true;
}

static hd_status tokenize_line(const job *j, const char *line, size_t n, uint32_t flags,
                               hd_ids *ids, hd_err *err) {
    json_error_t why;
    json_t *value = hd_json_read(line, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &why);
    if (!value) return HD_FAIL(err, HD_EINVAL, "not a JSON string: %s", why.text);
    hd_status st = json_is_string(value)
                       ? hd_tokenizer_encode(j->tokenizer, json_string_value(value),
                                             json_string_length(value), flags, ids, err)
                       : HD_FAIL(err, HD_EINVAL, "not a JSON string");
    json_decref(value);
    return st;
}

/* Reports the failure of one line, with its number. */
static hd_status fail_line(hd_status st, size_t number, const hd_err *why, hd_err *err) {
    return HD_FAIL(err, st, "standard input: line %zu: %s", number, why->msg);
}

static hd_status tokenize_lines(const job *j, uint32_t flags, hd_ids *ids, hd_err *err) {
    const char *line;
    size_t n, at = 0, number = 0;
    while (next_line(j, &at, &line, &n)) {
        hd_err why = {0};
        number++;
        ids->n = 0;
        hd_status st = tokenize_line(j, line, n, flags, ids, &why);
        if (st != HD_OK) return fail_line(st, number, &why, err);
        print_ids(ids);
    }
    return HD_OK;
}

static hd_status tokenize(const job *j, hd_err *err) {
    uint32_t flags = (j->special ? HD_ENCODE_SPECIAL : 0u) | (j->bos ? HD_ENCODE_BOS : 0u);
    hd_ids ids = {0};
    hd_err why = {0};
    hd_status st;
    if (j->json_lines) {
        st = tokenize_lines(j, flags, &ids, err);
    } else {
        st = hd_tokenizer_encode(j->tokenizer, j->input, j->n, flags, &ids, &why);
        if (st == HD_OK) print_ids(&ids);
        if (st != HD_OK) st = HD_FAIL(err, st, "standard input: %s", why.msg);
    }
    hd_ids_deinit(&ids);
    return st;
}

static size_t skip_space(const char *text, size_t n, size_t at) {
    while (at < n && (text[at] == ' ' || (text[at] >= '\t' && text[at] <= '\r'))) at++;
    return at;
}

static hd_status read_id(const job *j, const char *text, size_t n, size_t *at, hd_ids *ids,
                         hd_err *err) {
    int64_t id = 0;
    size_t start = *at, piece_n;
    while (*at < n && text[*at] >= '0' && text[*at] <= '9' && *at - start < 12) {
        id = id * 10 + (text[(*at)++] - '0');
    }
    if (*at == start || *at - start == 12) {
        return HD_FAIL(err, HD_EINVAL, "byte %zu: not a token id", start);
    }
    if (id > INT32_MAX || !hd_tokenizer_piece(j->tokenizer, (int32_t)id, &piece_n)) {
        return HD_FAIL(err, HD_EINVAL, "id %" PRId64 ", number %zu of the list, has no token",
                       id, ids->n + 1);
    }
    return hd_ids_push(ids, (int32_t)id, err);
}

/* Parses a JSON array of ids, or ids with white space between. */
static hd_status read_ids(const job *j, const char *text, size_t n, hd_ids *ids, hd_err *err) {
    size_t at = skip_space(text, n, 0);
    bool array = at < n && text[at] == '[';
    if (array) at = skip_space(text, n, at + 1);
    if (array && at < n && text[at] == ']') {
        at = skip_space(text, n, at + 1);
        if (at < n) return HD_FAIL(err, HD_EINVAL, "byte %zu: text behind the array", at);
        return HD_OK;
    }
    while (array || at < n) {
        HD_TRY(read_id(j, text, n, &at, ids, err));
        size_t behind = at;
        at = skip_space(text, n, at);
        if (!array) {
            if (at == behind && at < n) {
                return HD_FAIL(err, HD_EINVAL, "byte %zu: not a token id", at);
            }
            continue;
        }
        if (at < n && text[at] == ']') {
            at = skip_space(text, n, at + 1);
            if (at < n) return HD_FAIL(err, HD_EINVAL, "byte %zu: text behind the array", at);
            return HD_OK;
        }
        if (at >= n || text[at] != ',') {
            return HD_FAIL(err, HD_EINVAL, "byte %zu: ',' or ']' is missing", at);
        }
        at = skip_space(text, n, at + 1);
    }
    return HD_OK;
}

static hd_status detokenize_lines(const job *j, hd_ids *ids, hd_bytes *text, hd_err *err) {
    const char *line;
    size_t n, at = 0, number = 0;
    while (next_line(j, &at, &line, &n)) {
        hd_err why = {0};
        number++;
        ids->n = text->n = 0;
        hd_status st = read_ids(j, line, n, ids, &why);
        if (st == HD_OK) {
            st = hd_tokenizer_decode(j->tokenizer, ids->ids, ids->n, j->skip_special, text,
                                     &why);
        }
        if (st != HD_OK) return fail_line(st, number, &why, err);
        print_json_string(text);
    }
    return HD_OK;
}

static hd_status detokenize_whole(const job *j, hd_ids *ids, hd_bytes *text, hd_err *err) {
    hd_err why = {0};
    hd_status st = read_ids(j, j->input, j->n, ids, &why);
    if (st != HD_OK) return HD_FAIL(err, st, "standard input: %s", why.msg);
    hd_detokenizer d;
    hd_detokenizer_init(&d, j->tokenizer, j->skip_special);
    for (size_t i = 0; i < ids->n; i++) {
        HD_TRY(hd_detokenizer_push(&d, ids->ids[i], text, err));
        if (text->n < CHUNK_IDS) continue;
        fwrite(text->data, 1, text->n, stdout);
        text->n = 0;
    }
    HD_TRY(hd_detokenizer_finish(&d, text, err));
    fwrite(text->data, 1, text->n, stdout);
    return HD_OK;
}

static hd_status detokenize(const job *j, hd_err *err) {
    hd_ids ids = {0};
    hd_bytes text = {0};
    hd_status st = j->json_lines ? detokenize_lines(j, &ids, &text, err)
                                 : detokenize_whole(j, &ids, &text, err);
    hd_ids_deinit(&ids);
    hd_bytes_deinit(&text);
    return st;
}

/* the rest of the struct is filled here */
static int run_job(job *j, command_line line, int argc, char **argv,
                   hd_status (*work)(const job *, hd_err *)) {
    const positional dir = {.name = "DIR", .value = &j->dir, .kind = POSITIONAL_TEXT};
    hd_err err = {0};
    int code;
    line.positionals = &dir;
    line.n_positionals = 1;
    if (!options_parse(&line, argc, argv, &code)) return code;
    hd_status st = hd_tokenizer_open(&j->tokenizer, j->dir, &err);
    if (st == HD_OK) st = hd_stdin_read(&j->input, &j->n, INT32_MAX, &err);
    if (st == HD_OK) st = work(j, &err);
    hd_tokenizer_close(j->tokenizer);
    free(j->input);
    return st == HD_OK ? 0 : report_error(&err);
}

int cmd_tokenize(int argc, char **argv) {
    job j = {0};
    const option options[] = {
        option_flag("special", &j.special,
                    "let added tokens spelled in the text become their ids"),
        option_flag("json-lines", &j.json_lines,
                    "one JSON string per line in, one JSON array per line out"),
        option_flag("bos", &j.bos, "begin with the beginning-of-sequence token"),
    };
    const command_line line = {
        .command = "tokenize",
        .summary = "Prints the token ids of standard input as a JSON array.",
        .details =
            "DIR holds tokenizer.json and perhaps tokenizer_config.json. Without --special\n"
            "the whole text is plain text: no added token comes out, however it is spelled.",
        .options = options,
        .n_options = (int)HD_LEN(options)};
    return run_job(&j, line, argc, argv, tokenize);
}

int cmd_detokenize(int argc, char **argv) {
    job j = {0};
    const option options[] = {
        option_flag("json-lines", &j.json_lines,
                    "one JSON array per line in, one JSON string per line out"),
        option_flag("skip-special", &j.skip_special, "leave out special tokens"),
    };
    const command_line line = {
        .command = "detokenize",
        .summary = "Prints the text of the token ids on standard input.",
        .details =
            "The ids are one JSON array, or numbers with white space between. Nothing is\n"
            "added to the text; bytes that are no UTF-8 become U+FFFD.",
        .options = options,
        .n_options = (int)HD_LEN(options)};
    return run_job(&j, line, argc, argv, detokenize);
}
