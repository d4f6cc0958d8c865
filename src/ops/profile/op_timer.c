/* op_timer.c - times queued operators by events; see op_timer.h. */
#include "ops/profile/op_timer.h"

/* An interval between two events; a graph's first launch would also measure its upload. */
typedef struct interval {
    hd_device_event *begin, *end;
    hd_graph *graph; /* of all copies; NULL: queued one by one */
} interval;

static hd_status open_interval(interval *t, hd_stream *s, hd_device *d, hd_timed_fn *fn,
                               void *arg, int32_t copies, hd_err *err) {
    HD_TRY(hd_device_event_open(&t->begin, d, true, err));
    HD_TRY(hd_device_event_open(&t->end, d, true, err));
    if (!hd_device_has_graphs(d)) return HD_OK;
    hd_stream_begin_capture(s);
    for (int32_t i = 0; i < copies; i++) fn(s, arg);
    return hd_stream_end_capture(s, &t->graph, err);
}

static hd_status run(interval *t, hd_stream *s, hd_timed_fn *fn, void *arg, int32_t copies,
                     hd_err *err) {
    hd_stream_record_event(s, t->begin);
    if (t->graph) hd_stream_launch(s, t->graph);
    for (int32_t i = 0; i < copies && !t->graph; i++) fn(s, arg);
    hd_stream_record_event(s, t->end);
    return hd_stream_sync(s, err);
}

hd_status hd_time_ops(hd_stream *s, hd_device *d, hd_timed_fn *fn, void *arg, int32_t copies,
                      int32_t rounds, double *seconds, hd_err *err) {
    interval t = {0};
    hd_status st = hd_stream_sync(s, err); /* an earlier failure is not counted */
    if (st == HD_OK) st = open_interval(&t, s, d, fn, arg, copies, err);
    for (int32_t round = -1; round < rounds && st == HD_OK; round++) {
        st = run(&t, s, fn, arg, copies, err);
        if (st == HD_OK && round >= 0) {
            seconds[round] = hd_device_event_seconds(t.begin, t.end) / copies;
        }
    }
    hd_graph_close(t.graph);
    hd_device_event_close(t.begin);
    hd_device_event_close(t.end);
    return st;
}
