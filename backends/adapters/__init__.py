"""Environments that people have, as ours: tool calls of a chat model, the package verifiers, servers of OpenEnv."""
