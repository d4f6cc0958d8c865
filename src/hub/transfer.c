/* transfer.c - one attempt to download one file: request, interpretation of the reply,
 * redirects. Redirects are followed here and not by libcurl, so that one rule applies at
 * every hop: the token is sent to the endpoint's own origin only, and https never redirects
 * to http. Messages name hosts, never complete URLs, because URLs of content networks
 * contain signatures. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "hub/hub_internal.h"

enum { MAX_REDIRECTS = 8, CONNECT_S = 20 };

/* ---- URLs ---- */

typedef struct url_parts {
    char *scheme, *host, *port;
} url_parts;

static void parts_deinit(url_parts *p) {
    curl_free(p->scheme);
    curl_free(p->host);
    curl_free(p->port);
}

static bool parts_of(url_parts *p, const char *text) {
    CURLU *url = curl_url();
    *p = (url_parts){0};
    const bool good =
        url && curl_url_set(url, CURLUPART_URL, text, 0) == CURLUE_OK &&
        curl_url_get(url, CURLUPART_SCHEME, &p->scheme, 0) == CURLUE_OK &&
        curl_url_get(url, CURLUPART_HOST, &p->host, 0) == CURLUE_OK &&
        curl_url_get(url, CURLUPART_PORT, &p->port, CURLU_DEFAULT_PORT) == CURLUE_OK;
    curl_url_cleanup(url);
    if (good && (strcmp(p->scheme, "https") == 0 || strcmp(p->scheme, "http") == 0))
        return true;
    parts_deinit(p);
    *p = (url_parts){0};
    return false;
}

bool hub_is_endpoint(const char *url) {
    url_parts p;
    const bool good = parts_of(&p, url);
    parts_deinit(&p);
    return good;
}

static bool is_own_machine(const char *host) {
    return strcmp(host, "localhost") == 0 || strcmp(host, "127.0.0.1") == 0 ||
           strcmp(host, "[::1]") == 0;
}

/* Returns whether the token may be sent to url: the endpoint's origin, encrypted or on this
 * machine. */
static bool is_trusted(const char *url, const char *endpoint) {
    url_parts a, b;
    if (!parts_of(&a, url)) return false;
    if (!parts_of(&b, endpoint)) {
        parts_deinit(&a);
        return false;
    }
    const bool same = strcmp(a.scheme, b.scheme) == 0 && strcasecmp(a.host, b.host) == 0 &&
                      strcmp(a.port, b.port) == 0;
    const bool secret = strcmp(a.scheme, "https") == 0 || is_own_machine(a.host);
    parts_deinit(&a);
    parts_deinit(&b);
    return same && secret;
}

static void host_of(char *out, size_t size, const char *url) {
    url_parts p;
    if (parts_of(&p, url)) {
        snprintf(out, size, "%s", p.host);
        parts_deinit(&p);
    } else {
        snprintf(out, size, "a malformed address");
    }
}

/* ---- the headers of a reply ---- */

/* Returns the value of a header line if it has this name, cut to fit. */
static bool header_value(char *out, size_t size, const char *line, size_t n, const char *name) {
    const size_t k = strlen(name);
    if (n <= k || strncasecmp(line, name, k) != 0 || line[k] != ':') return false;
    const char *from = line + k + 1, *end = line + n;
    while (from < end && (*from == ' ' || *from == '\t')) from++;
    while (end > from && (end[-1] == '\r' || end[-1] == '\n' || end[-1] == ' ')) end--;
    snprintf(out, size, "%.*s", (int)(end - from), from);
    return true;
}

/* Parses "DIGEST" or W/"DIGEST"; anything else is not a digest of the hub. */
static void read_etag(hub_job *job, char *text, bool linked) {
    char *from = text + (strncmp(text, "W/", 2) == 0 ? 2 : 0);
    if (*from == '"') from++;
    from[strcspn(from, "\"")] = '\0';
    if (hub_digest_kind_of(from) == HUB_NO_DIGEST || (job->etag[0] && !linked)) return;
    snprintf(job->etag, sizeof job->etag, "%s", from);
}

