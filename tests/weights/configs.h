/* configs.h - config files for the tests of weights: the released models, small ones, and
 * either with some keys changed. Tests run from the root of the repository. */
#ifndef HD_TESTS_WEIGHTS_CONFIGS_H
#define HD_TESTS_WEIGHTS_CONFIGS_H

#include "weights/spec.h"

/* tests/configs/NAME.json; fails the test when it does not open. */
hd_model_spec *config_open(const char *name);

/* The same after changes: a JSON object whose keys are set at the top, and a key to remove or
 * NULL. For refusals; the error goes to err and *out is NULL. */
hd_status config_open_changed(hd_model_spec **out, const char *name, const char *changes,
                              const char *removed, hd_err *err);

/* As above, for changes that must be accepted. */
hd_model_spec *config_changed(const char *name, const char *changes);

/* Opens text as DIR/config.json, beside generation as DIR/generation_config.json (or NULL). */
hd_status config_open_text(hd_model_spec **out, const char *text, const char *generation,
                           hd_err *err);

/* The file's text, to be freed. */
char *config_text(const char *name);

#endif
