"""One supervised pool of child processes, for reward functions and for environments.

`pool.ProcessPool` gives items of work to processes and outlives whatever happens in them; `child`
serves items inside of a process; `launcher` starts a process and ends all that it leaves behind.
The rooms above bring a program: what it loads, how it runs an item, and what its failures mean.
"""
