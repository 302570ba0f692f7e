"""What a run shows of itself: advice, timeline, the report page and the live page. Reads run
folders, never a running object."""
