"""Exact ids: prompts rendered, replies rebuilt, checked and mixed.

In: prompts and responses. Out: samples (ids and reply spans), violations, the training mixture.
Edges: codecs and tokenizers (a target's folder). Pure: rebuild, checks, audit, mixture.
"""