static size_t on_header(char *line, size_t size, size_t n, void *user) {
    hub_job *job = user;
    char value[200];
    n *= size;
    if (n > 5 && strncmp(line, "HTTP/", 5) == 0) { /* of the next reply */
        job->range_reply[0] = job->reply[0] = job->etag[0] = '\0';
        job->linked_bytes = -1;
    }
    header_value(job->range_reply, sizeof job->range_reply, line, n, "Content-Range");
    header_value(job->reply, sizeof job->reply, line, n, "X-Error-Message");
    if (header_value(value, sizeof value, line, n, "X-Linked-ETag"))
        read_etag(job, value, true);
    if (header_value(value, sizeof value, line, n, "ETag")) read_etag(job, value, false);
    if (header_value(value, sizeof value, line, n, "X-Linked-Size")) {
        job->linked_bytes = strtoll(value, NULL, 10);
    }
    return n;
}

/* ---- the body ---- */

static long status_of(const hub_job *job) {
    long status = 0;
    curl_easy_getinfo(job->easy, CURLINFO_RESPONSE_CODE, &status);
    return status;
}

static int64_t length_of(const hub_job *job) {
    curl_off_t n = -1;
    curl_easy_getinfo(job->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &n);
    return n;
}

static hd_status lies(hub_job *job, int64_t bytes) {
    return HD_FAIL(&job->err, HD_EFORMAT,
                   "%s: the server has %lld bytes of it, where the listing says %lld",
                   job->what, (long long)bytes, (long long)job->bytes);
}

/* Parses "bytes FIRST-LAST/TOTAL"; total is -1 if it is '*'. False: it has another form. */
static bool read_range(const char *text, int64_t *first, int64_t *total) {
    char *end;
    if (strncasecmp(text, "bytes ", 6) != 0 || text[6] < '0' || text[6] > '9') return false;
    *first = strtoll(text + 6, &end, 10);
    if (*end != '-' || end[1] < '0' || end[1] > '9') return false;
    const long long last = strtoll(end + 1, &end, 10);
    if (*end != '/' || last < *first) return false;
    *total = end[1] >= '0' && end[1] <= '9' ? strtoll(end + 1, &end, 10) : -1;
    return true;
}

/* Before the first byte of a good reply: checks that it is the requested range. */
static hd_status begin_body(hub_job *job) {
    job->body_begun = true;
    if (status_of(job) == 206) {
        int64_t first, total;
        if (!read_range(job->range_reply, &first, &total) || first != job->from) {
            return HD_FAIL(&job->err, HD_EFORMAT,
                           "%s: asked for bytes from %lld, the server sends '%s'", job->what,
                           (long long)job->from, job->range_reply);
        }
        return total >= 0 && job->bytes >= 0 && total != job->bytes ? lies(job, total) : HD_OK;
    }
    if (job->from > 0) { /* the server does not support ranges */
        job->from = 0;
        HD_TRY(job->sink->restart(job, &job->err));
    }
    const int64_t length = length_of(job);
    return length >= 0 && job->bytes >= 0 && length != job->bytes ? lies(job, length) : HD_OK;
}

static size_t on_body(char *bytes, size_t size, size_t n, void *user) {
    hub_job *job = user;
    const long status = status_of(job);
    n *= size;
    if (status != 200 && status != 206) return n; /* the body of an error or a redirect */
    if (!job->body_begun && begin_body(job) != HD_OK) return 0;
    if (job->bytes >= 0 && job->from + job->got + (int64_t)n > job->bytes) {
        lies(job, job->from + job->got + (int64_t)n);
        return 0;
    }
    if (job->sink->take(job, bytes, n, &job->err) != HD_OK) return 0;
    job->got += (int64_t)n;
    job->failures = 0;
    return n;
}

