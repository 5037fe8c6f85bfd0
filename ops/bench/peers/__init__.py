"""Other engines beside ours, each in an environment of its own: `make bench-peers`.

The modules of the peers run in their environments, too, so at import they need nothing but the standard library.
"""
