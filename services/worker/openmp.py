"""How long OpenMP's threads spin at a barrier before they sleep. Call before torch is imported.

A step has about 200 parallel regions with short gaps between them: threads that sleep at once are woken 200 times.
Threads that spin for long keep a core from the process that it needs: with the default, a decode step beside other
busy processes became 10 to 30 times slower. 2,000 turns are about 30 us: most gaps of a step, and no time slice.
SmolLM2 in fp32 on two cores of an AVX2 machine, ms a decode step of 1 / 8 rows: 57 / 87 with 0, 45 / 64 with 2,000,
44 / 60 with 20,000, 41 / 63 with the default.
"""

import os

SPINS = 2000


def settle_openmp() -> None:
    """Sets GOMP_SPINCOUNT unless the user has."""
    os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
