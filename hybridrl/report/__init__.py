"""Reports of runs: advice, timeline, report page and live page, made from run folders, never from a
running object."""
