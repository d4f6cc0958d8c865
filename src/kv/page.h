/* page.h - numbers of pages: types that the compiler keeps apart. Both are n of a pool, from 0 on; -1: none.
 * Which page of its tokens a page is, is neither. */
#ifndef HD_KV_PAGE_H
#define HD_KV_PAGE_H

#include <stdint.h>

/* Of the KV pools, with the number that block tables have of it. HiSparse's mirror has these numbers too, although
 * it lies in host memory. */
typedef struct hd_device_page {
    int32_t n;
} hd_device_page;

/* Of the host tier (hd_kv_host_page()). */
typedef struct hd_host_page {
    int32_t n;
} hd_host_page;

#endif
