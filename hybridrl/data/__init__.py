"""Prompts and examples: reading rows, tokenizing them, handing them out step by step.

`files` reads rows, `prompts` and `supervised` turn them into a `Batch` of token ids, `loader` deals
them out, and `tasks` holds the built-in problems that need no file. Nothing is imported here, so
that a program that only needs one of them pays for that one.
"""
