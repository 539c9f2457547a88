"""Writes commits without end and prints the step of each, from the newest whole one on."""

import sys

import numpy as np

from tfdist.backup.commit_store import CommitStore, Draft

store = CommitStore(sys.argv[1])
store.claim()
newest = store.newest_whole()
step = newest.step if newest else 0
while True:
    step += 1
    draft = Draft(sys.argv[1], "abc", step)
    files = {f"{i}": draft.write(f"{i}", [np.full(30000, step + i, np.int64).data.cast("B")]) for i in range(4)}
    store.commit(draft, {"files": files, "workers": 1}, keep=2)
    print(step, flush=True)
