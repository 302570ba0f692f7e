"""Conversations: messages and tools as chat templates read them, and the text that they become.

Data, the endpoint, the judge and evaluations read and render conversations here and nowhere else,
so that the same messages are the same tokens everywhere.
"""
