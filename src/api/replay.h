/* replay.h - what the layers chose, as requests ask for it and replies carry it: SGLang's
 * routed_experts and indexer_topk. */
#ifndef HD_API_REPLAY_H
#define HD_API_REPLAY_H

#include "api/request.h"

/* NULL at the end */
extern const char *const api_routes_dtypes[], *const api_indexer_dtypes[];

/* Checks g.replay, g.replay_from and the forms of both kinds. */
bool api_take_replay(api_request *r);

/* Appends ,"routed_experts" or ,"indexer_topk": base64 of little-endian numbers, and their shape
 * and type. */
void api_put_replay(api_text *out, const hd_model_spec *spec, hd_replay kind,
                    const hd_replay_rows *rows, const api_replay_form *form);

#endif
