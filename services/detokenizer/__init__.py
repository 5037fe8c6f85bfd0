"""The detokenizer: turns journaled tokens into text and streams it to attached clients.

It owns nothing that can't be derived again: tokens, openings and finishes come from the scheduler (by replay after
any restart), text and stops follow from them. It never decides when a request ends, except by finding a stop string.
"""
