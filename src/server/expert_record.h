/* expert_record.h - expert records in a folder, between /start_expert_distribution_record and
 * /dump_expert_distribution_record. The ticker writes them while the engine runs; until its dump
 * a file's name ends in .part. */
#ifndef HD_SERVER_EXPERT_RECORD_H
#define HD_SERVER_EXPERT_RECORD_H

#include "engine/engine.h"

typedef struct expert_record expert_record;

expert_record *expert_record_new(const char *dir, hd_record_mode mode); /* dir NULL: refused */
void expert_record_free(expert_record *r);                              /* NULL is fine */

/* Begins a record, in place of one that was not dumped. */
hd_status expert_record_start(expert_record *r, hd_engine *e, hd_err *err);
hd_status expert_record_stop(expert_record *r, hd_engine *e, hd_err *err);

/* Ends the record; then its file is complete once expert_record_is_dumped(). HD_EINVAL without a
 * record. */
hd_status expert_record_dump(expert_record *r, hd_engine *e, hd_err *err);
/* *err is set if the file could not be written. */
bool expert_record_is_dumped(expert_record *r, hd_err *err);

/* Writes what the engine has recorded. One thread calls it. */
void expert_record_tick(expert_record *r, hd_engine *e);

#endif
