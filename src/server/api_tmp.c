/* api_tmp.c - placeholders. */
#include "server/api_endpoints.h"
void api_responses(http_call *c, void *s) {(void)c;(void)s;}
void api_get_response(http_call *c, void *s) {(void)c;(void)s;}
void api_openapi(http_call *c, void *s) {(void)c;(void)s;}
