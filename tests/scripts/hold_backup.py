"""Claims a folder of backups and keeps it for some seconds."""

import os
import sys
import time

from tfdist.backup.commit_store import CommitStore

directory, seconds = sys.argv[1], float(sys.argv[2])
CommitStore(directory).claim()
for name in os.listdir(directory):  # a copy of it, elsewhere
    open(os.path.join(directory, name)).close()
reader, writer = os.pipe()
if os.fork() == 0:  # a forked child does not hold the lock of a killed run, once it runs
    os.write(writer, b"runs")
    os.close(1)
    time.sleep(seconds)
    os._exit(0)
os.read(reader, 4)
print("held", flush=True)
time.sleep(seconds)
