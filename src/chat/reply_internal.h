/* reply_internal.h - shared by the files of the reply parser. The parser keeps the whole
 * reply in raw[n]; everything before pos is processed. A state is a function that reads
 * raw[pos, n) and either advances or asks for more bytes. It decides only what no further
 * byte could change, so the slicing does not matter. */
#ifndef HD_CHAT_REPLY_INTERNAL_H
#define HD_CHAT_REPLY_INTERNAL_H

#include "chat/reply.h"

/* --- reply_json.c: is this JSON, byte by byte --- */

enum { REPLY_JSON_DEPTH = 1024 };

typedef struct reply_json {
    uint8_t state;
    bool in_key;
    uint8_t n_hex;
    const char *rest; /* of true, false, null */
    int32_t depth;
    uint8_t is_object[REPLY_JSON_DEPTH / 8]; /* [depth] bits */
} reply_json;

void reply_json_init(reply_json *j);
bool reply_json_byte(reply_json *j, uint8_t c);    /* false: no JSON begins like this */
bool reply_json_closed(const reply_json *j);       /* an array or object has just ended */
bool reply_json_valid(const char *text, size_t n); /* the whole text is one value */

/* --- the parser --- */

typedef enum reply_state {
    REPLY_IN_CONTENT,
    REPLY_IN_REASONING,
    REPLY_IN_BLOCK,     /* between calls */
    REPLY_IN_BODY,      /* DSML: inside an invoke, between parameters */
    REPLY_IN_VALUE,     /* DSML: a parameter's value */
    REPLY_IN_TYPE,      /* V3: up to the separator */
    REPLY_IN_NAME,      /* V3: up to the fence; V3.1: up to the separator */
    REPLY_BEFORE_JSON,  /* V3, V3.1: the fence */
    REPLY_IN_JSON,      /* arguments as a JSON object, in any format */
    REPLY_AFTER_JSON,   /* V3, V3.1: up to the end of the call */
    REPLY_IN_LOST_CALL, /* V3, V3.1: a call that is text, up to its end */
    REPLY_N_STATES
} reply_state;

typedef enum reply_mode {               /* what the bytes of the present call become */
                          REPLY_HEADER, /* nothing yet: its name is not known */
                          REPLY_CALL,
                          REPLY_BLANK, /* nothing: it has no name */
                          REPLY_TEXT
} reply_mode;

typedef enum reply_match { REPLY_NO, REPLY_PART, REPLY_YES } reply_match;

typedef enum reply_word {
    REPLY_FUNCTION_CALLS,
    REPLY_TOOL_CALLS,
    REPLY_CALLS,
    REPLY_INVOKE,
    REPLY_PARAMETER
} reply_word;

/* How a DSML tag is written. REPLY_TRUE is the format's own way; the others are also read. */
typedef enum reply_spelling {
    REPLY_TRUE,
    REPLY_FULL,  /* as the format has it, but not by the token that it wants */
    REPLY_ASCII, /* |DSML| */
    REPLY_BARE   /* no DSML at all */
} reply_spelling;

typedef struct reply_tag {
    reply_word word;
    reply_spelling spelling;
    bool close;
    bool spaced; /* a blank after the DSML token */
    size_t n;    /* bytes up to and with the word */
} reply_tag;

typedef struct reply_attrs { /* of an invoke or a parameter tag */
    size_t name, name_n;     /* in raw */
    size_t end;              /* in raw, after '>' */
    bool has_string, string;
    bool quoted;   /* the name holds a quote: then the tag must be as it should */
    bool too_long; /* the name: why it did not match */
} reply_attrs;

typedef enum reply_mark_kind {
    REPLY_MARK_EOS,
    REPLY_MARK_THINK,
    REPLY_MARK_END_THINK,
    REPLY_MARK_BLOCK, /* opens a block of calls */
    REPLY_MARK_TAG,   /* any other DSML tag */
    REPLY_MARK_CALL,  /* V3: opens a call */
    REPLY_MARK_CALL_END,
    REPLY_MARK_BLOCK_END
} reply_mark_kind;

typedef struct reply_mark {
    reply_mark_kind kind;
    size_t at, n; /* in raw */
    reply_tag tag;
} reply_mark;

typedef struct reply_name {
    uint32_t hash;
    size_t at, n; /* at: from the start of the call */
} reply_name;

struct hd_reply {
    hd_reply_options opt;
    hd_reply_sink *sink;
    void *user;
    hd_status status; /* the first failure is final */
    hd_err *err;      /* of the feed or finish under way */

    char *raw; /* [cap] */
    size_t n, cap;
    uint8_t *special; /* [cap / 8] bits: the byte is of a special token; NULL unless flagged */
    size_t pos;
    size_t scan; /* from here on nothing was scanned; ignored if not above pos */
    reply_state state;
    bool ended;           /* no more bytes come */
    bool finished;        /* and everything is emitted */
    bool skip_space;      /* white space after a block is ignored */
    bool stray;           /* text between calls is under way */
    bool tools;           /* calls are looked for */
    size_t checked_space; /* white space up to here has been checked */
    bool any_content;
    hd_finish_reason reason;

