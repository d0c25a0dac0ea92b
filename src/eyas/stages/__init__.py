"""One short module a DVC stage: read files, call the wings, write files, report numbers."""
