"""Models in files: any rank reads and writes just the parts that it holds."""
