"""The rows a job learns from: reading them, tokenizing them and handing them out step by step.

`data_files` reads rows; `prompts`, `supervised_tokens`, `preference_pairs` and
`labelled_responses` turn them into a `Batch` of token ids (chats by `chat_renderer`);
`prompt_loader` deals them out step by step, and `tasks` holds the built-in problems that need no
file; `datasets` puts this together by the settings. Nothing is imported here, so that a program
that only needs one of them pays for that one.
"""
