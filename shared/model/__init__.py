"""Reading models from disk: headers, configuration, tokenizer source, weights and their digest.

Turns a directory or file into plain descriptions and arrays; computes nothing and owns no device memory.
"""
