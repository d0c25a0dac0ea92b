"""The prompts wing: it turns upstream rows into the prompts that are sent and the held-out ones.

In: rows of a file, an installed wheel or the hub. Out: `Prompt` records, a reason for each loss.
Pure: all but `sources` (files, packages, network). `schemas` has the table of upstream forms,
`selection` chooses among parsed rows, `screening` refuses near-duplicates and evaluation text.
"""
