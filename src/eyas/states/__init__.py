"""The states wing: the target model, its answers and its hidden states.

In: a target's source and samples. Out: a target folder, sampled ids, a store of hidden states.
Edges: sources, folder, gguf, tiny, target, store (files), sampler (threads). The rest is pure.
"""
