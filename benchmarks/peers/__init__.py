"""The training steps that `benchmarks/train_step.py` compares, a module each, and their batches.

`batch` has what all of them read, `eyas_step`, `specforge_step` and `speculators_step` a class
`Step` each, `worker` runs one of them in a process of its own. Theirs run in .venv-peers.
"""
