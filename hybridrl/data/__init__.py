"""The rows a job learns from: reading them, tokenizing them and handing them out step by step.

`files` reads rows, `prompts`, `supervised` and `preferences` turn them into a `Batch` of token ids
(chats by `chat`), `loader` deals them out step by step, and `tasks` holds the built-in problems
that need no file; `sources` puts this together by the settings. Nothing is imported here, so that a
program that only needs one of them pays for that one.
"""
