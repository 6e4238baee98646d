"""`trimtab serve`: the runs of a folder in a browser, live. Reads run folders and writes nothing; needs no torch.

- command.py: what the command does: checks, uvicorn, the end on Ctrl-C
- app.py, answers.py: routes; shell.py: the page, its script and style; threads.py: work beside the event loop
- access.py: who may ask: known host names, the token, no foreign origins
- scan.py: which runs there are, and their ids; files.py: files that may be read, none that a link puts outside the folder
- heads.py: the list of runs; pages.py, judged.py: one run; looks.py, kept.py: what is kept of runs
- tail.py: what was appended to a file; stream.py: the events of a run, as they happen
- columns.py: metrics as float32 columns; samples.py, search.py: completions of a step, and those that hold a text
- explorer.py, question.py: what a run would take with other settings
"""
