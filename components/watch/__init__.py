"""`leeway watch`: a local page over run folders that live, are finished or died.

    metrics.jsonl, rollouts/, spans/, logs/ --> StageIndex (a thread, lowest priority) --> server (Starlette) --> page/

Everything is read from files that the run appends to; nothing is asked of the run, and nothing is written into its
folder. What is read once is kept as an index under the user's cache folder, so memory does not grow with the run.
"""
