"""Training the drafter, measuring it, and writing it in the form that servers load.

In: hidden states of samples with their loss masks, the target's frozen embeddings and head. Out: a
drafter folder, its curves, acceptance. Edges: checkpoint, config, export, progress; the rest: pure.
"""
