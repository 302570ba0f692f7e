r"""A tool server of the Model Context Protocol, and a reward for what comes of its use: the model
answers products, and may ask `multiply`.

    python -m hybridrl.main data=jsonl data.path=products.jsonl environment.name=mcp \
        "environment.options.servers={calculator: {command: [python, examples/mcp_tool.py]}}" \
        environment.options.column=tools reward.function=examples/mcp_tool.py:right

A row is `{"prompt": "12*34=", "answer": "408", "tools": ["calculator"]}`. A server that is started
by a command serves one episode; for one that takes long to start, run it as a service and give its
`url` instead.
"""


def right(response: str, answer: str) -> float:
    """Whether the last thing that was said is the answer."""
    return float(response.strip().endswith(answer))


def serve() -> None:
    from mcp.server import MCPServer

    server = MCPServer("calculator")

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """The product of two numbers."""
        return a * b

    server.run()


if __name__ == "__main__":
    serve()
