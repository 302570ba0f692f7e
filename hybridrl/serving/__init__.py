"""The HTTP endpoint of a rollout replica: programs call it as OpenAI's API, and it keeps exactly
the tokens that were sampled.

A `ReplicaEndpoint` listens, a `RequestExchange` brings requests to the thread of the engine and
replies back, an `AgentSession` keeps what an episode sampled, `template_chat` and `renderer_chat`
turn messages into tokens and tokens into messages, and an `AgentGenerator` plays a batch of rows
through all of it.
"""
