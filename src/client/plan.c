/* plan.c - what a load asks and when: every length, time and word depends on (seed, level, place)
 * alone, so a run is the same on every machine and against every server. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "client/client_internal.h"

typedef enum draw { DRAW_INPUT, DRAW_OUTPUT, DRAW_ARRIVAL, DRAW_PREFIX, DRAW_WORDS } draw;

enum { MOST_WORDS = 1 << 24, SAMPLE_LEVEL = 1 << 20 };

/* Common words, mostly one token each. */
static const char *const words[] = {
    "time",    "year",   "people", "way",    "day",     "man",     "thing",    "woman",
    "life",    "child",  "world",  "school", "state",   "family",  "group",    "country",
    "hand",    "part",   "place",  "case",   "week",    "company", "system",   "program",
    "work",    "number", "night",  "point",  "home",    "water",   "room",     "mother",
    "area",    "money",  "story",  "fact",   "month",   "lot",     "right",    "study",
    "book",    "eye",    "job",    "word",   "side",    "kind",    "head",     "house",
    "friend",  "father", "power",  "hour",   "game",    "line",    "end",      "member",
    "law",     "car",    "city",   "name",   "team",    "minute",  "idea",     "body",
    "back",    "face",   "level",  "office", "door",    "health",  "art",      "war",
    "history", "party",  "result", "change", "morning", "reason",  "research", "girl",
    "boy",     "moment", "air",    "force",  "paper",   "music",   "food",     "river",
    "stone",   "light",  "green",  "small",  "large",   "early",   "young",    "open",
    "clear",   "strong", "simple"};

/* Word number `at` of what is drawn for (what, index). */
static uint32_t draw_word(const client_load *load, draw what, int64_t index, int64_t at) {
    const uint64_t high =
        (uint64_t)what + ((uint64_t)load->level << 3) + ((uint64_t)index << 32);
    return hd_philox_at((uint64_t)load->seed, high, (uint64_t)at).v[0];
}

static int64_t draw_range(const client_load *load, draw what, int64_t index, int32_t turn,
                          client_range r) {
    const uint64_t span = (uint64_t)(r.high - r.low) + 1;
    return r.low + (int64_t)(draw_word(load, what, index, turn) % span);
}

int64_t plan_input(const client_load *load, int64_t conversation, int32_t turn) {
    return draw_range(load, DRAW_INPUT, conversation, turn, turn ? load->turn : load->input);
}

int64_t plan_output(const client_load *load, int64_t conversation, int32_t turn) {
    return draw_range(load, DRAW_OUTPUT, conversation, turn, load->output);
}

double plan_gap(const client_load *load, int64_t conversation) {
    if (load->rate <= 0 || conversation == 0) return 0;
    return -log((double)hd_philox_unit(draw_word(load, DRAW_ARRIVAL, conversation, 0))) /
           load->rate;
}

/* ---- prompts ---- */

/* Whose words the place `at` of a first prompt has: its group's, then its own. */
static uint32_t prompt_word(const client_load *load, int64_t conversation, int32_t turn,
                            int64_t at, int64_t prefix) {
    if (turn == 0 && at < prefix) {
        return draw_word(load, DRAW_PREFIX, conversation % load->groups, at);
    }
    return draw_word(load, DRAW_WORDS, conversation, ((int64_t)turn << 32) + at);
}

static char *write_words(const client_load *load, int64_t conversation, int32_t turn, int64_t n,
                         int64_t prefix) {
    enum { LONGEST = 10 };
    char *text = malloc((size_t)n * LONGEST + 1);
    size_t used = 0;
    if (!text) return NULL;
    for (int64_t at = 0; at < n; at++) {
        const uint32_t drawn = prompt_word(load, conversation, turn, at, prefix);
        const char *word = words[drawn % HD_LEN(words)];
        const size_t length = strlen(word);
        if (used || turn) text[used++] = ' ';
        memcpy(text + used, word, length);
        used += length;
    }
    text[used] = '\0';
    return text;
}

static int64_t words_of(const client_load *load, double tokens) {
    const double n = round(tokens / load->tokens_per_word);
    return n < 1 ? 1 : n > MOST_WORDS ? MOST_WORDS : (int64_t)n;
}

char *plan_text(const client_load *load, int64_t conversation, int32_t turn, int64_t tokens) {
    const double around = turn ? 0 : load->template_tokens;
    const int64_t prefix = load->prefix ? words_of(load, (double)load->prefix - around) : 0;
    return write_words(load, conversation, turn, words_of(load, (double)tokens - around),
                       prefix);
}

json_t *plan_ids(const client_load *load, int64_t conversation, int64_t tokens) {
    json_t *ids = json_array();
    for (int64_t at = 0; at < tokens; at++) {
        const uint32_t drawn = prompt_word(load, conversation, 0, at, load->prefix);
        const json_int_t id = drawn % (uint32_t)load->token_ids;
        if (json_array_append_new(ids, json_integer(id)) != 0) {
            json_decref(ids);
            return NULL;
        }
    }
    return ids;
}

char *plan_sample(const client_load *load, int64_t n) {
    client_load other = *load;
    other.level = SAMPLE_LEVEL;
    return write_words(&other, n, 0, n, 0);
}
