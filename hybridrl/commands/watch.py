def add_parser(commands): pass
def run(chosen): return 0
