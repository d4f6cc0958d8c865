/* model_path.h - resolves the model argument of a command: a directory, or a name in the
 * hub's cache. */
#ifndef HD_CLI_MODEL_PATH_H
#define HD_CLI_MODEL_PATH_H

#include "base/status.h"

typedef enum model_part {
    MODEL_WHOLE,  /* a folder with config.json, weights and tokenizer */
    MODEL_TEXT,   /* a folder with a tokenizer or a chat encoding */
    MODEL_CONFIG, /* such a folder, or a config.json itself */
} model_part;

/* An existing path is unchanged; ORG/NAME or ORG/NAME@REVISION becomes the folder of the
 * Hugging Face cache, valid until the program ends. Anything that is certainly wrong (a GGUF
 * file, a file of weights alone, a folder without config.json) is refused; the error says what
 * it is and what to do. */
hd_status model_path_find(const char **path, model_part part, hd_err *err);

#endif
