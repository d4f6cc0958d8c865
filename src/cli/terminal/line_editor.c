/* line_editor.c - see line_editor.h. Uses libedit on a terminal, getline otherwise. */
#include "cli/terminal/line_editor.h"

#include <errno.h>
#include <histedit.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <termios.h>
#include <unistd.h>

#include "cli/terminal/terminal_guard.h"

enum { HISTORY_LINES = 1000 };

struct line_editor {
    EditLine *el; /* NULL: no terminal */
    History *history;
    char *history_file;
    char prompt[16];
    char *line;
    size_t cap;
};

static char *prompt_of(EditLine *el) {
    line_editor *l;
    el_get(el, EL_CLIENTDATA, &l);
    return l->prompt;
}

static hd_status open_terminal(line_editor *l, hd_err *err) {
    HistEvent event;
    struct termios modes;
    if (tcgetattr(STDIN_FILENO, &modes) == 0) terminal_guard_modes(STDIN_FILENO, &modes);
    l->el = el_init("hadal", stdin, stdout, stderr);
    l->history = history_init();
    if (!l->el || !l->history) return HD_FAIL(err, HD_ENOMEM, "no memory for line editing");
    history(l->history, &event, H_SETSIZE, HISTORY_LINES);
    history(l->history, &event, H_SETUNIQUE, 1);
    if (l->history_file) history(l->history, &event, H_LOAD, l->history_file);
    el_set(l->el, EL_CLIENTDATA, l);
    el_set(l->el, EL_PROMPT, prompt_of);
    el_set(l->el, EL_EDITOR, "emacs");
    el_set(l->el, EL_HIST, history, l->history);
    el_source(l->el, NULL); /* the user's own .editrc, if there is one */
    /* Between two lines the terminal itself edits. It would take a Ctrl-D typed there as the
     * end of the file, and the next line would begin with a NUL. */
    el_set(l->el, EL_SETTY, "-x", "eof=", NULL);
    return HD_OK;
}

hd_status line_editor_open(line_editor **out, const char *history, hd_err *err) {
    *out = NULL;
    line_editor *l = calloc(1, sizeof *l);
    if (!l) return HD_FAIL(err, HD_ENOMEM, "no memory for line editing");
    hd_status st = HD_OK;
    if (history && !(l->history_file = strdup(history))) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for line editing");
    }
    if (st == HD_OK && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO))
        st = open_terminal(l, err);
    if (st == HD_OK) {
        *out = l;
    } else {
        line_editor_close(l);
    }
    return st;
}

void line_editor_close(line_editor *l) {
    HistEvent event;
    if (!l) return;
    if (l->history && l->history_file) history(l->history, &event, H_SAVE, l->history_file);
    if (l->history) history_end(l->history);
    if (l->el) el_end(l->el);
    terminal_guard_modes(STDIN_FILENO, NULL);
    free(l->history_file);
    free(l->line);
    free(l);
}

static line_read ended(void) {
    if (errno != EINTR) return LINE_END;
    clearerr(stdin);
    return LINE_INTERRUPTED;
}

static line_read read_terminal(line_editor *l, const char **line) {
    HistEvent event;
    int n;
    errno = 0;
    const char *text = el_gets(l->el, &n);
    if (!text || n <= 0) {
        if (errno == EINTR) el_reset(l->el);
        return ended();
    }
    if ((size_t)n + 1 > l->cap) {
        char *grown = realloc(l->line, (size_t)n + 1);
        if (!grown) return LINE_END;
        l->line = grown;
        l->cap = (size_t)n + 1;
    }
    memcpy(l->line, text, (size_t)n + 1);
    l->line[strcspn(l->line, "\r\n")] = '\0';
    if (*l->line) history(l->history, &event, H_ENTER, l->line);
    *line = l->line;
    return LINE_READ;
}

static line_read read_plain(line_editor *l, const char **line) {
    errno = 0;
    if (getline(&l->line, &l->cap, stdin) < 0) return ended();
    l->line[strcspn(l->line, "\r\n")] = '\0';
    *line = l->line;
    return LINE_READ;
}

line_read line_editor_read(line_editor *l, const char *prompt, const char **line) {
    snprintf(l->prompt, sizeof l->prompt, "%s", prompt);
    return l->el ? read_terminal(l, line) : read_plain(l, line);
}
