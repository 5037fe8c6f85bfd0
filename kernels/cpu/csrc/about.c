/* What a library says of itself. */
#include "lanes.h"
#include "perdure_cpu.h"

#ifndef PD_SOURCES
#error "build.py defines PD_SOURCES"
#endif

const char *pd_sources(void) { return PD_SOURCES; }

const char *pd_isa(void) { return PD_ISA; }