/* ---- an attempt ---- */

static bool add_header(hub_job *job, const char *line) {
    struct curl_slist *more = curl_slist_append(job->headers, line);
    if (more) job->headers = more;
    return more != NULL;
}

static bool set_headers(hub_job *job) {
    const char *token = job->options->token;
    curl_slist_free_all(job->headers);
    job->headers = NULL;
    if (!add_header(job, "User-Agent: hadal/" HD_VERSION)) return false;
    if (!token || !is_trusted(job->url, job->options->endpoint)) return true;
    const size_t n = strlen(token) + sizeof "Authorization: Bearer ";
    char *line = malloc(n);
    if (line) snprintf(line, n, "Authorization: Bearer %s", token);
    const bool added = line && add_header(job, line);
    free(line);
    return added;
}

hd_status hub_job_start(hub_job *job, hd_err *err) {
    char range[40];
    job->got = 0;
    job->body_begun = false;
    job->err = (hd_err){0};
    job->linked_bytes = -1;
    if (!job->easy) job->easy = curl_easy_init();
    if (!job->easy || !job->url || !set_headers(job)) {
        return HD_FAIL(err, HD_ENOMEM, "no memory for a connection");
    }
    CURL *easy = job->easy;
    curl_easy_reset(easy);
    snprintf(range, sizeof range, "%lld-", (long long)job->from);
    const CURLcode set[] = {
        curl_easy_setopt(easy, CURLOPT_URL, job->url),
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, job->headers),
        curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1),
        curl_easy_setopt(easy, CURLOPT_RANGE, job->from > 0 ? range : NULL),
        curl_easy_setopt(easy, CURLOPT_NOBODY, (long)job->head),
        curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header),
        curl_easy_setopt(easy, CURLOPT_HEADERDATA, job),
        curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body),
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, job),
        curl_easy_setopt(easy, CURLOPT_PRIVATE, job),
        curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L),
        curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S),
        curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L),
        curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, (long)job->options->stall_s),
        job->options->ca_file ? curl_easy_setopt(easy, CURLOPT_CAINFO, job->options->ca_file)
                              : CURLE_OK,
    };
    for (size_t i = 0; i < HD_LEN(set); i++) {
        if (set[i] != CURLE_OK) {
            return HD_FAIL(err, HD_EIO, "%s: %s", job->what, curl_easy_strerror(set[i]));
        }
    }
    return HD_OK;
}

/* ---- the result of an attempt ---- */

static hub_outcome fail(hub_job *job, hd_status st, const char *why) {
    char host[256];
    host_of(host, sizeof host, job->url);
    const char *token = job->options->token;
    const bool quotes_token = token && strstr(job->reply, token);
    HD_FAIL(&job->err, st, "%s: %s %s%s%s", job->what, host, why,
            job->reply[0] && !quotes_token ? ": " : "", quotes_token ? "" : job->reply);
    return st == HD_EAGAIN ? HUB_TRY_AGAIN : HUB_FAILED;
}

static hub_outcome redirect(hub_job *job) {
    char *next = NULL;
    url_parts from, to;
    curl_easy_getinfo(job->easy, CURLINFO_REDIRECT_URL, &next);
    if (!next) return fail(job, HD_EFORMAT, "redirects to nowhere");
    if (++job->redirects > MAX_REDIRECTS) return fail(job, HD_EFORMAT, "redirects without end");
    if (!parts_of(&to, next)) return fail(job, HD_EFORMAT, "redirects to no http address");
    const bool secure = parts_of(&from, job->url) && strcmp(from.scheme, "https") == 0;
    const bool downgrade = secure && strcmp(to.scheme, "https") != 0;
    parts_deinit(&from);
    parts_deinit(&to);
    if (downgrade) return fail(job, HD_EFORMAT, "redirects from https to http: refused");
    char *copy = strdup(next);
    if (!copy) return fail(job, HD_ENOMEM, "redirects, and there is no memory for it");
    free(job->url);
    job->url = copy;
    return HUB_REDIRECTED;
}

