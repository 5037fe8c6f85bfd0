"""Model families over one kernel interface: what is computed, in which order; never how, and never where KV lies.

A family is a file with a layer of its own, registered by architecture name.
"""
