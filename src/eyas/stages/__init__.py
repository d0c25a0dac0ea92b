"""One short module a DVC stage: read parameters and files, call the wings, write files, report numbers."""
