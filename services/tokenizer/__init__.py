"""The tokenizer, the front door: validates requests, renders the chat template, encodes, submits to the scheduler.

It owns no request: until Journaled a request lives in its client, afterwards in the scheduler. Every figure that
clashes is answered with both numbers before any work is done for it.
"""
