/* page.h - routes of the web page, whose files are embedded in the program. */
#ifndef HD_SERVER_PAGE_H
#define HD_SERVER_PAGE_H

#include "http/http.h"

/* "/" and "/page/NAME". Their handlers need no server argument. */
extern const http_route page_routes[];
extern const size_t page_n_routes;

#endif
