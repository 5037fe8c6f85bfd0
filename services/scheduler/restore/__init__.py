"""Load or compute: what measured curves say about the quickest way to a prefix that the store holds. Pure.

Owns what was measured (`curve`, `rates`) and the decision (`policy`). Never touches a request, a block, a clock.
"""
