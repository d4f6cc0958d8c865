/* backup.h - values of weights in a file without a name, while their memory is given back. Its space
 * goes back to the file system when they are restored, or the program ends, however it ends. */
#ifndef HD_WEIGHTS_BACKUP_H
#define HD_WEIGHTS_BACKUP_H

#include "weights/weights.h"

typedef struct hd_weights_backup hd_weights_backup;

/* HD_EINVAL: dir is no folder whose file system has files without names. */
hd_status hd_weights_backup_open(hd_weights_backup **out, const char *dir, hd_err *err);
void hd_weights_backup_close(hd_weights_backup *b); /* NULL is fine */

/* Writes what hd_weights_discard() gives back; nothing of weights that have lost tensors. HD_EAGAIN: it
 * could not be written, the file system may be full; then nothing is kept. w: of
 * hd_weights_open_updatable(). */
hd_status hd_weights_backup_save(hd_weights_backup *b, const hd_weights *w, hd_err *err);

/* Reads what was saved, if anything was, into the same memory; then no tensor is lost, and nothing is
 * kept. HD_EAGAIN: it could not be read, and the tensors stay lost. */
hd_status hd_weights_backup_restore(hd_weights_backup *b, hd_weights *w, hd_err *err);

#endif
