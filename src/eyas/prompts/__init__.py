"""The prompts wing: it turns upstream rows into the prompts that are sent and the held-out ones.

In: rows of a file, an installed wheel or the hub. Out: `Prompt` records, a reason for each loss.
Pure: `schemas`, `selection`. Edge: `sources` (files, packages, network).
"""
