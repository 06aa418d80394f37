"""Conversations of several turns: chat formats, tools, environments, and the processes in which users' code runs."""