static const char *unauthorized(const hub_job *job) {
    if (!job->options->token) {
        return "answers 401: there is no such model, or it is private: set HF_TOKEN";
    }
    return is_trusted(job->url, job->options->endpoint)
               ? "answers 401: it does not accept the token"
               : "answers 401, and is not sent the token: that goes to HF_ENDPOINT's own host "
                 "alone, by https";
}

static hub_outcome refused(hub_job *job, long status) {
    char why[64];
    curl_off_t wait_s = 0;
    switch (status) {
    case 401:
        return fail(job, HD_EINVAL, unauthorized(job));
    case 403:
        return fail(job, HD_EINVAL,
                    "answers 403: no access; accept the model's terms on its page, and set "
                    "HF_TOKEN to a token of that account");
    case 404:
        return fail(job, HD_EINVAL, "answers 404: there is no such model, revision or file");
    case 408:
    case 429:
    case 500:
    case 502:
    case 503:
    case 504:
        curl_easy_getinfo(job->easy, CURLINFO_RETRY_AFTER, &wait_s);
        job->wait_ns = wait_s > 0 ? (int64_t)wait_s * 1000000000 : 0;
        snprintf(why, sizeof why, "answers %ld", status);
        return fail(job, HD_EAGAIN, why);
    default:
        snprintf(why, sizeof why, "answers %ld", status);
        return fail(job, HD_EIO, why);
    }
}

/* Returns whether a second attempt cannot help. */
static bool is_final(CURLcode code) {
    switch ((int)code) {
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_OUT_OF_MEMORY:
        return true;
    default:
        return false;
    }
}

static hub_outcome broken(hub_job *job, CURLcode code) {
    char why[160];
    snprintf(why, sizeof why, "after %lld bytes: %s", (long long)(job->from + job->got),
             code == CURLE_OPERATION_TIMEDOUT ? "no answer or no data any more"
                                              : curl_easy_strerror(code));
    return fail(job, is_final(code) ? HD_EIO : HD_EAGAIN, why);
}

static hub_outcome take_reply(hub_job *job) {
    if (!job->body_begun && begin_body(job) != HD_OK) return HUB_FAILED; /* an empty file */
    if (job->bytes >= 0 && job->from + job->got < job->bytes)
        return broken(job, CURLE_PARTIAL_FILE);
    const hd_status st = job->sink->end(job, &job->err);
    return st == HD_OK ? HUB_DONE : st == HD_EAGAIN ? HUB_TRY_AGAIN : HUB_FAILED;
}

hub_outcome hub_job_finish(hub_job *job, CURLcode code) {
    const long status = status_of(job);
    if (job->err.status != HD_OK) return HUB_FAILED; /* stopped by this program */
    if (code != CURLE_OK) return broken(job, code);
    if (job->head && job->etag[0] && status < 400) {
        if (job->linked_bytes < 0 && status == 200) job->linked_bytes = length_of(job);
        return HUB_DONE;
    }
    if (status >= 300 && status < 400) return redirect(job);
    if (job->head && status == 200) return fail(job, HD_EFORMAT, "gives no digest of it");
    if (status == 200 || status == 206) return take_reply(job);
    if (status == 416 &&
        job->from > 0) { /* the file is shorter than what we have: begin anew */
        if (job->sink->restart(job, &job->err) != HD_OK) return HUB_FAILED;
        return fail(job, HD_EAGAIN, "answers 416");
    }
    return refused(job, status);
}

void hub_job_rest(hub_job *job) {
    curl_easy_cleanup(job->easy);
    curl_slist_free_all(job->headers);
    free(job->url);
    job->easy = NULL;
    job->headers = NULL;
    job->url = NULL;
}

void hub_job_deinit(hub_job *job) {
    hub_job_rest(job);
    free(job->home);
    job->home = NULL;
}
