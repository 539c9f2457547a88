"""Events of a worker: the newest few thousand in memory, in a file when the worker fails, stalls or is asked."""