    /* the present call */
    reply_mode mode;
    size_t call_start;
    size_t name, name_n;
    const hd_reply_tool *tool; /* NULL: unknown */
    int32_t n_begun;
    size_t n_arguments; /* bytes */
    bool args_over;     /* they became longer than allowed */
    bool json_done;     /* its arguments came as one JSON object */
    reply_json json;
    int32_t n_params;
    bool value_is_string;
    reply_spelling value_spelling;
    bool value_exact; /* its tag is as the format has it */
    reply_name params[HD_REPLY_MAX_PARAMS];

    /* text on its way out */
    char *held_args; /* whole_calls: the arguments so far */
    size_t held_n, held_cap;
    hd_reply_event_kind out_kind;
    size_t out_n;
    char out[1024];
    uint8_t utf8[4];
    uint8_t utf8_n, utf8_need, utf8_low, utf8_high;
};

typedef bool reply_state_fn(hd_reply *r); /* false: wants more bytes */

static inline bool reply_is_space(char c) {
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static inline bool reply_is_dsml(const hd_reply *r) {
    return r->opt.format >= HD_REPLY_V32;
}

/* Whether the format has a blank after the DSML token. */
static inline bool reply_is_spaced(const hd_reply *r) {
    return r->opt.format == HD_REPLY_V41;
}

/* --- reply.c --- */

/* The text up to the next marker becomes events of this kind. If hold is set, the white
 * space before the marker is excluded and pos is its beginning. The probe is called at every
 * '<'. */
typedef reply_match reply_probe(const hd_reply *r, size_t at, reply_mark *mark);
/* The end of sentence stands at raw[at]. */
void reply_at_eos(hd_reply *r, size_t at);
/* The end of the white space at pos; false when more of it may come. */
bool reply_space(hd_reply *r, size_t *end);
/* Between calls: true with a mark at pos, false when there is none yet. */
bool reply_next_in_block(hd_reply *r, reply_probe *probe, reply_mark *mark);
void reply_leave_block(hd_reply *r);
/* Strictly, the white space at pos is one LF, or two if allow_two is set. */
void reply_check_space(hd_reply *r, size_t end, bool allow_two);

/* --- reply_match.c --- */

reply_match reply_literal(const hd_reply *r, size_t at, const char *text);
/* A literal that must consist of special bytes if tokens are flagged. */
reply_match reply_token(const hd_reply *r, size_t at, const char *text);
reply_match reply_eos(const hd_reply *r, size_t at);
/* Outside a block a spelling that is not the format's is looked at only where it would open
 * a block. */
reply_match reply_dsml_tag(const hd_reply *r, size_t at, bool in_block, reply_tag *tag);
/* Optional white space and '>' at raw[at]; *end is behind it. */
reply_match reply_tag_end(const hd_reply *r, size_t at, size_t *end);
/* The rest of an invoke or parameter tag, from behind its word. */
reply_match reply_tag_attrs(const hd_reply *r, size_t at, reply_word word, reply_attrs *out);
const hd_reply_tool *reply_find_tool(const hd_reply *r, size_t name, size_t n);

reply_probe reply_probe_content, reply_probe_reasoning;
reply_probe reply_probe_dsml; /* a tag in any spelling, or the end of sentence */
reply_probe reply_probe_v3;   /* a marker of a call, or the end of sentence */

/* --- reply_emit.c --- */

void reply_put(hd_reply *r, hd_reply_event_kind kind, const char *text, size_t n);
void reply_flush(hd_reply *r);
void reply_end_text(hd_reply *r); /* a character begun will not become whole */
/* A failure in strict parsing. */
void reply_note(hd_reply *r, hd_reply_note note);

void reply_call_open(hd_reply *r); /* a call starts at pos; its name is to come */
/* The name is raw[name, name + n). The call begins, or it turns into text. */
void reply_call_name(hd_reply *r, size_t name, size_t n);
void reply_args(hd_reply *r, const char *text, size_t n); /* as they are; without effect */
void reply_args_escaped(hd_reply *r, const char *text, size_t n); /* unless it is a call */
void reply_args_end_string(hd_reply *r);
void reply_call_complete(hd_reply *r); /* also ends a call that is none */
void reply_call_cut(hd_reply *r);
/* The call becomes content, from its start up to pos and on. */
void reply_call_lost(hd_reply *r, hd_reply_note why);
/* Advances pos; in a call that became text, the bytes are content. */
void reply_consume_to(hd_reply *r, size_t to);

/* --- the states of calls --- */

reply_state_fn reply_dsml_block, reply_dsml_body, reply_dsml_value;
reply_state_fn reply_v3_block, reply_v3_type, reply_v3_name, reply_v3_before_json,
    reply_v3_after_json, reply_v3_lost_call;
reply_state_fn reply_json_arguments;

#endif
