"""The scheduler: owns the requests, the logical KV, the batch of each step and the journal; never touches a tensor.

The engine is pure (`events` says what goes in and out, `engine` is where it begins); the shell around it does the
IO. It decides nothing about bytes: the worker moves and computes them, the store keeps them.
"""
