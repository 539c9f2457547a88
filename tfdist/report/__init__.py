"""What happened in a run: `tfdist report` reads its folder, and tells in the terminal and in a page."""
