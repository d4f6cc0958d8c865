/* configs.h - config files for the tests of weights: the released models, small ones, and both
 * with changed keys. Tests run in the root of the repository. */
#ifndef HD_TESTS_WEIGHTS_CONFIGS_H
#define HD_TESTS_WEIGHTS_CONFIGS_H

#include "weights/spec.h"

/* Opens tests/configs/NAME.json; fails the test if it does not open. */
hd_model_spec *config_open(const char *name);

/* Opens it after changes: the keys of a JSON object are set at the top, and one key is removed
 * (NULL: none). For refusals; the error goes to err and *out is NULL. */
hd_status config_open_changed(hd_model_spec **out, const char *name, const char *changes,
                              const char *removed, hd_err *err);

/* The same for changes that must be accepted. */
hd_model_spec *config_changed(const char *name, const char *changes);

/* Opens text as DIR/config.json, beside generation as DIR/generation_config.json (or NULL). */
hd_status config_open_text(hd_model_spec **out, const char *text, const char *generation,
                           hd_err *err);

/* Returns the file's text; free() it. */
char *config_text(const char *name);

#endif
