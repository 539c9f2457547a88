"""`tfdist report`: reads the folder of a run, and describes the run in the terminal and in a page."""
