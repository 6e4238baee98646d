"""`trimtab watch`: a run, or all runs of a folder, live in a terminal. Reads files only and imports no torch."""
