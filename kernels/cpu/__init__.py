"""The exact CPU kernels: C sources, what builds and loads them, and the weights' packed form.

    csrc/         the kernels; lanes.h is the 16-lane machine that every instruction set plays, bit for bit alike
    build.py      one shared library for each instruction set; run by set-up
    library.py    the library that fits this CPU
    packing.py    weights as the kernels read them

Owns arithmetic on plain arrays; knows no torch, no model, no request.
"""
